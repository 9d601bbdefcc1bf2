"""Which method, or which mix of them, at which strength in which block: `vp.search(model, loader, target="macs:0.7", methods=[...])`."""

import copy
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from vit_prune.calibrate import calibrate
from vit_prune.measure.macs import macs
from vit_prune.methods.base import MethodConfig
from vit_prune.methods.budgetformer import BudgetFormer
from vit_prune.patch.check import check_host
from vit_prune.prune import check_blocks
from vit_prune.search.bench import FIDELITIES, Batch, Bench
from vit_prune.search.cost import LatencyCost, MacsCost
from vit_prune.search.found import Found, architecture, configured, load_found, needs_calibration
from vit_prune.search.greedy import CannotReach, Curves, descend, evenly
from vit_prune.search.levels import Searchable, Setting, State, finer, knobs_of, levels_of, neighbours, orders_of, plan_from

__all__ = ["Found", "Search", "load_found", "search"]

WEIGHTS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of one knob against the others
CLOSE = 0.01  # a measured ratio of time is near enough to its target
CORRECTIONS = 4
MISSED = 0.03  # beyond this a user is told
RADII = (1.0, 0.5, 0.25)  # of exchanges, as shares of the way to the neighbours


def search(
    model: nn.Module,
    loader: Iterable,
    target: str,
    methods: Searchable | Sequence[Searchable],
    *,
    fidelity: str = "features",
    exchanges: int = 3,
) -> Found:
    """The settings of `methods` that lose least at a cost, one for each block.

    First each setting of each block is tried alone; then, by what it loses for what it saves, the best moves are taken one after the other until the
    target is reached, for several weights between the methods, each method alone among them; the best of these states, by what it really loses,
    is improved by exchanges between blocks. Under a MACs target nothing of it is random.

    Args:
        model: a timm ViT as for `patch`, not patched; it is not changed, but gets a calibration where a method needs one and there is none.
        loader: batches of images [B, C, H, W] of one size, or (images, labels): held in memory, and run some hundred times.
        target: "macs:0.7", the share of the unpruned model's MACs, everything counted; "latency:0.8", the share of its time at batch 1, measured here.
        methods: templates of ToMe and Columns, whose r and keep are searched, and L1, whose heads and mlp are if they are not 0; others stay as given.
        fidelity: what is lost. "features": 1 - cosine of the patches' features to the unpruned model's; "logits": the divergence of its predictions;
            "labels": cross-entropy that is added.
        exchanges: rounds in which blocks and methods give to each other what they need more.

    Raises: ValueError for a target that cannot be read or reached, and for a loader without batches, or without the labels that are asked for.
    """
    return Search(model, loader, methods, fidelity=fidelity).find(target, exchanges=exchanges)


