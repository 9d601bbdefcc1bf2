"""The readable oracle: each op as its formula, in whatever dtype it is given (float64 for tests).

B batch, N queries, M columns, H heads, d head dim.  q [B, H, N, d];  k, v [B, H, M, d];  bias [B, H or 1, M].
"""

import torch
from torch import Tensor


def safe_softmax(logits: Tensor) -> Tensor:
    """Softmax over the last dim; a row that is -inf throughout becomes zeros, as in PyTorch's fused kernels."""
    dead = (logits == float("-inf")).all(-1, keepdim=True)
    return logits.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask (True = visible) as 0 / -inf; a float mask as it is."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))


def column_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """softmax(q k^T * scale + bias[:, :, None, :] + mask) v -> [B, H, N, d]."""
    logits = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        logits = logits + bias[:, :, None, :]
    if mask is not None:
        logits = logits + additive(mask, logits.dtype)
    return safe_softmax(logits).to(v.dtype) @ v
