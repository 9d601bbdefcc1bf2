"""Token merging: bipartite soft matching, and the tokens that come of it.  *Token Merging: Your ViT But Faster* (arXiv 2210.09461), section 3.

B batch, N tokens = P prefix + n patches, r merges, d metric dims.  Patches alternate: the first is a target, the second a source, and so on.
Each source looks for its most similar target; the r most similar pairs merge. The new order of tokens is: prefix, the sources that are left, targets.
`place [B, N]` says where in the new order each of the old tokens is.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_prune.ops.precision import at_least_float32, full_precision
from vit_prune.ops.rows import gather_tokens, sum_tokens

HIDDEN = -2.0  # below every cosine: hidden sources merge last


def num_merges(num_tokens: int, num_prefix: int, r: int) -> int:
    """r, or all the sources that there are."""
    return min(r, (num_tokens - num_prefix) // 2)


@torch.no_grad()
def match(metric: Tensor, *, num_prefix: int, r: int, visible: Tensor | None = None) -> Tensor:
    """Where each token goes when the r most similar pairs merge: `place` [B, N] int64, values in 0..N - r - 1.

    Args:
        metric: [B, N, d], compared by cosine similarity in float32 (near 1 half precision has steps of 1/256). Ties go to the lower index.
        num_prefix: P tokens that stay themselves. r: at most n // 2.
        visible: [B, N] bool. A hidden source merges only when no visible one is left, a hidden target takes nothing before the visible ones,
            and what is hidden comes last: an image that is padded merges as it does alone. None means all are visible.
    """
    P = num_prefix
    patches = F.normalize(metric[:, P:].to(at_least_float32(metric)), dim=-1)
    target, source = patches[:, 0::2], patches[:, 1::2]  # [B, T, d], [B, S, d]
    with full_precision(metric):
        similarity = source @ target.mT
    if visible is not None:
        similarity = similarity.masked_fill(~visible[:, None, P::2], -torch.inf)
    best, nearest = similarity.max(-1)  # [B, S]
    if visible is not None:
        best = best.masked_fill(~visible[:, P + 1 :: 2], HIDDEN)
    merging = best.sort(dim=-1, descending=True, stable=True).indices[:, :r]
    stays = torch.ones_like(best, dtype=torch.bool).scatter(1, merging, False)
    first = P + stays.shape[1] - r  # the first target's place
    moved = torch.where(stays, stays.cumsum(-1) + (P - 1), nearest + first)
    place = _interleave(torch.arange(first, first + target.shape[1], device=moved.device).expand(moved.shape[0], -1), moved)
    place = torch.cat([torch.arange(P, device=place.device).expand(place.shape[0], -1), place], dim=1)
    return place if visible is None else _hidden_last(place, visible, P, place.shape[1] - r)


def _interleave(even: Tensor, odd: Tensor) -> Tensor:
    """[B, T], [B, S] -> [B, T + S]; T is S or S + 1."""
    pairs = torch.stack([even, F.pad(odd, (0, even.shape[1] - odd.shape[1]))], dim=-1).flatten(1)
    return pairs[:, : even.shape[1] + odd.shape[1]]


def _hidden_last(place: Tensor, visible: Tensor, num_prefix: int, num_tokens: int) -> Tensor:
    """The same places, with those that hold nothing visible behind the others."""
    shown = torch.zeros(place.shape[0], num_tokens, device=place.device, dtype=torch.int32).scatter_add(1, place, visible.int())
    shown[:, :num_prefix] = 1
    order = (shown == 0).int().sort(dim=-1, stable=True).indices  # new places, in order
    return order.argsort(-1).gather(1, place)


def merge_tokens(x: Tensor, sizes: Tensor, place: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Means of the tokens that share a place, weighted by size.

    Args: x [B, N, D]; sizes [B, N] float32, 0 where hidden; place [B, N]; num_tokens of the result, N - r.
    Returns: x [B, N - r, D] and sizes [B, N - r]. Hidden tokens count nothing beside others; among themselves they are alike: what nobody
        looks at still goes its own way through the model.
    """
    tiny = torch.finfo(sizes.dtype).tiny
    weight = sizes.clamp(min=tiny)
    total = sizes.new_zeros(sizes.shape[0], num_tokens).scatter_add(1, place, weight)
    share = weight / total.gather(1, place)
    member = torch.arange(x.shape[1], device=x.device).expand_as(place)
    return sum_tokens(x, member, place, share, num_tokens), F.threshold(total, x.shape[1] * tiny, 0.0)


def unmerge_tokens(x: Tensor, source: Tensor | None) -> Tensor:
    """x [B, N, D] -> [B, N0, D], each original token with the value of the token that it is in; source [B, N0], None where nothing merged."""
    return x if source is None else gather_tokens(x, source)
