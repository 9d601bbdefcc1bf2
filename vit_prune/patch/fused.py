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
    names: tuple[str, ...]  # of the readouts, in order
    first: tuple[int, ...]  # rows of the queries, of each readout, of the padding
    last: tuple[int, int]  # of keys and values

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """As PrunedAttention.attend. Raises: RuntimeError in training mode."""
        if self.training:
            raise RuntimeError("a fused model is for inference: call model.eval(), or train the model before vp.fuse")
        if self.prune.keeps_all:
            q, *parts, k, v = torch.split_with_sizes(F.linear(x, self.weight, self.bias), self.first + self.last, -1)
            kept = self.prune(x, attn=self, mask=mask, read=self.read(parts))
        else:
            rows = sum(self.first)
            q, *parts = torch.split_with_sizes(self.project(x, 0, rows), self.first, -1)
            kept = self.prune(x, attn=self, mask=mask, read=self.read(parts))
            k, v = torch.split_with_sizes(self.project(kept.x, rows, None), self.last, -1)
        return self.query_free(v, kept, mask) if self.prune.query_key_free else self.weigh(q, k, v, kept, mask)

    def project(self, x: Tensor, start: int, stop: int | None) -> Tensor:
        """Rows start to stop of the weight: [B, M, D] -> [B, M, stop - start]."""
        return F.linear(x, self.weight[start:stop], None if self.bias is None else self.bias[start:stop])

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
    attn.names, attn.first, attn.last = tuple(maps), (queries, *widths, padding), (keys, A)
    del attn.qkv
    attn.__class__ = FusedAttention
    attn.register_buffer("weight", torch.cat([qkv[:queries], riders, qkv[2 * A - keys :]]))
    attn.register_buffer("bias", None)
    if bias is not None:
        bias = bias.detach()
        attn.bias = torch.cat([bias[:queries], bias.new_zeros(len(riders)), bias[2 * A - keys :]])


def is_fused(model: nn.Module) -> bool:
    return any(type(module) is FusedAttention for module in model.modules())
