"""Accuracy and loss of a model over a loader.  images [B, 3, height, width], or numbers of tokens [B, L], targets [B] classes."""

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vit_prune.train.distributed import sum_over_ranks
from vit_prune.train.progress import progress_bar

TOP_K = 5


@torch.inference_mode()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device, *, autocast_dtype: torch.dtype | None = None) -> dict[str, float]:
    """Mean cross-entropy, and the percentages of images whose class is the first and among the first five (or all, where there are fewer).

    Targets below zero are left out: images that could not be read.

    Returns: {"loss", "top1", "top5", "images"}, each mean over all images of all processes, whatever the batch size.
    """
    model.eval()
    dtype = next(model.parameters()).dtype
    total = torch.zeros(4, dtype=torch.float64, device=device)
    with progress_bar("evaluation", loader) as bar:
        for images, targets in loader:
            with nullcontext() if autocast_dtype is None else torch.autocast(device.type, autocast_dtype):
                logits = model(images.to(device, dtype if images.is_floating_point() else None, non_blocking=True))
            total += count(logits.float(), targets.to(device, non_blocking=True))
            bar.update(len(images))
    loss, top1, top5, images = sum_over_ranks(total).tolist()
    if not images:
        return {"loss": math.nan, "top1": math.nan, "top5": math.nan, "images": 0}
    return {"loss": loss / images, "top1": 100 * top1 / images, "top5": 100 * top5 / images, "images": int(images)}


def count(logits: Tensor, targets: Tensor) -> Tensor:
    """logits [B, classes], targets [B] -> [4] in float64: summed loss, images right at first, images right among five, images."""
    seen = targets >= 0
    ranked = logits.topk(min(TOP_K, logits.shape[1]), dim=1).indices
    right = ranked == targets[:, None]
    loss = F.cross_entropy(logits, targets.clamp(min=0), reduction="none").double()
    return torch.stack([torch.where(seen, loss, 0).sum(), right[:, 0].sum(), right.sum(), seen.sum()])
