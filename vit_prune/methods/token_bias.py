"""Token bias: one learned scalar per token, added to the attention logits of its column.

*Exploiting Biases in Attention for Transformers* (2026): b = x W_b^T. No constant, which softmax would not see.
Legend: B batch, N tokens, H heads, D width.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from vit_prune.methods.base import NOTHING, Host, Method, MethodConfig, Readouts
from vit_prune.methods.columns import Columns
from vit_prune.methods.schedules import Keep, parse_keep
from vit_prune.ops.precision import at_least_float32, full_precision


@dataclass(frozen=True)
class TokenBias(MethodConfig):
    """The token bias of every block.

    Args:
        per_head: one bias per head, W_b [H, D]; False shares one among the heads, W_b [1, D].
        query_key_free: in the last n blocks attention is softmax(bias) v, and neither queries nor keys are computed.
        keep: a keep schedule; `TokenBias(keep=k)` is short for `[TokenBias(), Columns(keep=k, importance="logit")]`.
    """

    name: ClassVar[str] = "token_bias"
    per_head: bool = True
    query_key_free: int = 0
    keep: Keep | float | str | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.per_head, bool):
            raise ValueError(f"per_head must be True or False, got {self.per_head!r}")
        if isinstance(self.query_key_free, bool) or not isinstance(self.query_key_free, int) or self.query_key_free < 0:
            raise ValueError(f"query_key_free must be a number of blocks >= 0, got {self.query_key_free}")
        if self.keep is not None:
            object.__setattr__(self, "keep", parse_keep(self.keep))

    def expand(self) -> tuple[MethodConfig, ...]:
        bias = TokenBias(per_head=self.per_head, query_key_free=self.query_key_free)
        return (bias,) if self.keep is None else (bias, Columns(keep=self.keep, importance="logit"))

    def build(self, host: Host) -> "TokenBiasMethod":
        if self.query_key_free > host.depth:
            raise ValueError(f"query_key_free is {self.query_key_free}, the model has {host.depth} blocks")
        return TokenBiasMethod(self, host)

    def to_dict(self) -> dict:
        return super().to_dict() | {"keep": None if self.keep is None else str(self.keep)}


class TokenBiasMethod(Method):
    """b = x W_b^T in one block. W_b starts at zero: a patched model is the same function."""

    reads = True

    def __init__(self, config: TokenBias, host: Host) -> None:
        super().__init__()
        self.config = config
        self.query_key_free = host.index >= host.depth - config.query_key_free
        self.weight = nn.Parameter(torch.zeros(host.num_heads if config.per_head else 1, host.dim))

    def readouts(self, attn: nn.Module) -> dict[str, Tensor]:
        return {self.config.name: self.weight}

    def bias(self, x: Tensor, *, read: Readouts = NOTHING) -> Tensor:
        """[B, H or 1, N]; computed here it is float32 (a half-precision bias of 1e5 would be infinite)."""
        if self.config.name in read:
            return read[self.config.name].mT
        wide = at_least_float32(x)
        with full_precision(x):
            return self.weight.to(wide) @ x.to(wide).mT

    def macs(self, num_tokens: int) -> int:
        return num_tokens * self.weight.numel()
