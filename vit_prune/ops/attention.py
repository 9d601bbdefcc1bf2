"""Column attention: the one op that every method shares.

B batch, N queries, M kept columns, H heads, d head dim.
q [B, H, N, d];  k, v [B, H, M, d];  bias [B, H or 1, M];  mask broadcasts to [B, H, N, M].
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_prune.ops import reference
from vit_prune.ops.precision import at_least_float32, full_precision

IMPLS = ("auto", "sdpa", "channel", "math", "reference", "triton")
CHANNEL_PAYS_FROM = 1_024  # columns, on CUDA: below, the wider head costs more than the additive term's gradient
UNIT = 16.0  # of q's extra channel, so that in float16 k's reaches from 0 to -32,752 * 16 * scale
ALIGNMENT = 8  # head dims are padded to a multiple of it, as the flash kernels ask


def column_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """softmax(q k^T * scale + bias[:, :, None, :] + mask) v, with logits and softmax accumulated in float32.

    Args:
        q: queries [B, H, N, d].
        k, v: keys and values of the kept columns [B, H, M, d].
        bias: one scalar per column [B or 1, H or 1, M], added after scaling; may be float32 beside half q; None adds nothing.
        mask: bool (True = visible) or additive float, broadcastable to [B, H, N, M]. A row with nothing visible gives zeros.
        scale: factor on the logits; None means d ** -0.5.
        dropout_p: dropout on the attention weights.
        impl: "sdpa" (PyTorch's fused kernels with an additive term), "channel" (the same kernels, with the bias as one more channel of q and k:
            no term that needs a gradient is left), "math" (matmul, float32 softmax, matmul), "reference" (the formula in the inputs' own
            dtype, no dropout), or "auto": sdpa, and while the bias learns what `_choose` says.

    Returns: [B, H, N, d] in v's dtype.
    Raises: ValueError for shapes that do not fit or an unknown impl; NotImplementedError for "triton".
    """
    _check(q, k, v, bias, mask, dropout_p, impl)
    if impl == "auto":
        impl = _choose(q, k, v, bias, dropout_p)
    if impl == "reference":
        return reference.column_attention(q, k, v, bias, mask=mask, scale=scale)
    if impl == "math":
        return _math(q, k, v, bias, mask, scale, dropout_p)
    if impl == "channel" and bias is not None:
        return _channel(q, k, v, bias, mask, scale, dropout_p)
    return sdpa(q, k, v, bias, mask=mask, scale=scale, dropout_p=dropout_p)


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, mask: Tensor | None, scale: float | None, dropout_p: float = 0.0) -> Tensor:
    """`column_attention` on PyTorch's fused kernels, for callers that know their shapes."""
    term = _additive_term(bias, mask, v.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=term, dropout_p=dropout_p, scale=scale)


def query_free_attention(v: Tensor, bias: Tensor, *, mask: Tensor | None = None, dropout_p: float = 0.0) -> Tensor:
    """softmax(bias + mask) v, the same row for every query: O(M), and neither q nor k exists.

    Args: v [B, H, M, d]; bias [B, H or 1, M]; mask broadcastable to [B, H, 1, M].
    Returns: [B, H, 1, d]. Raises: ValueError for a mask that differs from query to query.
    """
    if mask is not None and mask.shape[-2] != 1:
        shape = tuple(mask.shape)
        raise ValueError(
            f"query-key-free attention gives every query the same row; it cannot honour a mask per query, got {shape} "
            "(NaFlexVit masks keys alone if it is built with use_key_only_attn_mask=True)"
        )
    logits = bias[:, :, None, :].float()
    if mask is not None:
        logits = logits + reference.additive(mask, logits.dtype)
    weights = F.dropout(reference.safe_softmax(logits), dropout_p, training=dropout_p > 0)
    return weights.to(v.dtype) @ v


def _check(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, dropout_p: float, impl: str) -> None:
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}, got {impl!r}")
    if impl == "triton":
        raise NotImplementedError("impl='triton' has no kernel yet; use impl='auto', 'sdpa' or 'math'")
    if impl == "reference" and dropout_p:
        raise ValueError("impl='reference' has no dropout; use impl='math'")
    B, H, M = k.shape[0], k.shape[1], k.shape[2]
    if bias is not None and (bias.ndim != 3 or bias.shape[0] not in (1, B) or bias.shape[1] not in (1, H) or bias.shape[2] != M):
        raise ValueError(f"bias must be [{B} or 1, {H} or 1, {M}] (batch, heads, columns), got {tuple(bias.shape)}")
    if mask is not None and (mask.ndim != 4 or mask.shape[-1] not in (1, M)):
        raise ValueError(f"mask must have 4 dims that broadcast to [{B}, {H}, {q.shape[2]}, {M}], got {tuple(mask.shape)}")


