"""Detect in one image."""

import torch
from PIL import Image
from torch import Tensor

from vit_prune.detection.data.augment import fit
from vit_prune.detection.model import MaskRCNN


@torch.no_grad()
def predict(model: MaskRCNN, image: Image.Image, size: int, device: torch.device, *, least_score: float = 0.0) -> dict[str, Tensor]:
    """What is in an RGB image, in its own pixels: boxes [m, 4], scores [m], labels [m], masks [m, height, width] bool, on the CPU.

    Args: size: pixels that its longer side is resized to. least_score: what is below is left out.
    """
    [found] = model.eval()([fit(image, size).to(device)], output_sizes=[(image.height, image.width)])
    keep = found["scores"] >= least_score
    return {name: value[keep].cpu() for name, value in found.items()}
