"""Select, gather and merge key/value columns.

B batch, N tokens = P prefix + n patches, M = P + m kept columns, H heads, D width.  x [B, N, D];  bias [B, H or 1, N].
Patches are ranked by importance; the first m of the ranking are kept, the rest dropped. Prefix tokens are kept always.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_prune.ops.precision import at_least_float32
from vit_prune.ops.rows import gather_tokens, sum_tokens

ROUNDING = 1e-6  # .55 * 100 is 55.000000000000007: not a 56th column
INVISIBLE = -1e3  # exp(-1e3) is 0 even in float64: an additive mask at or below it hides the column


class Selection(NamedTuple):
    """Which columns stay. All indices count tokens, prefix included.

    order [B, N]: the prefix, then patches by falling importance.  kept [B, M]: the first of them.
    valid [B, M] bool, or None where all are: False marks padding, because this image keeps fewer columns than the widest.
    """

    order: Tensor
    kept: Tensor
    valid: Tensor | None

    @property
    def dropped(self) -> Tensor:
        """The others, [B, N - M]."""
        return self.order[:, self.kept.shape[1] :]


def num_kept(num_tokens: int, num_prefix: int, keep_ratio: float) -> int:
    """M = P + max(1, ceil(keep (N - P)))."""
    return num_prefix + max(1, math.ceil(keep_ratio * (num_tokens - num_prefix) - ROUNDING))


def num_kept_visible(visible: Tensor, keep_ratio: float) -> Tensor:
    """Kept patches of each image, from its own visible patches: visible [B, n] bool -> [B] int64."""
    return (keep_ratio * visible.sum(-1).double() - ROUNDING).ceil().clamp(min=1).long()


def visible_tokens(mask: Tensor) -> Tensor:
    """Tokens that some query of some head may see: mask [B or 1, H or 1, N or 1, N] -> [B or 1, N] bool."""
    seen = mask if mask.dtype == torch.bool else mask > INVISIBLE
    return seen.flatten(1, 2).any(1)


def select(importance: Tensor, *, num_prefix: int, width: int, count: Tensor | None = None) -> Selection:
    """Keep the `width` most important patches of each image, or its first `count` of them.

    Args:
        importance: [B, n] of the patches alone, any float dtype; ties go to the lower index.
        num_prefix: P tokens before the patches, kept outside the budget.
        width: m, the same for the whole batch.
        count: [B] int, at most width: how many of the m columns are real; None means all.
    """
    cost = F.pad(-importance, (num_prefix, 0), value=-math.inf)  # the prefix first, in order; NaN last
    order = cost.sort(dim=-1, stable=True).indices  # [B, N]
    kept = order[:, : num_prefix + width]
    if count is None:
        return Selection(order, kept, None)
    valid = torch.arange(kept.shape[1], device=order.device) < num_prefix + count[:, None]
    return Selection(order, kept, valid)


def smallest_mass(probability: Tensor, tau: float) -> Tensor:
    """Size of the smallest set of patches that holds the share tau of their probability: [B, n] -> [B] int64, at least 1."""
    falling = probability.sort(dim=-1, descending=True, stable=True).values.double()
    before = falling.cumsum(-1) - falling
    short = before < (tau - 1e-12) * falling.sum(-1, keepdim=True)  # float64's rounding: half of ten equal parts is five
    return (short & (falling > 0)).sum(-1).clamp(min=1)


def gather_bias(bias: Tensor, index: Tensor) -> Tensor:
    """bias [B, H, N], index [B, M] -> [B, H, M], contiguous."""
    return bias.gather(2, index.unsqueeze(1).expand(-1, bias.shape[1], -1))


def gather_mask(mask: Tensor, index: Tensor) -> Tensor:
    """mask [B or 1, H or 1, N or 1, N], index [B, M] -> the kept columns' mask [B, H or 1, N or 1, M]."""
    mask = mask.expand(index.shape[0], -1, -1, -1)
    return mask.gather(-1, index[:, None, None, :].expand(-1, mask.shape[1], mask.shape[2], -1))


