"""What several tests share: tiny models and the error budget of DESIGN's section on numbers."""

from collections.abc import Iterator
from contextlib import contextmanager

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vit_prune.analysis.noop import perturb
from vit_prune.methods.base import set_progress
from vit_prune.methods.budgetformer import BudgetFormerMethod
from vit_prune.methods.stack import prune_stacks


@contextmanager
def single_thread() -> Iterator[None]:
    """Threads that wait for each other cost more than tiny matrices take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def tiny_vit(host: type[VisionTransformer] = VisionTransformer, **kwargs) -> VisionTransformer:
    """A perturbed two-block ViT on 32-pixel images, in eval mode: 16 patches of 8 px, width 32, 4 heads."""
    torch.manual_seed(0)
    args = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5, **kwargs}
    return perturb(host(**args)).eval()


def tiny_named(name: str = "vit_tiny_patch16_224", **kwargs) -> nn.Module:
    """The same, cut from a registered name, so that it can be saved and loaded."""
    args = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5, **kwargs}
    return perturb(timm.create_model(name, **args)).eval()


def randomise_bias(model: nn.Module, scale: float = 1.0, seed: int = 1) -> nn.Module:
    """Give every token bias random weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("token_bias.weight"):
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def kept_indices(model: nn.Module, images: Tensor) -> list[Tensor]:
    """The kept token index [B, M] of each block in one forward."""
    kept, handles = [], []
    for block in model.blocks:
        handles.append(block.attn.prune.register_forward_hook(lambda _module, _args, output: kept.append(output.index)))
    with torch.no_grad():
        model(images)
    for handle in handles:
        handle.remove()
    return kept


def gates_of(model: nn.Module) -> list[BudgetFormerMethod]:
    """The gates of the blocks, in order."""
    return [gate for stack in prune_stacks(model) for gate in stack.gaters]


def randomise_gates(model: nn.Module) -> nn.Module:
    """Budgets and relevances that differ from image to image, after the end of a training."""
    generator = torch.Generator().manual_seed(3)
    for gate in gates_of(model):
        for parameter in gate.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * (0.7 if parameter.ndim > 1 else 0.3)
    set_progress(model, 1.0)
    return model


def assert_within_budget(actual: Tensor, *, exact: Tensor, eager: Tensor, factor: float = 2.0) -> None:
    """The error against the float64 reference is at most `factor` times that of plain PyTorch in the same dtype."""
    error, allowed = ((other.double() - exact).abs().max().item() for other in (actual, eager))
    floor = torch.finfo(actual.dtype).eps * exact.abs().max().item()
    assert error <= factor * max(allowed, floor), f"error {error:.2e}, plain PyTorch {allowed:.2e}"
