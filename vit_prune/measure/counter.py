"""Counters that run the model: PyTorch's on `meta` tensors, and fvcore's, to check the closed form against.

Both count matrix products and convolutions. Neither knows what a fused attention kernel computes, so both are shown the plain one.
"""

import copy
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from vit_prune.measure.inputs import image_size, unwrap
from vit_prune.measure.result import ModelMacs
from vit_prune.methods.budgetformer import BudgetFormerMethod
from vit_prune.methods.columns import ColumnsMethod
from vit_prune.methods.stack import prune_stacks
from vit_prune.patch import unpatch

FVCORE_PRODUCTS = ("addmm", "bmm", "conv", "einsum", "linear", "matmul", "mm")  # fvcore also counts norms, pooling and interpolation


class CountMismatch(Exception):
    """A counter and the closed form disagree: one of them is wrong."""


def count_macs(model: nn.Module, img_size: int | tuple[int, int] | None = None, *, inputs: Tensor | Sequence[Tensor] | None = None) -> int:
    """MACs of one forward by FlopCounterMode, in evaluation mode, on a `meta` copy: shapes, but neither data nor time.

    The model itself is not run or changed; hooks of the copy do run.

    Args:
        model: any module; its weights may lie on any device.
        img_size: pixels, int or (height, width), of a batch of one image; None is the model's own size.
        inputs: the forward's arguments, instead of an image; only their shapes and dtypes matter.

    Raises: ValueError for the rules mass and threshold, and for gates whose budget decides: what they compute depends on the values in the image.
    """
    model = unwrap(model)
    names = {module: name for name, module in model.named_modules()}
    for module, name in names.items():
        if isinstance(module, ColumnsMethod) and module.config.rule != "topk":
            raise ValueError(f"{name} keeps as many columns as the image asks for, and a count has no image: use macs(model, num_columns=[...])")
        if isinstance(module, BudgetFormerMethod) and module.known_heads is None:
            how = "macs(model, num_heads=[...]), or vp.set_heads, --heads in the tools"
            raise ValueError(f"{name} runs as many heads as the image asks for, and a count has no image: use {how}")
    shadow = copy_with(model, on_meta).eval().requires_grad_(False)  # the counter's module tracker trips over leaves that need gradients
    for gate in (module for module in model.modules() if isinstance(module, BudgetFormerMethod)):
        shadow.get_submodule(names[gate]).heads = gate.known_heads  # an untrained one runs all, which it reads off a buffer
    arguments = [example_image(shadow, img_size)] if inputs is None else tree_leaves(inputs)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        shadow(*map(on_meta, arguments))
    return counter.get_total_flops() // 2  # FLOPs = 2 x MACs


def count_macs_fvcore(model: nn.Module, img_size: int | tuple[int, int] | None = None) -> int:
    """MACs of an unpatched model by fvcore, which calls them flops. It traces one forward with arbitrary weights on the CPU.

    Raises: ImportError where fvcore is missing; ValueError for a patched model.
    """
    model = unwrap(model)
    if prune_stacks(model):
        raise ValueError("fvcore hooks every module, and a hooked qkv is called whole, not sliced: count the unpatched model with it")
    traced = copy_with(model, on_meta).to_empty(device="cpu").eval()
    for module in traced.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch.jit, which fvcore traces with, announces its end
        from fvcore.nn import FlopCountAnalysis

        analysis = FlopCountAnalysis(traced, example_image(traced, img_size))
        analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
        products = analysis.by_operator()
    return int(sum(products[operator] for operator in FVCORE_PRODUCTS))


def cross_check(model: nn.Module, result: ModelMacs, *, name: str, fvcore: bool) -> dict[str, int]:
    """Count the model and its dense self, and compare with a closed-form result. Returns what was counted. Raises: CountMismatch."""
    dense = copy_with(unwrap(model), on_meta)
    dense = unpatch(dense) if prune_stacks(dense) else dense
    counted = {"pruned": count_macs(model, result.img_size), "dense": count_macs(dense, result.img_size)}
    if fvcore:
        counted["dense, by fvcore"] = count_macs_fvcore(dense, result.img_size)
    for what, found in counted.items():
        expected = result.total if what == "pruned" else result.dense
        if found != expected:
            raise CountMismatch(f"{name}, {what}: counted {found:,} MACs, the closed form says {expected:,}")
    return counted


def copy_with(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """A deep copy in which every tensor is convert(tensor): parameters, buffers, and tensors that are plain attributes, in lists too."""
    tensors = [leaf for module in model.modules() for leaf in tree_leaves(vars(module)) if isinstance(leaf, Tensor)]
    return copy.deepcopy(model, {id(tensor): _as_parameter(convert(tensor), tensor) for tensor in tensors})


def _as_parameter(new: Tensor, old: Tensor) -> Tensor:
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new


def on_meta(tensor: Tensor) -> Tensor:
    """Shape and dtype alone."""
    return tensor.detach().to("meta")


def example_image(model: nn.Module, img_size: int | tuple[int, int] | None) -> Tensor:
    """[1, C, height, width] in the dtype of the weights, not initialised."""
    size = image_size(model, img_size)
    return torch.empty(1, getattr(model, "in_chans", 3), *size, dtype=next(model.parameters()).dtype, device="cpu")
