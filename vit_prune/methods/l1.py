"""Structured pruning: how many heads and MLP channels go, which by their scores, and the plan that says so.

L1: *Pruning Filters for Efficient ConvNets* (arXiv 1608.08710). Taylor: *Importance Estimation for Neural Network Pruning* (arXiv 1906.10771).
Legend: a unit is one head or one MLP channel; it is removed alone (heads) or in groups of 8 (channels). Scores [units], one tensor per block.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from numbers import Real

import torch
from torch import Tensor

RANKINGS = ("uniform", "global")
HEAD_GROUP, CHANNEL_GROUP = 1, 8
ROUNDING = 1e-9  # .29 * 100 is 28.999999999999996


@dataclass(frozen=True)
class Structured:
    """What `vp.prune` removes.

    Args:
        heads, mlp: the share of the heads and of the MLP channels that is removed, in [0, 1), not both 0; of what the model has now. Rounded
            down to whole heads and to multiples of 8 channels; one head and 8 channels stay in every block.
        ranking: "uniform" removes that share in every block; "global" the weakest over all blocks, by scores over their block's mean.
    """

    heads: float = 0.25
    mlp: float = 0.5
    ranking: str = "uniform"

    def __post_init__(self) -> None:
        for name in ("heads", "mlp"):
            share = getattr(self, name)
            if isinstance(share, bool) or not isinstance(share, Real) or not 0 <= share < 1:
                raise ValueError(f"{name} is the share that is removed, in [0, 1), got {share!r}")
        if not self.heads and not self.mlp:
            raise ValueError("heads and mlp are both 0: nothing would be removed")
        if self.ranking not in RANKINGS:
            raise ValueError(f"ranking must be one of {', '.join(RANKINGS)}, got {self.ranking!r}")


class L1(Structured):
    """Score: the mean |w| of a head's rows of q, k, v and columns of proj; of a channel's rows of fc1 (two where it is gated) and column of fc2."""


class Taylor(Structured):
    """Score: (sum of w * dL/dw)^2 over the same weights and their biases, added up over the batches of a loader: first order in the weights."""


@dataclass(frozen=True)
class BlockPlan:
    """What one block keeps, in the numbering of the original model: the heads of num_heads, the channels of num_channels.

    num_channels is 0 where the MLP is of no kind that can be cut.
    """

    num_heads: int
    heads: tuple[int, ...]
    num_channels: int
    channels: tuple[int, ...]

    def __post_init__(self) -> None:
        for kept, total, what in ((self.heads, self.num_heads, "heads"), (self.channels, self.num_channels, "channels")):
            numbers = isinstance(kept, tuple) and all(isinstance(index, int) for index in (total, *kept))
            if not numbers or list(kept) != sorted(set(kept) & set(range(total))) or (total and not kept):
                raise ValueError(f"{what} of a plan must be rising numbers below num_{what}, {total!r}, at least one; got {kept!r:.80}")


@dataclass(frozen=True)
class PrunePlan:
    """What each block of a pruned model keeps. Pruning again gives one plan, still in the numbering of the original model."""

    blocks: tuple[BlockPlan, ...]

    def to_dict(self) -> dict:
        """JSON-able: {"blocks": [{"num_heads": 6, "heads": [0, 2], "num_channels": ..., "channels": [...]}, ...]}."""
        return {"blocks": [{name: list(value) if isinstance(value, tuple) else value for name, value in asdict(block).items()} for block in self.blocks]}

    @classmethod
    def from_dict(cls, data: Mapping) -> "PrunePlan":
        """What `to_dict` gave. Raises: ValueError that names what is wrong."""
        names = {field.name for field in fields(BlockPlan)}
        blocks = data.get("blocks") if isinstance(data, Mapping) else None
        if not isinstance(blocks, list) or not all(isinstance(block, Mapping) and block.keys() == names for block in blocks):
            raise ValueError(f"a prune plan is {{'blocks': [{{{', '.join(sorted(names))}}}, ...]}}, got {data!r:.80}")
        return cls(tuple(BlockPlan(**{name: tuple(value) if isinstance(value, list) else value for name, value in block.items()}) for block in blocks))


def choose(scores: Sequence[Tensor], share: float, *, ranking: str, group: int, what: str) -> list[list[int]]:
    """The units that each block keeps, in rising order; of equal scores the lower index.

    Args: scores: per block, [units]. share: that is removed, in groups of `group` units, of which one stays in every block.
    Raises: ValueError where a share above 0 removes nothing, or a score is not finite.
    """
    for block, score in enumerate(scores):
        if not score.isfinite().all():
            raise ValueError(f"the scores of the {what} of blocks.{block} are not finite: look for NaN in the weights, or in the gradients")
    count = uniform_counts if ranking == "uniform" else global_counts
    orders = [score.argsort(descending=True, stable=True) for score in scores]  # strongest first
    ranked = [score[order] for score, order in zip(scores, orders, strict=True)]
    removed = count(ranked, share, group) if share else [0] * len(scores)
    if share and not any(removed):
        unit = f"group of {group} {what}" if group > 1 else what.removesuffix("s")
        raise ValueError(f"{what}: a share of {share:g} of {sizes_text(scores)} per block removes no whole {unit}; a larger share does, or 0 to leave them")
    return [sorted(order[: len(order) - number * group].tolist()) for order, number in zip(orders, removed, strict=True)]


def uniform_counts(ranked: Sequence[Tensor], share: float, group: int) -> list[int]:
    """How many groups each block loses: its own share."""
    return [min(whole_groups(share * len(score), group), removable(score, group)) for score in ranked]


def global_counts(ranked: Sequence[Tensor], share: float, group: int) -> list[int]:
    """How many groups each block loses: the weakest over all blocks, each block's own from its weak end."""
    groups = []  # (score over the block's mean, block), weakest first within a block
    for block, score in enumerate(ranked):
        relative = (score / score.mean().clamp_min(torch.finfo(score.dtype).tiny)).flip(0)[: removable(score, group) * group]
        groups += [(value, block) for value in relative.unflatten(0, (-1, group)).mean(1).tolist()] if len(relative) else []
    total = whole_groups(share * sum(map(len, ranked)), group)
    weakest = [block for _, block in sorted(groups)[:total]]
    return [weakest.count(block) for block in range(len(ranked))]


def whole_groups(units: float, group: int) -> int:
    return math.floor(units / group + ROUNDING)


def removable(score: Tensor, group: int) -> int:
    """Groups that a block can lose: one, or what is left of one beside it, stays."""
    return max(0, (len(score) - group) // group)


def sizes_text(scores: Iterable[Tensor]) -> str:
    sizes = sorted({len(score) for score in scores})
    return f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
