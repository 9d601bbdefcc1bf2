"""The sample photographs of scikit-image and scikit-learn, cut into crops: real images without a download."""

from collections.abc import Sequence
from importlib.resources import files

import numpy as np
import torch
from PIL import Image
from timm.data import resolve_model_data_config
from torch import Tensor, nn

SKIMAGE = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "motorcycle_left.png", "camera.png")
SKLEARN = ("china.jpg", "flower.jpg")
EIGHT = SKIMAGE + SKLEARN
TWELVE = (*EIGHT, "clock_motion.png", "coins.png", "moon.png", "hubble_deep_field.jpg")  # scikit-image's other pictures are textures, tissue and text


def photographs(names: Sequence[str] = EIGHT) -> dict[str, Image.Image]:
    """Photographs by name, RGB. Raises: ModuleNotFoundError that names the extra."""
    try:
        skimage, sklearn = files("skimage.data"), files("sklearn.datasets.images")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"the sample photographs come with {error.name}: pip install 'vit_prune[analysis]'") from None
    return {name: Image.open(str((sklearn if name in SKLEARN else skimage) / name)).convert("RGB") for name in names}


def crops(photograph: Image.Image, size: int, count: int = 2) -> list[Image.Image]:
    """`count` square crops along the diagonal, each four fifths of the shorter side, resized to `size` pixels."""
    side = min(photograph.size) * 4 // 5
    shares = np.linspace(0, 1, count)
    corners = [(round(share * (photograph.width - side)), round(share * (photograph.height - side))) for share in shares]
    return [photograph.crop((x, y, x + side, y + side)).resize((size, size), Image.Resampling.BICUBIC) for x, y in corners]


def photograph_batches(model: nn.Module, size: int, count: int = 2, names: Sequence[str] = EIGHT) -> list[Tensor]:
    """One batch [count, 3, size, size] per photograph, normalised as the model's pretrained config says."""
    config = resolve_model_data_config(model)
    mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
    batches = []
    for photograph in photographs(names).values():
        pixels = np.stack([np.asarray(crop) for crop in crops(photograph, size, count)])
        batches.append((torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - mean) / std)
    return batches
