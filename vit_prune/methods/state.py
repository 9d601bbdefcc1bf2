"""What one forward carries from block to block besides x.  B batch, N tokens now, N0 tokens at the first block."""

from typing import NamedTuple

import torch
from torch import Tensor

from vit_prune.ops.precision import at_least_float32


class Tokens(NamedTuple):
    """What the tokens stand for.

    sizes: [B, N] float32 (float64 in a model of that), how many tokens each one holds, hidden ones not counted; None: itself alone.
    source: [B, N0] int64, the token that each original token is in; None: itself.
    mask: the host's, of the tokens now; None: all are visible.
    """

    sizes: Tensor | None = None
    source: Tensor | None = None
    mask: Tensor | None = None

    def merged(self, sizes: Tensor, place: Tensor) -> "Tokens":
        """After a merge: sizes of the new tokens [B, N - r], and the place [B, N] of each old one among them."""
        source = place if self.source is None else place.gather(1, self.source)
        return Tokens(sizes, source, None if self.mask is None else (sizes > 0)[:, None, None, :])


def sizes_of(tokens: Tokens, x: Tensor) -> Tensor:
    """[B, N]: the sizes, at first 1, or exp(mask - its largest) of what a mask hides or dims, so that log size is the mask up to a constant.

    Raises: ValueError for a mask that differs from head to head or query to query: merged tokens have one.
    """
    if tokens.sizes is not None:
        return tokens.sizes
    B, N, mask, wide = x.shape[0], x.shape[1], tokens.mask, at_least_float32(x)
    if mask is None:
        return torch.ones(B, N, device=x.device, dtype=wide)
    if mask.shape[1] != 1 or mask.shape[2] != 1:
        raise ValueError(f"merged tokens share one mask; ToMe cannot honour a mask per head or query, got {tuple(mask.shape)}")
    is_bool, mask = mask.dtype == torch.bool, mask[:, 0, 0].expand(B, N).to(wide)
    return mask if is_bool else (mask - mask.amax(-1, keepdim=True).clamp(min=torch.finfo(wide).min)).exp()


def filled(tokens: Tokens, x: Tensor) -> Tokens:
    """The same with sizes and sources, also where nothing has merged; x [B, N, D]."""
    source = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1) if tokens.source is None else tokens.source
    return tokens._replace(sizes=sizes_of(tokens, x), source=source)
