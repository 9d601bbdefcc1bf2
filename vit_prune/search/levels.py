"""What a search may set in one block, and how strong each setting can be.

Four knobs: keep (Columns), r (ToMe), heads and channels (L1: how many are removed, the weakest first).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vit_prune.methods.base import MethodConfig
from vit_prune.methods.columns import Columns
from vit_prune.methods.l1 import CHANNEL_GROUP, L1, PrunePlan, Taylor
from vit_prune.methods.tome import ToMe
from vit_prune.methods.units import channel_units, head_units, num_channels
from vit_prune.prune import composed, plan_of

KEEP = (1.0, 0.75, 0.5, 0.3)
MERGED = (0.0, 0.03, 0.06)  # of the patches of the image, per block
CUT_CHANNELS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75)

PLACES = 24  # of a curve, about: more would take longer to go through, and reach no nearer
STEP = 0.15  # of a knob's range: how far exchanges look
GRAIN = {"keep": 0.01, "r": 1, "heads": 1, "channels": CHANNEL_GROUP}  # the finest step of each knob

Searchable = MethodConfig | L1


class Setting(NamedTuple):
    """Of one block: the keep ratio, tokens merged, heads and channels removed."""

    keep: float = 1.0
    r: int = 0
    heads: int = 0
    channels: int = 0


State = tuple[Setting, ...]  # one Setting per block


def knobs_of(methods: Sequence[Searchable]) -> tuple[str, ...]:
    """The knobs that the methods turn. Raises: TypeError for what is no method; ValueError for two of one kind, for methods without a knob."""
    knobs: list[str] = []
    for method in methods:
        if isinstance(method, Columns):
            if method.rule != "topk":
                raise ValueError(f"a search turns keep, and the rule {method.rule} takes tau: give Columns of the rule topk")
            knobs.append("keep")
        elif isinstance(method, ToMe):
            knobs.append("r")
        elif isinstance(method, Taylor):
            raise ValueError("a search ranks heads and channels by L1: give L1, and let vp.prune rank by Taylor")
        elif isinstance(method, L1):
            knobs += [knob for knob, share in (("heads", method.heads), ("channels", method.mlp)) if share]
        elif not isinstance(method, MethodConfig):
            raise TypeError(f"methods must be configs such as ToMe(), Columns(...) or L1(...), got {method!r}")
    if not knobs:
        raise ValueError("nothing to search: give ToMe(), Columns(...), L1(...) or several of them")
    if len(set(knobs)) < len(knobs):
        raise ValueError("a method is given twice")
    return tuple(knobs)


def levels_of(model: nn.Module, knobs: Sequence[str], num_patches: int) -> dict[str, tuple[float, ...]]:
    """The values at which each knob is measured, from nothing to strong."""
    num_heads = min(block.attn.num_heads for block in model.blocks)
    channels = min(num_channels(block.mlp) for block in model.blocks) if "channels" in knobs else 0
    values = {
        "keep": KEEP,
        "r": tuple(dict.fromkeys(round(share * num_patches) for share in MERGED)),
        "heads": tuple(range(1 + num_heads // 2)),
        "channels": tuple(int(share * channels) // CHANNEL_GROUP * CHANNEL_GROUP for share in CUT_CHANNELS),
    }
    return {knob: values[knob] for knob in knobs}


def finer(knob: str, values: Sequence[float], losses: Sequence[float]) -> list[tuple[float, float]]:
    """(value, loss) at some two dozen values that the knob can take between these; losses are interpolated, and rise."""
    curve, worst, span = {rounded(knob, values[0]): 0.0}, 0.0, abs(values[-1] - values[0])
    for here in range(1, len(values)):
        first, last = values[here - 1], values[here]
        parts = max(1, round(abs(last - first) / max(GRAIN[knob], span / PLACES)))
        for part in range(1, parts + 1):
            worst = max(worst, losses[here - 1] + (losses[here] - losses[here - 1]) * part / parts)
            curve.setdefault(rounded(knob, first + (last - first) * part / parts), worst)
    return list(curve.items())


def neighbours(knob: str, levels: Sequence[float], value: float) -> list[float]:
    """A little weaker and a little stronger than a value, inside of the levels' range."""
    step = max(GRAIN[knob], abs(levels[-1] - levels[0]) * STEP)
    low, high = min(levels[0], levels[-1]), max(levels[0], levels[-1])
    others = (rounded(knob, min(max(value + sign * step, low), high)) for sign in (-1, 1))
    return [other for other in others if other != value]


def uniform(levels: Mapping[str, Sequence[float]], strengths: Mapping[str, float], depth: int) -> State:
    """Every block alike: each knob at a share of its range, 0 for nothing and 1 for its strongest level."""
    values = {knob: rounded(knob, levels[knob][0] + min(1.0, share) * (levels[knob][-1] - levels[knob][0])) for knob, share in strengths.items()}
    return (Setting(**values),) * depth


def rounded(knob: str, value: float) -> float:
    """A value that the knob can take."""
    if knob == "keep":
        return round(value, 4)
    return int(value) // CHANNEL_GROUP * CHANNEL_GROUP if knob == "channels" else round(value)


class Order(NamedTuple):
    """Heads and channels of one block, the weakest first."""

    heads: Tensor
    channels: Tensor


def orders_of(model: nn.Module, knobs: Sequence[str]) -> list[Order]:
    """By L1, for what the knobs cut."""
    nothing = torch.zeros(0, dtype=torch.long)
    return [
        Order(
            head_units(block.attn).magnitudes().argsort(stable=True) if "heads" in knobs else nothing,
            channel_units(block.mlp).magnitudes().argsort(stable=True) if "channels" in knobs else nothing,
        )
        for block in model.blocks
    ]


def plan_from(model: nn.Module, state: State, orders: Sequence[Order]) -> PrunePlan | None:
    """The plan that cuts what the state says, in the numbering of the original model; None where it cuts nothing."""
    if not any(setting.heads or setting.channels for setting in state):
        return None
    plans = []
    for block, before, setting, order in zip(model.blocks, plan_of(model).blocks, state, orders, strict=True):
        counts = block.attn.num_heads, num_channels(block.mlp)
        gone = set(order.heads[: setting.heads].tolist()), set(order.channels[: setting.channels].tolist())
        kept = [tuple(unit for unit in range(count) if unit not in lost) for count, lost in zip(counts, gone, strict=True)]
        plans.append(composed(before, (kept[0], kept[1])))
    return PrunePlan(tuple(plans))
