"""Pin the kernel of scaled_dot_product_attention for a whole run, and refuse a pin that cannot serve.

On the CPU there are two kernels: flash, which takes an additive mask that needs no gradient, and math, the formula as separate products.
"auto" is PyTorch's own choice, call by call.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from vit_prune.methods.stack import Prune

PINS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
BACKENDS = ("auto", *PINS)
ON_CPU = ("auto", "math", "flash")
OWN_IMPLS = ("math", "reference")  # of vp.patch: they do not call scaled_dot_product_attention
SDPA_IMPLS = ("sdpa", "channel")  # these do, whatever timm's fused_attn says
REFUSED = ("no viable backend", "no available kernel")  # how PyTorch begins when a pinned kernel cannot serve


@contextmanager
def pinned(backend: str) -> Iterator[None]:
    """Within, scaled_dot_product_attention runs this kernel and no other; "auto" changes nothing. Graphs that are captured within keep it."""
    if backend == "auto":
        yield
        return
    with sdpa_kernel(PINS[backend]):
        yield


def check_backend(backend: str, *, device: torch.device, engine: str) -> None:
    """Raises: ValueError for what can be refused without a model."""
    if engine == "onnxruntime" and backend != "auto":
        raise ValueError(f"backend {backend} is one of PyTorch's kernels, and onnxruntime has its own: use --backend auto")
    if device.type == "cpu" and backend not in ON_CPU:
        raise ValueError(f"backend {backend} cannot serve on the CPU, where PyTorch has the kernels flash and math alone: use auto, flash or math")


def check_served(backend: str, label: str, model: nn.Module, call: Callable[[], object]) -> None:
    """Run the call once, pinned. Raises: ValueError that says why the kernel cannot serve this model; nothing falls back."""
    if backend == "auto":
        return
    own = own_attention(model)
    if own and backend != "math":
        raise ValueError(f"backend {backend} cannot be pinned for {label}: {own[0]} computes attention by itself, not by scaled_dot_product_attention")
    with warnings.catch_warnings(record=True) as reasons, pinned(backend), AttentionCalls() as attention:
        warnings.simplefilter("always")  # PyTorch warns of the reasons, then raises
        try:
            call()
        except RuntimeError as error:
            if not str(error).lower().startswith(REFUSED):
                raise
            raise ValueError(f"backend {backend} cannot serve {label}: {why(reasons, attention)}") from error
    if not attention.count and backend != "math":
        raise ValueError(f"backend {backend} cannot be pinned for {label}: it never calls scaled_dot_product_attention")


def own_attention(model: nn.Module) -> list[str]:
    """Modules whose attention is matmul, softmax, matmul: timm's with fused_attn off, and ours with impl="math"."""
    named = list(model.named_modules())
    ours = [name for name, module in named if isinstance(module, Prune) and module.impl in OWN_IMPLS and not module.query_key_free]
    free = {name.removesuffix(".prune") for name, module in named if isinstance(module, Prune) and (module.query_key_free or module.impl in SDPA_IMPLS)}
    return ours + [name for name, module in named if getattr(module, "fused_attn", True) is False and name not in free]


class AttentionCalls(TorchFunctionMode):
    """Counts the calls of scaled_dot_product_attention, and describes the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.last = 0, "unknown arguments"

    def __torch_function__(self, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            self.count += 1
            self.last = described(*args, **kwargs)
        return function(*args, **kwargs)


def described(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, **_) -> str:
    mask = "no mask" if attn_mask is None else f"a mask{' that needs a gradient' if attn_mask.requires_grad else ''}"
    dropout = f", dropout {dropout_p:g}" if dropout_p else ""
    return f"{str(query.dtype).removeprefix('torch.')}, head dim {query.shape[-1]}, {mask}{dropout}"


def why(reasons: list[warnings.WarningMessage], attention: AttentionCalls) -> str:
    """PyTorch's own reasons where it gives some, and what it was asked for."""
    texts = [str(reason.message).partition(" (Triggered internally")[0].strip() for reason in reasons]
    texts = [text for text in dict.fromkeys(texts) if text and not text.endswith("because:")]
    return f"it was asked for {attention.last}" + (f"; PyTorch says: {' '.join(texts)}" if texts else "")
