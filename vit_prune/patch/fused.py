"""The pruned attention for inference: everything that is linear in x is one GEMM, and keys and values are another.

B batch, N tokens, M kept columns, H heads, A = H d, D width, R rows of the methods' readouts (padded).
Rows of the one weight, [R' = Q + R + K + A, D], in this order: queries (Q = A), readouts (R), keys (K = A), values (A).
A query-key-free block has neither queries nor keys: Q = K = 0.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_prune.methods.base import NOTHING, KeptColumns, Readouts
from vit_prune.ops.attention import sdpa
from vit_prune.patch.timm import PrunedAttention, cut_rows, hooked, kept_mask

ROWS = 16  # a GEMM whose width is a multiple of this many rows stays on its fast path in half precision


class FusedAttention(PrunedAttention):
    """PrunedAttention without its `qkv`: buffers `weight`, `bias` hold it, and the readouts' rows."""

    weight: Tensor
    bias: Tensor | None
    names: tuple[str, ...]  # of the readouts, in order
    first: tuple[int, ...]  # rows of the queries, of each readout, of the padding
    rows: int  # their sum, Q + R
    direct: bool  # attention is PyTorch's fused kernel; no norms, no output gate, a row for each query
    has_gates: bool  # some heads may not run

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        size_bias: Tensor | None = None,
        keys: list[Tensor] | None = None,
        sizes: Tensor | None = None,
    ) -> Tensor:
        """As PrunedAttention.forward. Raises: RuntimeError in training mode."""
        if self.training:
            raise RuntimeError("a fused model is for inference: call model.eval(), or train the model before vp.fuse")
        if self.direct and attn_mask is None and not is_causal:
            return self.gated(x, None, size_bias, keys, sizes, None) if self.has_gates else self.proj(self.attend(x, None, size_bias, keys))
        return super().forward(x, attn_mask, is_causal, size_bias, keys, sizes)

    def attend(self, x: Tensor, mask: Tensor | None, size_bias: Tensor | None, keys: list[Tensor] | None) -> Tensor:
        """As PrunedAttention.attend."""
        prune, rows = self.prune, self.rows
        if prune.keeps_all:
            projected = F.linear(x, self.weight, self.bias)
            q, *parts, key_value = projected.split_with_sizes((*self.first, projected.shape[-1] - rows), -1)
            kept = prune(x, attn=self, mask=mask, size_bias=size_bias, read=self.read(parts))
        else:
            q, *parts = self.project(x, 0, rows).split_with_sizes(self.first, -1)
            kept = prune(x, attn=self, mask=mask, size_bias=size_bias, read=self.read(parts))
            key_value = self.project(kept.x, rows, None)
        if self.direct:
            return self.weigh_directly(q, key_value, kept, mask, keys)
        return self.query_free(key_value, kept, mask) if prune.query_key_free else self.weigh(q, *key_value.chunk(2, dim=-1), kept, mask, keys)

    def choose(self, x: Tensor, mask: Tensor | None, size_bias: Tensor | None, sizes: Tensor | None) -> KeptColumns:
        """As PrunedAttention.choose: the readouts are a product of their own, since not all queries may be wanted."""
        if not self.names:
            return super().choose(x, mask, size_bias, sizes)
        parts = self.project(x, self.first[0], self.rows).split_with_sizes(self.first[1:], -1)
        return self.prune(x, attn=self, mask=mask, size_bias=size_bias, sizes=sizes, read=self.read(parts))

    def attend_to(self, x: Tensor, kept: KeptColumns, mask: Tensor | None, keys: list[Tensor] | None) -> Tensor:
        """As PrunedAttention.attend_to."""
        key_value = self.project(kept.x, self.rows, None)
        if self.prune.query_key_free:
            return self.query_free(key_value, kept, mask)
        return self.weigh(self.project(x, 0, self.first[0]), *key_value.chunk(2, dim=-1), kept, mask, keys)

    def attend_heads(self, q: Tensor | None, k: Tensor | None, v: Tensor, kept: KeptColumns, mask: Tensor | None) -> Tensor:
        """As PrunedAttention.attend_heads."""
        if not self.direct:
            return super().attend_heads(q, k, v, kept, mask)
        return sdpa(q, k, v, kept.bias, mask=None if mask is None else kept_mask(mask, kept), scale=self.scale)

    def weigh_directly(self, q: Tensor, key_value: Tensor, kept: KeptColumns, mask: Tensor | None, keys: list[Tensor] | None) -> Tensor:
        """As `weigh`, of key_value [B, M, 2 A]."""
        k, v = key_value.view(*key_value.shape[:2], 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        if keys is not None and kept.index is None:
            keys.append(k)
        return self.attend_heads(self.heads(q), k, v, kept, mask).transpose(1, 2).flatten(2)

    def project(self, x: Tensor, start: int, stop: int | None) -> Tensor:
        """Rows start to stop of the weight: [B, M, D] -> [B, M, stop - start]."""
        return F.linear(x, *cut_rows(self.weight, self.bias, start, (len(self.weight) if stop is None else stop) - start))

    def project_part(self, x: Tensor, part: int) -> Tensor:
        """As PrunedAttention.project_part."""
        first = self.first_row(part)
        return self.project(x, first, first + self.attn_dim)

    def first_row(self, part: int) -> int:
        """Of the queries (0), keys (1) or values (2)."""
        if part == 0:
            return 0
        return self.rows + (part - 1) * self.attn_dim if self.first[0] else self.rows  # without queries there are values alone

    def is_sliceable(self) -> bool:
        """As PrunedAttention.is_sliceable."""
        return True

    def is_one_stretch(self) -> bool:
        """As PrunedAttention.is_one_stretch."""
        return self.rows == self.first[0]

    def rows_of(self, part: int, count: int = 1) -> tuple[Tensor, Tensor | None]:
        """As PrunedAttention.rows_of."""
        return cut_rows(self.weight, self.bias, self.first_row(part), count * self.attn_dim)

    def read(self, parts: list[Tensor]) -> Readouts:
        """The readouts by name; none in float16, where a bias of 1e5 would be infinite: the methods compute their own then."""
        return NOTHING if parts[0].dtype == torch.float16 else dict(zip(self.names, parts, strict=False))


def fuse_attention(attn: PrunedAttention) -> None:
    """Turn one attention into a FusedAttention, in place."""
    A, qkv, bias = attn.attn_dim, attn.qkv.weight.detach(), attn.qkv.bias
    maps = attn.prune.readouts(attn)
    widths = [len(rows) for rows in maps.values()]
    padding = -sum(widths) % ROWS
    queries, keys = (0, 0) if attn.prune.query_key_free else (A, A)
    riders = torch.cat([*(rows.detach().to(qkv) for rows in maps.values()), qkv.new_zeros(padding, qkv.shape[1])])
    attn.names, attn.first, attn.rows = tuple(maps), (queries, *widths, padding), queries + len(riders)
    attn.direct, attn.has_gates = is_direct(attn), bool(attn.prune.gaters)
    attn.prune.requires_grad_(False)  # what was copied learns nothing more
    del attn.qkv
    attn.__class__ = FusedAttention
    attn.register_buffer("weight", torch.cat([qkv[:queries], riders, qkv[2 * A - keys :]]))
    attn.register_buffer("bias", None)
    if bias is not None:
        bias = bias.detach()
        attn.bias = torch.cat([bias[:queries], bias.new_zeros(len(riders)), bias[2 * A - keys :]])


def is_direct(attn: PrunedAttention) -> bool:
    """True where attention is PyTorch's fused kernel and nothing that could be skipped in evaluation mode computes or is hooked."""
    norms = (attn.q_norm, attn.k_norm, attn.norm)
    watched = any(map(hooked, (*norms, attn.proj_drop)))
    plain = attn.gate is None and not watched and all(type(norm) is nn.Identity for norm in norms)
    return plain and attn.fused_attn and attn.prune.impl in ("auto", "sdpa") and not attn.prune.query_key_free


def is_fused(model: nn.Module) -> bool:
    """True where `vp.fuse` has been at work."""
    return any(type(module) is FusedAttention for module in model.modules())
