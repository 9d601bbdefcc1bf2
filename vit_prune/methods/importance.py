"""What the importances of `Columns` read off a block's attention.

Legend: B batch, N tokens, H heads, d head dim, A = H d, D width.  x [B, N, D]; `attn` is the PrunedAttention of the block.
"""

import torch
from torch import Tensor, nn

from vit_prune.ops.precision import at_least_float32, full_precision

BIAS = ("logit", "prob")  # rank by what the methods add to the logits
KEYS = ("column_mean", "class_attention")  # rank by q . k too, for one query q per head, and need no keys for it
PROBABILITIES = ("prob", *KEYS)
IMPORTANCES = ("logit", *PROBABILITIES, "value_norm", "grid", "random")


def key_map(q: Tensor, attn: nn.Module) -> Tensor:
    """scale * q . k_j is x_j . (scale * W_k^T q), up to a constant per head: q [H, d] or [B, H, d] -> that map, [H, D] or [B, H, D]. It costs A D.

    In float32, as what is read by it: in half precision large weights overflow.
    """
    key_weight = attn.key_weight().detach()  # [H, d, D]
    wide = at_least_float32(key_weight)
    with full_precision(key_weight):
        return torch.einsum("...hd,hdw->...hw", q.to(wide), key_weight.to(wide)) * attn.scale


def class_query(x: Tensor, attn: nn.Module) -> Tensor:
    """The query of the class token, the first: [B, H, d]. A D multiply-accumulates."""
    return attn.project_part(x[:, :1], 0).view(x.shape[0], attn.num_heads, attn.head_dim)


def value_norm(x: Tensor, attn: nn.Module) -> Tensor:
    """Mean over heads of the length of each token's value, [B, N] float32. N A D multiply-accumulates."""
    values = attn.project_part(x, 2).unflatten(-1, (attn.num_heads, attn.head_dim))
    return torch.linalg.vector_norm(values, dim=-1, dtype=at_least_float32(x)).mean(-1)
