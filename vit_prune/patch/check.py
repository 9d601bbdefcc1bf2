"""What may be patched, and with what: everything that can be refused is refused here, before a module is touched."""

from collections.abc import Sequence

from timm.layers import Attention
from torch import nn

from vit_prune.methods.base import PROVIDERS, Host, MethodConfig
from vit_prune.methods.stack import Prune, prune_stacks
from vit_prune.patch.timm import ATTENTION_READS, BLOCK_READS, BLOCKS, ROOT_READS, ROOTS

RUN_PROVIDERS = ("columns", "merge", "gate")  # the hooks that PrunedAttention and PrunedBlock run


class UnsupportedModel(TypeError):
    """A model, block or attention that cannot be patched; the message names it and what can be."""


def expand(methods: MethodConfig | Sequence[MethodConfig]) -> tuple[MethodConfig, ...]:
    """The configs, with shorthands written out. Raises: TypeError for what is not a config."""
    methods = methods if isinstance(methods, Sequence) else [methods]
    for method in methods:
        if not isinstance(method, MethodConfig):
            raise TypeError(f"methods must be configs such as TokenBias() or Columns(keep=0.5), got {method!r}")
    configs = tuple(config for method in methods for config in method.expand())
    if not configs:
        raise ValueError("no method given")
    return configs


def check_host(model: nn.Module) -> None:
    """Raises where the model cannot be patched, and says by what name."""
    if prune_stacks(model):
        raise ValueError("the model is patched already: unpatch it first, or give all methods in one call")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise UnsupportedModel(f"{type(model).__name__} does not see parameters that come later: patch the model, then wrap it")
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise UnsupportedModel("the model is compiled: patch it first (model._orig_mod is the plain one), then call torch.compile")
    if type(model) not in ROOTS:
        raise UnsupportedModel(f"{_name(model)} cannot be patched; supported: {', '.join(map(_qualname, ROOTS))}")
    _check_reads(model, "model", ROOT_READS)
    for index, block in enumerate(model.blocks):
        _check_block(f"blocks.{index}", block)


def _check_block(name: str, block: nn.Module) -> None:
    if type(block) not in BLOCKS:
        raise UnsupportedModel(f"{name} is {_name(block)}, which cannot be patched; supported: {', '.join(map(_qualname, BLOCKS))}")
    _check_reads(block, name, BLOCK_READS)
    if type(block.attn) is not Attention:
        raise UnsupportedModel(f"{name}.attn is {_name(block.attn)}, which cannot be patched; supported: {_qualname(Attention)}")
    _check_reads(block.attn, f"{name}.attn", ATTENTION_READS)


def _check_reads(module: nn.Module, name: str, attributes: Sequence[str]) -> None:
    for attribute in attributes:
        if not hasattr(module, attribute):
            raise AttributeError(f"{name} ({_name(module)}) has no `{attribute}`, which vit_prune reads; this timm version is not supported")


def check_runnable(stack: Prune, host: Host) -> None:
    for method in stack.children():
        for hook in set(PROVIDERS) - set(RUN_PROVIDERS):
            if method.answers(hook):
                raise NotImplementedError(f"{host.name}: {type(method).__name__} provides `{hook}`, which timm's blocks do not run yet")


def _name(module: nn.Module) -> str:
    return _qualname(type(module))


def _qualname(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