def merge(
    x: Tensor,
    bias: Tensor | None,
    selection: Selection,
    *,
    features: Tensor,
    num_prefix: int,
    weight: Tensor | None = None,
    visible: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Fold each dropped patch into the kept patch nearest to it in cosine similarity of `features`.

    A cluster C becomes one column: x is the mean of its members weighted by softmax_C(weight), the bias is logsumexp_C(b) per head.
    For equal members this is exact. b holds every additive term of a column, log size included.

    Args:
        x: [B, N, D]. bias: [B, H or 1, N], None where there is none (give weight then). selection: from `select`.
        features: [B, N, r], what nearness is measured in; (N - M) (M - P) r multiply-accumulates.
        num_prefix: prefix tokens are nobody's nearest: they stay themselves.
        weight: [B, N], the logit expected of each token; None takes the mean of b over the heads.
        visible: [B or 1, N] bool; hidden tokens add nothing. None means all are visible.

    Returns: x [B, M, D] and bias [B, H or 1, M].
    """
    P, M = num_prefix, selection.kept.shape[1]
    weight = bias.mean(1) if weight is None else weight
    weight = weight.to(at_least_float32(weight)).unsqueeze(1)
    rows = F.pad(weight, (0, 0, 0, 1)) if bias is None else torch.cat([weight, bias.to(weight.dtype)], dim=1)  # [B, 1 + h, N]
    member, silent = _members(selection, P, visible)
    logits = gather_bias(rows, member)  # [B, 1 + h, M + S]
    if silent is not None:
        logits = logits.masked_fill(silent[:, None], -math.inf)
    near = gather_tokens(features, member)
    nearest = P + _nearest(near[:, M:], near[:, P:M], _real_targets(selection, P, visible))  # [B, S]
    column = torch.cat([torch.arange(M, device=x.device).expand(x.shape[0], -1), nearest], dim=1)  # of each member
    total = _cluster_logsumexp(logits, column, M)  # [B, 1 + h, M]
    share = (logits[:, 0] - total[:, 0].gather(1, column)).exp()
    return sum_tokens(x, member, column, share, M), total[:, 1:]


def _members(selection: Selection, num_prefix: int, visible: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The kept tokens, then the sources, which look for a column, [B, M + S]; and which bring nothing: hidden sources, and columns that already stand.

    Where images keep different numbers, a column that is padding is a dropped patch of that image: it looks too.
    """
    kept, member, silent = selection.kept, selection.order, None
    if selection.valid is not None:
        member = torch.cat([kept, kept[:, num_prefix:], selection.dropped], dim=1)
        silent = F.pad(selection.valid[:, num_prefix:], (kept.shape[1], selection.dropped.shape[1]))
    if visible is not None:
        hidden = F.pad(~visible.expand(len(member), -1).gather(1, member[:, kept.shape[1] :]), (kept.shape[1], 0))
        silent = hidden if silent is None else silent | hidden
    return member, silent


def _real_targets(selection: Selection, num_prefix: int, visible: Tensor | None) -> Tensor | None:
    """Which of the patches that are columns are real, [B, m]; None where all are."""
    real = None if selection.valid is None else selection.valid[:, num_prefix:]
    if visible is not None:
        target = selection.kept[:, num_prefix:]
        seen = visible.expand(len(target), -1).gather(1, target)
        real = seen if real is None else real & seen
    return real


def _nearest(source: Tensor, target: Tensor, target_is_real: Tensor | None) -> Tensor:
    """Index of the target with the highest cosine similarity: source [B, S, r], target [B, m, r] -> [B, S].

    The source's own length does not change which target wins, so that only the targets are normalised.
    """
    length = torch.linalg.vector_norm(target, dim=-1, keepdim=True, dtype=at_least_float32(target))
    similarity = source @ (target / length.clamp(min=1e-12)).to(target.dtype).mT  # in half precision that minimum would be 0
    if target_is_real is not None:
        similarity = similarity.masked_fill(~target_is_real[:, None, :], float("-inf"))
    return similarity.max(-1).indices  # in half precision 4 times as fast as argmax on a CPU


def _cluster_logsumexp(logits: Tensor, column: Tensor, num_columns: int) -> Tensor:
    """logsumexp over the members of each column: logits [B, h, M + S], column [B, M + S] -> [B, h, M]."""
    column = column[:, None].expand_as(logits)
    B, h, _ = logits.shape
    peak = logits.new_full((B, h, num_columns), -math.inf).scatter_reduce(2, column, logits.detach(), "amax").clamp(min=torch.finfo(logits.dtype).min)
    mass = logits.new_zeros(B, h, num_columns).scatter_add(2, column, (logits - peak.gather(2, column)).exp())
    return mass.clamp(min=torch.finfo(mass.dtype).tiny).log() + peak