def _choose(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout_p: float) -> str:
    """An additive term that needs a gradient drops PyTorch's attention to plain matmuls on the CPU, and off flash and cuDNN on CUDA."""
    if bias is None or not (bias.requires_grad and torch.is_grad_enabled()):
        return "sdpa"
    on_cuda = q.is_cuda
    if on_cuda and not (q.requires_grad or k.requires_grad or v.requires_grad):
        return "math"  # pytorch #148476
    if q.dtype == torch.float16 or (dropout_p and not on_cuda):
        return "sdpa"  # float16 cannot push a hidden column below every q k; with dropout there is no fused kernel on the CPU
    return "channel" if not on_cuda or (q.dtype == torch.bfloat16 and k.shape[2] >= CHANNEL_PAYS_FROM) else "sdpa"


def _channel(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float | None, dropout_p: float) -> Tensor:
    """q' = [q, u, 0...], k' = [k, bias / (u scale), 0...], v' = [v, 0...]: scale * q' k'^T is scale * q k^T + bias, and the kernels see no bias."""
    d = q.shape[-1]
    scale = d**-0.5 if scale is None else scale
    rest = -(d + 1) % ALIGNMENT
    bias = bias.to(torch.promote_types(bias.dtype, q.dtype))
    hidden = bias.detach() == -math.inf
    channel = _finite(bias, hidden, q.dtype, UNIT * scale).expand(*k.shape[:2], -1)[..., None]
    unit = q.new_full((), UNIT).expand(*q.shape[:3], 1)
    if mask is not None:
        mask = reference.additive(mask, v.dtype).masked_fill(hidden[:, :, None, :], -math.inf)
    else:
        v = v * ~hidden.all(-1)[:, :, None, None]  # nothing visible: zeros
    q, k, v = _pad(torch.cat([q, unit], -1), rest), _pad(torch.cat([k, channel], -1), rest), F.pad(v, (0, rest + 1))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, scale=scale)[..., :d]


def _pad(x: Tensor, rest: int) -> Tensor:
    return F.pad(x, (0, rest)) if rest else x


def _finite(bias: Tensor, hidden: Tensor, dtype: torch.dtype, unit: float) -> Tensor:
    """bias / unit in `dtype`, shifted so that the largest is 0 (softmax does not see it); hidden columns far below."""
    lowest = torch.finfo(dtype).min / (2 if dtype == torch.float16 else 2 * UNIT)  # its product with q's UNIT stays finite
    peak = bias.detach().masked_fill(hidden, lowest).amax(-1, keepdim=True)
    return ((bias - peak) / unit).clamp(min=lowest).to(dtype)


def _math(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, scale: float | None, dropout_p: float) -> Tensor:
    wide = at_least_float32(q)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with full_precision(q):
        logits = (q.to(wide) * scale) @ k.to(wide).transpose(-2, -1)
        if bias is not None:
            logits = logits + bias[:, :, None, :]
        if mask is not None:
            logits = logits + reference.additive(mask, wide)
        weights = F.dropout(reference.safe_softmax(logits), dropout_p, training=dropout_p > 0)
        return weights.to(v.dtype) @ v


def _additive_term(bias: Tensor | None, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """bias and mask as SDPA's one attn_mask; contiguous in the last dim, or the fused kernels crawl."""
    if bias is None:
        return mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
    term = _fit(bias, dtype).unsqueeze(2)
    return term if mask is None else term + reference.additive(mask, term.dtype)


def _fit(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias as the kernels take it: in `dtype`, or in float32 beside half precision, which the CPU's kernel adds exactly (autocast would round it).

    A narrower dtype gets it shifted so that the largest is 0 (softmax does not see it), then clamped; -inf stays.
    """
    if bias.dtype == dtype or (bias.dtype == torch.float32 and bias.is_cpu and not torch.is_autocast_enabled("cpu")):
        return bias
    if torch.finfo(dtype).max >= torch.finfo(bias.dtype).max:
        return bias.to(dtype)
    lowest = torch.finfo(dtype).min
    shifted = bias - bias.detach().amax(-1, keepdim=True).clamp(min=lowest)
    return shifted.clamp(min=lowest).masked_fill(shifted == float("-inf"), float("-inf")).to(dtype)
