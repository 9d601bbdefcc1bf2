"""Attention of the heads that run alone: the others are neither projected, nor attended, nor projected back.

B batch, b images of one group, N tokens (queries), M kept columns, H heads, k heads that run, d head dim, A = H d.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vit_prune.methods.base import HeadGate, KeptColumns
from vit_prune.ops.heads import HeadGroup, merge_heads, project_heads

if TYPE_CHECKING:
    from vit_prune.patch.timm import PrunedAttention


def scaled(x: Tensor, gate: HeadGate | None) -> Tensor:
    """x [B, N or 1, A], each head's d values times its weight."""
    if gate is None:
        return x
    heads = x.unflatten(-1, (gate.weight.shape[1], -1))
    return (heads * gate.weight.to(x.dtype)[:, None, :, None]).flatten(2)


def active_heads(attn: "PrunedAttention", x: Tensor, kept: KeptColumns, mask: Tensor | None, output_gate: Tensor | None) -> Tensor:
    """Attention and output projection of x [B, N, D] over the kept columns, group by group -> [B, N or 1, D_out]."""
    groups = kept.gate.groups
    if groups[0].images is None:
        return run_group(attn, x, kept, mask, output_gate, groups[0])
    out = [run_group(attn, *of_images(x, kept, mask, output_gate, group.images), group) for group in groups]
    back = torch.cat([group.images for group in groups]).argsort()
    return torch.cat(out)[back]


def of_images(
    x: Tensor, kept: KeptColumns, mask: Tensor | None, output_gate: Tensor | None, images: Tensor
) -> tuple[Tensor, KeptColumns, Tensor | None, Tensor | None]:
    """Some images of the batch; what is the same for all stays as it is."""

    def cut(value: Tensor | None) -> Tensor | None:
        return value if value is None or value.shape[0] == 1 else value[images]

    chosen, gate = x[images], kept.gate
    columns = chosen if kept.x is x else cut(kept.x)
    return chosen, KeptColumns(columns, cut(kept.bias), cut(kept.index), gate._replace(weight=cut(gate.weight))), cut(mask), cut(output_gate)


def run_group(attn: "PrunedAttention", x: Tensor, kept: KeptColumns, mask: Tensor | None, output_gate: Tensor | None, group: HeadGroup) -> Tensor:
    """One group, all its images at once: x [b, N, D] -> [b, N or 1, D_out]."""
    heads = group.heads
    q, k, v = queries_keys_values(attn, x, kept.x, heads)
    kept, mask = kept._replace(bias=heads_of(kept.bias, heads)), heads_of(mask, heads)
    out = attn.attend_heads(q, k, v, kept, mask)  # [b, k, N or 1, d]
    weight = kept.gate.weight.gather(1, heads).to(out.dtype)
    out = (out * weight.view(*heads.shape, 1, 1)).transpose(1, 2)
    if attn.can_cut_proj(output_gate):
        return merge_heads(out.flatten(2), attn.proj.weight, attn.proj.bias, heads, attn.head_dim)
    whole = out.new_zeros(*out.shape[:2], attn.num_heads, attn.head_dim)
    return attn.output(whole.scatter(2, heads[:, None, :, None].expand_as(out), out).flatten(2), output_gate)


def queries_keys_values(attn: "PrunedAttention", x: Tensor, columns: Tensor, heads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """q [b, k, N, d] of x, k and v [b, k, M, d] of the columns; in a query-key-free block the values alone."""
    if attn.prune.query_key_free:
        return None, None, *projected(attn, columns, heads, 2, 1)
    if columns is x and attn.is_one_stretch():
        q, k, v = projected(attn, x, heads, 0, 3)
    else:
        (q,), (k, v) = projected(attn, x, heads, 0, 1), projected(attn, columns, heads, 1, 2)
    return attn.q_norm(q), attn.k_norm(k), v


def projected(attn: "PrunedAttention", x: Tensor, heads: Tensor, part: int, count: int) -> tuple[Tensor, ...]:
    """The heads' share of `count` of queries (0), keys (1), values (2) from `part` on, each [b, k, M, d]; one GEMM."""
    H, d = attn.num_heads, attn.head_dim
    if not attn.is_sliceable():
        whole = attn.project(x, part, part + count).unflatten(-1, (count, H, d)).permute(2, 0, 3, 1, 4)
        return tuple(heads_of(one, heads) for one in whole.unbind(0))
    weight, bias = attn.rows_of(part, count)
    return project_heads(x, weight.view(count, H, d, -1), None if bias is None else bias.view(count, H, d), heads)


def heads_of(value: Tensor | None, heads: Tensor) -> Tensor | None:
    """value [b or 1, H, ...] -> [b, k, ...], contiguous; what all heads share stays as it is."""
    if value is None or value.shape[1] == 1:
        return value
    images = torch.arange(heads.shape[0], device=heads.device)[:, None]
    return value[images if value.shape[0] > 1 else torch.zeros_like(images), heads]