class Search:
    """What each setting loses alone, measured once; `find` may then be asked for several targets."""

    def __init__(self, model: nn.Module, loader: Iterable, methods: Searchable | Sequence[Searchable], *, fidelity: str = "features") -> None:
        self.methods = list(methods) if isinstance(methods, Sequence) else [methods]
        self.knobs = knobs_of(self.methods)
        check_host(model)
        check_blocks(model, [("heads" in self.knobs, "channels" in self.knobs)] * len(model.blocks))
        self.fidelity, self.batches = fidelity, batches_of(model, loader, fidelity)
        macs(model, tuple(self.batches[0][0].shape[-2:]))  # which says no to images of another size than the model's
        configs = [method for method in self.methods if isinstance(method, MethodConfig)]
        if "heads" in self.knobs and any(isinstance(config, BudgetFormer) for config in configs):
            raise ValueError("L1 and BudgetFormer both decide which heads there are: give L1(heads=0) beside BudgetFormer, or search one of the two")
        if needs_calibration(configs) and not getattr(model, "calibration", None):
            calibrate(model, self.batches)
        self.model, self.orders = model, orders_of(model, self.knobs)
        self.bench = Bench(model, configs, self.batches, self.orders, fidelity)
        self.img_size = tuple(self.batches[0][0].shape[-2:])
        self.macs = MacsCost(self.bench, self.img_size)
        self.curves = self._curves()

    def _curves(self) -> Curves:
        """What each knob of each block loses alone, at every level."""
        levels = self.levels = levels_of(self.model, self.knobs, self.macs.num_tokens - self.model.num_prefix_tokens)
        keys = [(knob, block) for block in range(len(self.model.blocks)) for knob in self.knobs]
        changes = [(block, self.bench.dense[block]._replace(**{knob: value})) for knob, block in keys for value in levels[knob][1:]]
        losses = iter(self.measured(self.bench.dense, changes, "each setting alone"))
        return {(knob, block): finer(knob, levels[knob], [0.0, *(next(losses) for _ in levels[knob][1:])]) for knob, block in keys}

    def measured(self, state: State, changes: list[tuple[int, Setting]], what: str) -> list[float]:
        """What the model loses in `state` with one block set otherwise, for each change; with a bar that says what."""
        with progress(what, total=len(changes) * len(self.batches)) as bar:
            return self.bench.single_losses(state, changes, bar.update)

    def find(self, target: str, *, exchanges: int = 3) -> Found:
        """The state that loses least at the target, as a recipe. Raises: ValueError as `search`."""
        kind, share = parse_target(target)
        if exchanges < 0:
            raise ValueError(f"exchanges must be at least 0, got {exchanges}")
        if kind == "macs":
            return self._found(target, self._best(self.macs, share, exchanges), self.macs)
        cost = LatencyCost(self.bench, self.img_size, copy.deepcopy(self.model).eval())
        return self._corrected(target, cost, share, exchanges)

    def _corrected(self, target: str, cost: LatencyCost, share: float, exchanges: int) -> Found:
        """Blocks that were timed alone do not quite add up to a model: what is asked of them is corrected by what the whole model then takes."""
        asked, tried = share, []
        for _ in range(CORRECTIONS):
            try:
                state = self._best(cost, asked, exchanges if not tried else 0)
            except CannotReach:
                if not tried:
                    raise
                break
            found = self._found(target, state, cost)
            tried.append(found)
            if abs(found.measured - share) <= CLOSE:
                break
            asked *= share / found.measured
        best = min(tried, key=lambda found: abs(found.measured - share))
        if abs(best.measured - share) > MISSED:
            reason = "a busy machine, or methods that save no time here"
            warnings.warn(f"the nearest to {target} that was found measures {best.measured:.3f}: {reason}", stacklevel=3)
        return best

    def _found(self, target: str, state: State, cost: MacsCost) -> Found:
        methods, plan = configured(self.methods, state), plan_from(self.model, state, self.orders)
        name = architecture(self.model)
        found = Found(methods=methods, plan=plan, target=target, share=cost.share(state), loss=0.0, fidelity=self.fidelity, model=name)
        is_stale = plan is not None and needs_calibration(methods)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the calibration was of the model before pruning")
            pruned = found.apply(copy.deepcopy(self.model), self.batches if is_stale else None).eval()
        measured = cost.measure(pruned) if isinstance(cost, LatencyCost) else None
        return replace(found, loss=self.bench.loss_of(pruned), measured=measured)  # of the recipe itself: on the bench what is cut is only silent

    def _best(self, cost: MacsCost, target: float, exchanges: int) -> State:
        """The best of several weights between the knobs, with blocks alike and by what each loses alone; then improved."""
        tried: dict[State, float] = {}
        depth, reasons = len(self.model.blocks), []
        ways = [lambda weights: evenly(cost, self.levels, target, weights, depth), lambda weights: descend(cost, self.curves, target, weights)]
        mixes = [(way, weights) for way in ways for weights in mixtures(self.knobs)]
        with progress("mixes", total=len(mixes)) as bar:
            for way, weights in mixes:
                try:
                    self._try(way(weights), tried)
                except CannotReach as error:
                    reasons.append(error)
                bar.update()
        if not tried:
            raise reasons[-1]
        best = min(tried, key=tried.get)
        for _ in range(exchanges):
            best = self._exchanged(cost, target, best, tried)
        return best

    def _try(self, state: State, tried: dict[State, float]) -> float:
        if state not in tried:
            tried[state] = self.bench.loss(state)
        return tried[state]

    def _exchanged(self, cost: MacsCost, target: float, state: State, tried: dict[State, float]) -> State:
        """Measure what each knob would win and lose a little to either side, and descend again between these; the better state of the two."""
        around = {(knob, block): neighbours(knob, self.levels[knob], getattr(state[block], knob)) for knob, block in self.curves}
        changes = [(block, state[block]._replace(**{knob: value})) for (knob, block), values in around.items() for value in values]
        losses = iter(self.measured(state, changes, "exchanges"))
        sides = {key: [next(losses) for _ in values] for key, values in around.items()}
        for radius in RADII:
            local = {key: self._local(key, state, around[key], sides[key], tried[state], radius) for key in around}
            try:
                other = descend(cost, local, target, dict.fromkeys(self.knobs, 1.0))
            except CannotReach:
                continue
            if self._try(other, tried) < tried[state]:
                return other
        return state

    def _local(
        self, key: tuple[str, int], state: State, values: Sequence[float], losses: Sequence[float], here: float, radius: float
    ) -> list[tuple[float, float]]:
        """The curve of one knob between its neighbours, drawn in to a radius around where it is."""
        knob, block = key
        now = getattr(state[block], knob)
        points = [(now, here), *((now + radius * (value - now), here + radius * (loss - here)) for value, loss in zip(values, losses, strict=True))]
        points.sort(reverse=knob == "keep")
        return finer(knob, [value for value, _ in points], [loss - points[0][1] for _, loss in points])


