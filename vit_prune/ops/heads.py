"""Heads that run: which, in what groups, and the slices of the weights that they need.

B batch, H heads, k heads that run, d head dim, D width.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class HeadGroup(NamedTuple):
    """Images for which equally many heads run: images [b] int64 into the batch (None: all of them), heads [b, k] int64, the strongest first."""

    images: Tensor | None
    heads: Tensor


def strongest(relevance: Tensor, k: int) -> Tensor:
    """The k heads of largest relevance [B, H], the strongest first, ties to the lower index (topk promises none): [B, k] int64."""
    return relevance.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def group_by_count(relevance: Tensor, counts: list[int]) -> tuple[HeadGroup, ...]:
    """The strongest heads of each image, as many as counts say, in groups of images with equally many. relevance [B, H]."""
    if len(set(counts)) == 1:
        return (HeadGroup(None, strongest(relevance, counts[0])),)
    groups = []
    for k in sorted(set(counts)):
        images = torch.tensor([image for image, count in enumerate(counts) if count == k], device=relevance.device)
        groups.append(HeadGroup(images, strongest(relevance[images], k)))
    return tuple(groups)


def project_heads(x: Tensor, weight: Tensor, bias: Tensor | None, heads: Tensor) -> tuple[Tensor, ...]:
    """x W^T + b of some heads alone, each image's own; one GEMM for all parts.

    Args: x [B, N, D]; weight [parts, H, d, D], bias [parts, H, d]: parts are queries, keys, values, or some of them; heads [B, k] int64.
    Returns: for each part [B, k, N, d].
    """
    B, N, D = x.shape
    parts, d, k, chosen = weight.shape[0], weight.shape[2], heads.shape[1], heads.flatten()
    rows = weight.transpose(0, 1).index_select(0, chosen).view(B, k * parts * d, D).mT
    offsets = None if bias is None else bias.transpose(0, 1).index_select(0, chosen).view(B, 1, k * parts * d)
    out = x @ rows if offsets is None else torch.baddbmm(offsets, x, rows)
    return out.view(B, N, k, parts, d).permute(3, 0, 2, 1, 4).unbind(0)


def merge_heads(x: Tensor, weight: Tensor, bias: Tensor | None, heads: Tensor, size: int) -> Tensor:
    """The output projection of some heads alone, each image's own: the others' share is zero.

    Args: x [B, N, k size]; weight [D, H size], bias [D]; heads [B, k] int64.
    Returns: [B, N, D].
    """
    B, k = heads.shape
    D = weight.shape[0]
    columns = weight.view(D, -1, size).index_select(1, heads.flatten()).view(D, B, k * size)
    rows = columns.permute(1, 2, 0)  # [B, k size, D]
    return x @ rows if bias is None else torch.baddbmm(bias, x, rows)
