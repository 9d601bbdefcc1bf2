"""Token merging between attention and MLP.  *Token Merging: Your ViT But Faster* (ToMe, arXiv 2210.09461), section 3.

Legend: B batch, N tokens = P prefix + n patches, r merges, d head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vit_prune.methods.base import Host, Method, MethodConfig
from vit_prune.methods.state import Tokens, sizes_of
from vit_prune.ops import merging

DECREASING = "decreasing"


@dataclass(frozen=True)
class ToMe(MethodConfig):
    """The r most similar pairs of tokens merge in each block, between attention and MLP; prefix tokens stay themselves.

    What leaves the model has all tokens again, each with the value of the token that it is in: pooling is weighted by size, and dense heads work.

    Args:
        r: merges per block: a number; "decreasing:8", from 16 in the first block to 0 in the last, 8 on average (the paper's decreasing
            schedule); or one number per block. A block merges half of its patches at most.
        proportional: attention counts a token as often as it holds others: log(size) is added to its column (the paper's proportional attention).
            False takes bool masks alone.
    """

    name: ClassVar[str] = "tome"
    r: int | str | tuple[int, ...] = 8
    proportional: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "r", parse_r(self.r))
        if not isinstance(self.proportional, bool):
            raise ValueError(f"proportional must be True or False, got {self.proportional!r}")

    def build(self, host: Host) -> "ToMeMethod":
        return ToMeMethod(self, host)

    def counts(self, depth: int) -> tuple[int, ...]:
        """r of each block. Raises: ValueError where a list has another length than the model."""
        if isinstance(self.r, int):
            return (self.r,) * depth
        if isinstance(self.r, str):
            mean = int(self.r.partition(":")[2])
            return (mean,) if depth == 1 else tuple(round(2 * mean * (1 - block / (depth - 1))) for block in range(depth))
        if len(self.r) != depth:
            raise ValueError(f"r lists {len(self.r)} numbers, the model has {depth} blocks")
        return self.r


class ToMeMethod(Method):
    """Merging in one block."""

    def __init__(self, config: ToMe, host: Host) -> None:
        super().__init__()
        self.config = config
        self.r = config.counts(host.depth)[host.index]
        self.num_prefix_tokens = host.num_prefix_tokens
        self.dim, self.num_heads, self.head_dim = host.dim, host.num_heads, host.head_dim
        self.has_key_norm = host.has_key_norm

    def num_merges(self, num_tokens: int) -> int:
        """Tokens that this block merges away."""
        return merging.num_merges(num_tokens, self.num_prefix_tokens, self.r)

    def column_bias(self, tokens: Tokens) -> Tensor | None:
        """log size, [B, 1, N]."""
        return tokens.sizes.log()[:, None] if self.config.proportional and tokens.sizes is not None else None

    def merge(self, x: Tensor, metric: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        """x [B, N, D], metric [B, N, d] -> x [B, N - r, D]. Raises: ValueError for a mask that merged tokens cannot carry on."""
        if tokens.mask is not None and tokens.mask.dtype != torch.bool and not self.config.proportional:
            raise ValueError("ToMe(proportional=False) carries on which tokens are hidden, not an additive mask: give a bool mask, or proportional=True")
        r, sizes = self.num_merges(x.shape[1]), sizes_of(tokens, x)
        visible = None if tokens.mask is None else sizes > 0
        place = merging.match(metric, num_prefix=self.num_prefix_tokens, r=r, visible=visible)
        x, sizes = merging.merge_tokens(x, sizes, place, x.shape[1] - r)
        return x, tokens.merged(sizes, place)

    def macs(self, num_tokens: int, *, has_all_keys: bool = True, query_key_free: bool = False) -> int:
        """The matching, and the metric where the keys of all tokens are not there to be averaged (without keys it is of values)."""
        if not self.num_merges(num_tokens):
            return 0
        patches = num_tokens - self.num_prefix_tokens
        matching = (patches // 2) * (patches - patches // 2) * self.head_dim
        if has_all_keys and not query_key_free:
            return matching
        heads = self.num_heads if self.has_key_norm and not query_key_free else 1  # the mean of the weights is enough where keys are linear
        return matching + num_tokens * self.dim * heads * self.head_dim


def parse_r(value: int | str | Sequence[int]) -> int | str | tuple[int, ...]:
    """r from whatever a user types: 8, "8", "decreasing:8", "8,8,4,0", or a list. Raises: ValueError that names what is valid."""
    if isinstance(value, str):
        text = value.strip()
        kind, colon, mean = text.partition(":")
        if colon and kind == DECREASING and mean.isdecimal():
            return f"{DECREASING}:{int(mean)}"
        parts = text.rstrip(",").split(",")
        if all(part.strip().isdecimal() for part in parts):
            value = int(text) if "," not in text else tuple(map(int, parts))
    numbers = value if isinstance(value, Sequence) and not isinstance(value, str) and value else [value]
    if any(isinstance(number, bool) or not isinstance(number, int) or number < 0 for number in numbers):
        raise ValueError(f"r must be a number of merges >= 0, one per block (8,8,4,...) or {DECREASING}:MEAN, got {value!r}")
    return value if isinstance(value, int) else tuple(value)
