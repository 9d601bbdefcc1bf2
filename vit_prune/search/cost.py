"""What a state costs, as a share of the unpruned model: by MACs, or by time measured on this machine."""

import copy
from functools import cache

import torch
from torch import nn

from vit_prune.fuse import fuse
from vit_prune.measure.clock import clock_for
from vit_prune.measure.latency import paired_latency
from vit_prune.measure.macs import BlockCounter, macs
from vit_prune.measure.result import BlockMacs
from vit_prune.methods.stack import prune_stacks
from vit_prune.methods.state import Tokens
from vit_prune.methods.units import num_channels
from vit_prune.search.bench import Bench
from vit_prune.search.levels import Setting, State

PROJECTIONS, ATTENTION, OVERHEAD = ("q", "kv", "gate", "proj", "mlp"), ("qk", "av"), ("bias", "selection")
BY_HEADS = ("q", "kv", "qk", "av", "gate", "proj", "bias")  # the selection's own counts are told how many heads are left
RUNS, WARMUP = 15, 3


class MacsCost:
    """Closed-form MACs, as those of the cut model."""

    def __init__(self, bench: Bench, img_size: tuple[int, int]) -> None:
        self.bench, model = bench, bench.model
        bench.set(bench.dense)
        counted = macs(model, img_size)
        self.num_tokens, self.outside, self.whole = counted.num_tokens, counted.outside, counted.dense
        self.counter, self.priced = BlockCounter(model), cache(self._priced)

    def share(self, state: State) -> float:
        """Of the unpruned model's cost."""
        return (self.outside + sum(self.blocks(state))) / self.whole

    def blocks(self, state: State) -> list[float]:
        """Each block's cost, at the tokens that the blocks before have left."""
        costs, left = [], self.num_tokens
        for index, setting in enumerate(state):
            cost, merged = self.priced(index, left, setting)
            costs.append(cost)
            left -= merged
        return costs

    def _priced(self, index: int, num_tokens: int, setting: Setting) -> tuple[float, int]:
        """The cost of one block, and tokens merged away."""
        parts, merged = self.parts(index, num_tokens, setting)
        return self.price(parts, num_tokens, setting), merged

    def price(self, parts: dict[str, float], num_tokens: int, setting: Setting) -> float:
        """Of one block."""
        return sum(parts.values())

    def parts(self, index: int, num_tokens: int, setting: Setting) -> tuple[dict[str, float], int]:
        """MACs by part, and tokens merged away."""
        block = self.bench.model.blocks[index]
        stack = block.attn.prune
        stack.tome.r = setting.r
        heads_left = block.attn.num_heads - setting.heads
        stack.tome.num_heads = heads_left
        for method in stack.choosers:
            method.keep_ratio, method.num_heads = setting.keep, heads_left
        counted: BlockMacs = self.counter(index, num_tokens)
        heads = heads_left / block.attn.num_heads
        channels = 1 - setting.channels / num_channels(block.mlp) if setting.channels else 1.0
        shares = {**dict.fromkeys(BY_HEADS, heads), "mlp": channels}
        return {part: count * shares.get(part, 1.0) for part, count in counted.parts.items()}, counted.num_merged


