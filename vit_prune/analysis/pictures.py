"""Which columns did each block keep? Drawn on the images themselves."""

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from vit_prune.methods.stack import prune_stacks


@torch.no_grad()
def kept_columns(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Which patches each block attends to: images [B, C, H, W] -> one bool [B, n] per block."""
    seen: list = []
    handles = [stack.register_forward_hook(lambda _stack, args, kept: seen.append((args[0], kept))) for stack in prune_stacks(model)]
    if not handles:
        raise ValueError("the model is not patched: there are no kept columns to look at")
    try:
        model.eval()(images)
    finally:
        for handle in handles:
            handle.remove()
    return [mark(x, kept)[:, model.num_prefix_tokens :] for x, kept in seen]


def mark(x: Tensor, kept) -> Tensor:
    """[B, N] bool, True for the tokens among the kept columns."""
    if kept.index is None:
        return torch.ones(x.shape[:2], dtype=torch.bool)
    real = torch.ones_like(kept.index, dtype=torch.bool) if kept.bias is None else (kept.bias > float("-inf")).any(1)
    return torch.zeros(x.shape[:2], dtype=torch.long).scatter_add(1, kept.index.cpu(), real.long().cpu()) > 0


def draw_kept(model: nn.Module, images: Tensor, path: str | Path, *, grid: tuple[int, int] | None = None, mean=None, std=None) -> Path:
    """A picture with one row per image and one panel per block, the dropped patches darkened.

    Args:
        images: [B, 3, H, W] as the model takes them; mean and std undo their normalisation (None: the model's own config).
        grid: patches down and across; None reads it off the model, or assumes a square.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    blocks = kept_columns(model, images)
    pixels = denormalised(model, images, mean, std)
    height, width = grid or grid_of(model, blocks[0].shape[1])
    figure, axes = plt.subplots(len(images), len(blocks) + 1, figsize=(1.25 * (len(blocks) + 1), 1.35 * len(images)), squeeze=False)
    for row, panels in enumerate(axes):
        panels[0].imshow(pixels[row].numpy())
        for block, panel in enumerate(panels[1:]):
            shade = torch.where(blocks[block][row].view(height, width), 1.0, 0.2)
            panel.imshow((pixels[row] * upsample(shade, pixels.shape[1:3])[..., None]).numpy())
            if row == 0:
                panel.set_title(f"block {block}\n{blocks[block].float().mean():.0%}", fontsize=8)
    for panel in axes.flat:
        panel.axis("off")
    axes[0][0].set_title("image", fontsize=8)
    figure.tight_layout(pad=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return Path(path)


def denormalised(model: nn.Module, images: Tensor, mean, std) -> Tensor:
    """[B, H, W, 3] in [0, 1]."""
    config = model.pretrained_cfg
    mean, std = (torch.tensor(given or config[key]).view(3, 1, 1) for given, key in ((mean, "mean"), (std, "std")))
    return (images.cpu() * std + mean).clamp(0, 1).permute(0, 2, 3, 1)


def grid_of(model: nn.Module, num_patches: int) -> tuple[int, int]:
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    if grid is not None and grid[0] * grid[1] == num_patches:
        return tuple(grid)
    side = math.isqrt(num_patches)
    if side * side != num_patches:
        raise ValueError(f"{num_patches} patches are not a square: give grid=(down, across)")
    return side, side


def upsample(shade: Tensor, size) -> Tensor:
    """Nearest-neighbour, [h, w] -> [H, W]."""
    return torch.nn.functional.interpolate(shade[None, None], size=tuple(size), mode="nearest")[0, 0]
