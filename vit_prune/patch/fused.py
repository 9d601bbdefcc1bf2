"""The pruned attention for inference: everything that is linear in x is one GEMM, and keys and values are another.

B batch, N tokens, M kept columns, H heads, A = H d, D width, R rows of the methods' readouts (padded).
Rows of the one weight, [R' = Q + R + K + A, D], in this order: queries (Q = A), readouts (R), keys (K = A), values (A).
A query-key-free block has neither queries nor keys: Q = K = 0.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_prune.methods.base import NOTHING, Readouts
from vit_prune.patch.timm import PrunedAttention

ROWS = 16  # a GEMM whose width is a multiple of this many rows stays on its fast path in half precision


class FusedAttention(PrunedAttention):
    """PrunedAttention without its `qkv`: buffers `weight`, `bias` hold it, and the readouts' rows."""

    weight: Tensor
    bias: Tensor | None
    widths: dict[str, int]  # rows of each readout, in order
    first: int  # Q + R
    width: int  # D

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """As PrunedAttention.attend. Raises: RuntimeError in training mode."""
        if self.training:
            raise RuntimeError("a fused model is for inference: call model.eval(), or train the model before vp.fuse")
        if self.prune.keeps_all:
            projected = F.linear(x, self.weight, self.bias)
            kept = self.prune(x, attn=self, mask=mask, read=self.read(projected))
            key_value = projected[..., self.first :]
        else:
            projected = self.project(x, 0, self.first)
            kept = self.prune(x, attn=self, mask=mask, read=self.read(projected))
            key_value = self.project(kept.x, self.first, None)
        if self.prune.query_key_free:
            return self.query_free(key_value, kept, mask)
        return self.weigh(projected[..., : self.attn_dim], *key_value.chunk(2, dim=-1), kept, mask)

    def project(self, x: Tensor, start: int, stop: int | None) -> Tensor:
        """Rows start to stop of the weight: [B, M, D] -> [B, M, stop - start]."""
        return F.linear(x, self.weight[start:stop], None if self.bias is None else self.bias[start:stop])

    def read(self, projected: Tensor) -> Readouts:
        """The readouts, each [B, N, rows]; none in float16, where a bias of 1e5 would be infinite: the methods compute their own then."""
        if projected.dtype == torch.float16:
            return NOTHING
        start, read = 0 if self.prune.query_key_free else self.attn_dim, {}
        for name, width in self.widths.items():
            read[name] = projected[..., start : start + width]
            start += width
        return read


def fuse_attention(attn: PrunedAttention) -> None:
    """Turn one attention into a FusedAttention, in place."""
    A, key_free = attn.attn_dim, attn.prune.query_key_free
    maps = attn.prune.readouts(attn)
    qkv, bias = attn.qkv.weight.detach(), attn.qkv.bias
    attn.widths = {name: len(rows) for name, rows in maps.items()}
    padding = qkv.new_zeros(-sum(attn.widths.values()) % ROWS, attn.qkv.in_features)
    readouts = torch.cat([*(rows.detach().to(qkv) for rows in maps.values()), padding])
    queries, key_values = (qkv[:0], qkv[2 * A :]) if key_free else (qkv[:A], qkv[A:])
    attn.width = attn.qkv.in_features
    attn.first = len(queries) + len(readouts)
    del attn.qkv
    attn.__class__ = FusedAttention
    attn.register_buffer("weight", torch.cat([queries, readouts, key_values]))
    attn.register_buffer("bias", None if bias is None else _bias(bias.detach(), len(queries), len(readouts), len(key_values)))


def _bias(bias: Tensor, queries: int, readouts: int, key_values: int) -> Tensor:
    return torch.cat([bias[:queries], bias.new_zeros(readouts), bias[len(bias) - key_values :]])


def is_fused(model: nn.Module) -> bool:
    return any(type(module) is FusedAttention for module in model.modules())
