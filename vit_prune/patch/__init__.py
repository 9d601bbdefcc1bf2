"""Floor 3: which host class becomes which of ours, and back."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block
from torch import nn

from vit_prune.methods.base import Host, MethodConfig
from vit_prune.methods.budgetformer import heads_in
from vit_prune.methods.columns import ColumnsMethod
from vit_prune.methods.schedules import Keep, parse_keep
from vit_prune.methods.stack import Prune, columns_methods, prune_stacks
from vit_prune.methods.token_bias import TokenBiasMethod
from vit_prune.ops.attention import IMPLS
from vit_prune.patch.check import UnsupportedModel, check_host, check_runnable, expand
from vit_prune.patch.fused import is_fused
from vit_prune.patch.roots import MERGING
from vit_prune.patch.timm import PrunedAttention, PrunedBlock

Methods = MethodConfig | Sequence[MethodConfig]


def patch(model: nn.Module, methods: Methods, *, impl: str = "auto") -> nn.Module:
    """Add methods to a timm ViT, in place and reversibly.

    Call it before the optimizer is built (an older one does not hold the new parameters) and before torch.compile or DDP wrap the model.

    Args:
        model: a timm VisionTransformer, VisionTransformerDistilled or NaFlexVit of standard blocks.
        methods: one config or several, e.g. `TokenBias(keep=0.5)` or `[TokenBias(), Columns(keep=0.5, dropped="merge")]`.
        impl: how attention is computed, see `ops.column_attention`. "auto" honours timm's `fused_attn`.

    Returns: the same model.
    Raises: TypeError for a host or block that is not supported, by name; AttributeError for a host that lacks what we read;
        ValueError for a model that is patched already, and for methods that do not go together. Nothing is changed then.
    """
    check_host(model)
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}, got {impl!r}")
    configs = expand(methods)
    stacks = [Prune(configs, host, impl=impl) for host in hosts(model)]
    for stack, host in zip(stacks, hosts(model), strict=True):
        check_runnable(stack, host)
    if any(stack.mergers for stack in stacks) and type(model) not in MERGING:
        merging = ", ".join(host.__name__ for host in MERGING)
        raise UnsupportedModel(f"tokens of a {type(model).__name__} cannot be merged; ToMe takes {merging}")
    for block, stack in zip(model.blocks, stacks, strict=True):
        attach(block.attn, stack)
    if any(stack.mergers for stack in stacks):
        model.__class__ = MERGING[type(model)]
        for block in model.blocks:
            block.__class__ = PrunedBlock
    warn_if_untrained(model)
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """Take everything that `patch` added out again: plain timm, bit for bit. Raises: ValueError where nothing is patched, or fused."""
    if is_fused(model):
        raise ValueError("a fused model has no qkv to give back: unpatch the model before vp.fuse, or a copy of it")
    patched_attention = [module for module in model.modules() if type(module) is PrunedAttention]
    if not patched_attention:
        raise ValueError("the model is not patched")
    for attn in patched_attention:
        for name in attn.prune.frozen:
            attn.get_parameter(name).requires_grad_(True)
        del attn.prune
        attn.__class__ = Attention
    plain = {PrunedBlock: Block} | {merging: host for host, merging in MERGING.items()}
    for module in [module for module in model.modules() if type(module) in plain]:
        module.__class__ = plain[type(module)]
    return model


@contextmanager
def patched(model: nn.Module, methods: Methods, *, impl: str = "auto") -> Iterator[nn.Module]:
    """`patch` for the length of a with-block."""
    patch(model, methods, impl=impl)
    try:
        yield model
    finally:
        unpatch(model)


def set_keep(model: nn.Module, keep: Keep | float | str | Sequence[float]) -> None:
    """Change the keep ratios of a patched model: any schedule that `Columns(keep=...)` takes.

    Raises: ValueError where the model has no Columns, where their rule has no keep ratio, and for ratios outside (0, 1].
    """
    columns = columns_methods(model)
    if not columns:
        raise ValueError("no Columns in this model: patch it with TokenBias(keep=...) or Columns(keep=...)")
    for method, ratio in zip(columns, parse_keep(keep).ratios(len(columns)), strict=True):
        method.set_keep_ratio(ratio)
    warn_if_untrained(model)


def set_heads(model: nn.Module, heads: int | Sequence[int] | None) -> None:
    """Let k heads run in every image of a model with BudgetFormer, one number or one per block, for static shapes; None: each image's budget decides.

    Raises: ValueError where the model has no gates, and for k outside 1..H.
    """
    gates = [method for stack in prune_stacks(model) for method in stack.gaters]
    if not gates:
        raise ValueError("no gates in this model: patch it with BudgetFormer()")
    for method, k in [(method, heads_in(heads, index, len(gates), method.num_heads)) for index, method in enumerate(gates)]:
        method.heads = k


def hosts(model: nn.Module) -> list[Host]:
    """What the methods are told of each block."""
    calibration = getattr(model, "calibration", None) or [None] * len(model.blocks)
    if len(calibration) != len(model.blocks):
        raise ValueError(f"the calibration is of {len(calibration)} blocks, the model has {len(model.blocks)}: run vp.calibrate again")
    return [
        Host(
            name=f"blocks.{index}.attn",
            index=index,
            depth=len(model.blocks),
            dim=model.embed_dim,
            num_heads=block.attn.num_heads,
            head_dim=block.attn.head_dim,
            num_prefix_tokens=model.num_prefix_tokens,
            has_class_token=model.has_class_token,
            has_key_norm=not isinstance(block.attn.k_norm, nn.Identity),
            calibration=measured,
        )
        for index, (block, measured) in enumerate(zip(model.blocks, calibration, strict=True))
    ]


def attach(attn: nn.Module, stack: Prune) -> None:
    """Swap the class of one attention and give it its methods, on the device and in the dtype of its weights."""
    parameter = next(attn.proj.parameters())
    attn.prune = stack.to(device=parameter.device, dtype=parameter.dtype).train(attn.training)
    attn.__class__ = PrunedAttention
    if stack.query_key_free:  # nothing reads these norms: frozen, so that DDP sees no unused parameter
        names = [f"{norm}.{name}" for norm in ("q_norm", "k_norm") for name, p in getattr(attn, norm).named_parameters() if p.requires_grad]
        stack.frozen = tuple(names)
        for name in names:
            attn.get_parameter(name).requires_grad_(False)


def warn_if_untrained(model: nn.Module) -> None:
    """A zero bias with keep < 1 keeps the top of every image: say so."""
    for stack in prune_stacks(model):
        biases = [method.weight for method in stack.children() if isinstance(method, TokenBiasMethod) and not method.weight.is_meta]
        choosers = [method for method in stack.choosers if isinstance(method, ColumnsMethod)]
        ranked = any(method.needs_bias and method.keep_ratio < 1 and method.config.sampling == "topk" for method in choosers)
        if ranked and biases and not any(torch.count_nonzero(weight) for weight in biases):
            message = "the token bias is all zero and keep < 1: ties keep the top of every image. Train first, or calibrate and use importance='column_mean'"
            warnings.warn(message, stacklevel=3)
            return
