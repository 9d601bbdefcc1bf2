"""Change an image and its objects together: the large-scale jitter that ViTDet trains with, and the resize that it is judged at.

Random numbers are torch's.  An image is [3, h, w] uint8; a target as `CocoImages.target` gives it.  S is the size of the square.
"""

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from vit_prune.detection.data.coco import clipped, without_empty

Target = dict[str, Tensor]
FLIP = 0.5


def large_scale_jitter(image: Image.Image, target: Target, square: int, scale: tuple[float, float] = (0.1, 2.0)) -> tuple[Tensor, Target]:
    """Mirror half of the images, resize one to `scale` times what fits into the square, and crop the square out of what is larger.

    *Simple Copy-Paste* (arXiv 2012.07177), section 3. Boxes are taken from the masks that are left.
    """
    if torch.rand(()) < FLIP:
        image, target = mirrored(image, target)
    drawn = scale[0] + (scale[1] - scale[0]) * torch.rand(()).item()
    ratio = drawn * min(square / image.height, square / image.width)
    image, target = resized(image, target, ratio)
    return cropped(as_tensor(image), target, square)


def fit(image: Image.Image, square: int) -> Tensor:
    """The image with its longer side at S pixels, [3, h, w]."""
    return as_tensor(resize_image(image, square / max(image.size)))


def mirrored(image: Image.Image, target: Target) -> tuple[Image.Image, Target]:
    x1, y1, x2, y2 = target["boxes"].unbind(1)
    boxes = torch.stack([image.width - x2, y1, image.width - x1, y2], dim=1)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), target | {"boxes": boxes, "masks": target["masks"].flip(-1)}


def resize_image(image: Image.Image, ratio: float) -> Image.Image:
    """Sides are rounded to the nearest pixel, and 1 at least."""
    width, height = (max(1, int(side * ratio + 0.5)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BILINEAR)


def resized(image: Image.Image, target: Target, ratio: float) -> tuple[Image.Image, Target]:
    before, image = image.size, resize_image(image, ratio)
    boxes = target["boxes"] * torch.tensor([image.width / before[0], image.height / before[1]] * 2)
    masks = transforms.resize(target["masks"], [image.height, image.width], interpolation=transforms.InterpolationMode.NEAREST_EXACT)
    return image, without_empty(target | {"boxes": boxes, "masks": masks})


def cropped(image: Tensor, target: Target, square: int) -> tuple[Tensor, Target]:
    """A square anywhere in the image, or all of it on a side where it is smaller."""
    height, width = image.shape[-2:]
    down, right = (int(torch.randint(max(0, side - square) + 1, ())) for side in (height, width))
    rows, columns = slice(down, down + square), slice(right, right + square)
    image, masks = image[:, rows, columns], target["masks"][:, rows, columns]
    boxes = clipped(target["boxes"] - torch.tensor([right, down] * 2), tuple(image.shape[-2:]))
    target = without_empty(target | {"boxes": boxes, "masks": masks})
    return image, target | {"boxes": boxes_of(target["masks"])}


def boxes_of(masks: Tensor) -> Tensor:
    """The least box that holds each mask, its far sides beyond the last pixel: [G, h, w] -> [G, 4] float32."""
    rows, columns = masks.any(2).bool(), masks.any(1).bool()
    boxes = torch.zeros(len(masks), 4)
    for near, far, seen in ((1, 3, rows), (0, 2, columns)):
        place = torch.arange(seen.shape[1], dtype=torch.float32).expand_as(seen)
        boxes[:, near] = place.masked_fill(~seen, torch.inf).amin(1) if len(masks) else 0
        boxes[:, far] = place.masked_fill(~seen, -torch.inf).amax(1) + 1 if len(masks) else 0
    return boxes


def as_tensor(image: Image.Image) -> Tensor:
    """[3, h, w] uint8."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