class LatencyCost(MacsCost):
    """Milliseconds of one image: a linear function of a block's MACs, fitted to blocks that were timed on this machine, fused, in turn."""

    def __init__(self, bench: Bench, img_size: tuple[int, int], plain: nn.Module) -> None:
        super().__init__(bench, img_size)
        self.plain, self.image = plain, torch.randn(1, getattr(plain, "in_chans", 3), *img_size).to(next(plain.parameters()))
        self.clock = clock_for(self.image.device)
        self._fit()

    def price(self, parts: dict[str, float], num_tokens: int, setting: Setting) -> float:
        return float(self.rates @ self._features(parts, num_tokens, setting))

    @staticmethod
    def _features(parts: dict[str, float], num_tokens: int, setting: Setting) -> torch.Tensor:
        sums = [sum(parts[part] for part in kind) / 1e9 for kind in (PROJECTIONS, ATTENTION, OVERHEAD)]
        return torch.tensor([*sums, num_tokens / 1e3, 1.0, float(setting.keep < 1), float(setting.r > 0)], dtype=torch.float64)

    @torch.no_grad()
    def _fit(self) -> None:
        middle = len(self.plain.blocks) // 2
        settings = timed_settings(self)
        calls = {"dense": lambda: self.plain(self.image)}
        block, x = self.plain.blocks[middle], torch.randn(1, self.num_tokens, self.plain.embed_dim).to(self.image)
        calls["block"] = lambda: block(x)
        for num_tokens, setting in settings:
            calls[f"{num_tokens} {setting}"] = self._call(middle, num_tokens, setting)
        times = paired_latency(calls, runs=RUNS, warmup=WARMUP, clock=self.clock).medians_ms
        whole, one = times["dense"], times["block"]
        measured = torch.tensor([times[f"{num_tokens} {setting}"] for num_tokens, setting in settings], dtype=torch.float64)
        rows = torch.stack([self._features(self.parts(middle, num_tokens, setting)[0], num_tokens, setting) for num_tokens, setting in settings])
        self.rates = not_negative(rows, measured)
        self.outside, self.whole = max(0.0, whole - one * len(self.plain.blocks)), whole

    def _call(self, index: int, num_tokens: int, setting: Setting):
        """A fused copy of one block at so many tokens."""
        self.bench.set((setting,) * len(self.bench.dense))
        holder = nn.ModuleList([copy.deepcopy(self.bench.model.blocks[index])]).eval()
        block, x = fuse(holder)[0], torch.randn(1, num_tokens, self.plain.embed_dim).to(self.image)
        return lambda: block(x, Tokens(sizes=None if num_tokens == self.num_tokens else torch.ones(1, num_tokens, device=x.device)))

    @torch.no_grad()
    def measure(self, found: nn.Module) -> float:
        """Time of the found model over that of the unpruned one, in turn: the median of the ratios."""
        fast = copy.deepcopy(found).eval()
        fast = fuse(fast) if prune_stacks(fast) else fast
        timed = paired_latency({"found": lambda: fast(self.image), "dense": lambda: self.plain(self.image)}, runs=2 * RUNS + 1, warmup=WARMUP, clock=self.clock)
        return timed.ratio("found", "dense").median


def timed_settings(cost: MacsCost) -> list[tuple[int, Setting]]:
    """What is timed: fewer tokens, fewer columns, and merges, as the bench's methods allow."""
    prefix = cost.bench.model.num_prefix_tokens
    patches = cost.num_tokens - prefix
    has_columns = bool(cost.bench.model.blocks[0].attn.prune.choosers)
    settings = [Setting(), Setting(r=max(1, patches // 25))]
    if has_columns:
        settings += [Setting(keep=0.75), Setting(keep=0.5), Setting(keep=0.3), Setting(keep=0.6, r=max(1, patches // 25))]
    return [(prefix + round(share * patches), setting) for share in (1.0, 0.8, 0.6) for setting in settings]


def not_negative(rows: torch.Tensor, measured: torch.Tensor) -> torch.Tensor:
    """Least squares of relative errors with coefficients >= 0: the most negative one is fixed at 0 until none is left."""
    rows, target = rows / measured[:, None], torch.ones_like(measured)
    used = [column for column in range(rows.shape[1]) if rows[:, column].any()]
    while True:
        solution = torch.linalg.lstsq(rows[:, used], target[:, None]).solution[:, 0]
        if solution.min() >= 0:
            return torch.zeros(rows.shape[1], dtype=rows.dtype).index_put((torch.tensor(used),), solution)
        used.pop(int(solution.argmin()))
