"""Which patches merged? Drawn on the images themselves: each patch in the mean colour of the token that it ends in."""

from pathlib import Path

import torch
from torch import Tensor, nn

from vit_prune.analysis.pictures import denormalised, grid_of, upsample
from vit_prune.methods.stack import prune_stacks

LINE = 0.35  # brightness of the lines between tokens


@torch.no_grad()
def merged_sources(model: nn.Module, images: Tensor) -> Tensor:
    """Which of the last block's tokens each patch is in: images [B, C, H, W] -> [B, n] int64.

    Raises: ValueError for a model whose tokens do not merge.
    """
    if not any(stack.mergers for stack in prune_stacks(model)):
        raise ValueError("no tokens merge in this model: patch it with ToMe(r=...)")
    x, tokens = model.eval().merged_features(images)
    source = tokens.source
    if source.shape[1] == x.shape[1]:
        raise ValueError("every block merges 0 tokens: there is nothing to draw")
    return source[:, model.num_prefix_tokens :]


def draw_merged(model: nn.Module, images: Tensor, path: str | Path, *, grid: tuple[int, int] | None = None, mean=None, std=None) -> Path:
    """A picture with two panels per image: the image, and its tokens after the last block.

    Args:
        images: [B, 3, H, W] as the model takes them; mean and std undo their normalisation (None: the model's own config).
        grid: patches down and across; None reads it off the model, or assumes a square.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes a second, and is optional
    from matplotlib.figure import Figure

    sources = merged_sources(model, images).cpu()
    pixels = denormalised(model, images, mean, std)
    size = grid or grid_of(model, sources.shape[1])
    figure = Figure(figsize=(4.4, 2.2 * len(images)), layout="constrained")
    FigureCanvasAgg(figure)
    for panels, image, source in zip(figure.subplots(len(images), 2, squeeze=False), pixels, sources, strict=True):
        panels[0].imshow(image.numpy())
        panels[1].imshow(painted(image, source.view(size)).numpy())
        panels[1].set_title(f"{len(source.unique())} of {source.numel()} patches", fontsize=8)
        for panel in panels:
            panel.axis("off")
    figure.savefig(path, dpi=90)
    return Path(path)


def painted(image: Tensor, source: Tensor) -> Tensor:
    """image [H, W, 3], source [down, across] -> [H, W, 3]: the mean colour of each token, with lines between tokens."""
    H, W = image.shape[:2]
    number = upsample(source.double(), (H, W)).long()  # the token of each pixel
    groups = number.flatten()
    count = torch.zeros(int(groups.max()) + 1).index_add(0, groups, torch.ones(H * W))
    colour = torch.zeros(len(count), 3).index_add(0, groups, image.reshape(-1, 3).float()) / count.clamp(min=1)[:, None]
    edge = torch.zeros(H, W, dtype=torch.bool)
    edge[1:] |= number[1:] != number[:-1]
    edge[:, 1:] |= number[:, 1:] != number[:, :-1]
    return torch.where(edge[..., None], LINE, colour[number])