def mixtures(knobs: Sequence[str]) -> list[dict[str, float]]:
    """Weights between the knobs: each alone, and each heavier and lighter than the others."""
    alone = [{knob: 1.0} for knob in knobs]
    mixed = [dict.fromkeys(knobs, 1.0) | {knob: weight} for knob in (knobs[:1] if len(knobs) == 2 else knobs) for weight in WEIGHTS if len(knobs) > 1]
    return [*alone, *(one for place, one in enumerate(mixed) if one not in mixed[:place])]


def progress(what: str, total: int | None = None):
    """A bar on the terminal, where there is one."""
    from tqdm import tqdm  # timm brings it

    return tqdm(total=total, desc=what, file=sys.stderr, disable=None, leave=False)


def parse_target(target: str) -> tuple[str, float]:
    """Raises: ValueError for anything but macs:SHARE and latency:SHARE, 0 < SHARE < 1."""
    kind, _, text = str(target).partition(":")
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if kind not in ("macs", "latency") or not 0 < share < 1:
        raise ValueError(f"target must be macs:SHARE or latency:SHARE with a share of the unpruned model's between 0 and 1, e.g. macs:0.7, got {target!r}")
    return kind, share


def batches_of(model: nn.Module, loader: Iterable, fidelity: str) -> list[Batch]:
    """The loader's batches, on the model's device. Raises: ValueError as `search`."""
    if fidelity not in FIDELITIES:
        raise ValueError(f"fidelity must be one of {', '.join(FIDELITIES)}, got {fidelity!r}")
    like = next(model.parameters())
    batches = []
    for batch in loader:
        if not isinstance(batch, (Tensor, tuple, list)) or not len(batch):
            raise ValueError(f"the loader must give batches of images, or (images, labels), got a {type(batch).__name__}")
        images, labels = (batch, None) if isinstance(batch, Tensor) else (batch[0], batch[1] if len(batch) > 1 else None)
        if images.ndim != 4 or not images.is_floating_point():
            raise ValueError(f"the loader must give batches of float images [B, C, H, W], got {images.dtype} {tuple(images.shape)}")
        batches.append((images.to(like.device, like.dtype), labels if labels is None else labels.to(like.device)))
    if not batches:
        raise ValueError("the loader gave no batch: nothing to search on")
    if len({images.shape[-2:] for images, _ in batches}) > 1:
        raise ValueError("the images must be of one size: what a state costs depends on it")
    if fidelity != "features" and not model.num_classes:
        raise ValueError(f"fidelity {fidelity} needs a classifier, and this model has none: take features")
    if fidelity == "labels" and any(labels is None for _, labels in batches):
        raise ValueError("fidelity labels needs batches (images, labels)")
    if fidelity == "labels" and max(int(labels.max()) for _, labels in batches) >= model.num_classes:
        raise ValueError(f"the labels go beyond the {model.num_classes} classes of the model")
    return batches
