"""Change an image and its objects together: the large-scale jitter that ViTDet trains with, and the resize that it is judged at.

Random numbers are torch's.  An image is [3, h, w] uint8; a target as `CocoImages.target` gives it.  S is the size of the square.
"""

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vit_prune.detection.data.coco import clipped, without_empty

Target = dict[str, Tensor]
Size = tuple[int, int]
FLIP = 0.5


def large_scale_jitter(image: Image.Image, target: Target, square: int, scale: tuple[float, float] = (0.1, 2.0)) -> tuple[Tensor, Target]:
    """Mirror half of the images, resize one to `scale` times what fits into the square, and crop the square out of what is larger.

    *Simple Copy-Paste* (arXiv 2012.07177), section 3. Boxes are taken from the masks that are left.
    """
    if torch.rand(()) < FLIP:
        image, target = mirrored(image, target)
    drawn = scale[0] + (scale[1] - scale[0]) * torch.rand(()).item()
    larger = resize_image(image, drawn * min(square / image.height, square / image.width))
    corner = tuple(int(torch.randint(max(0, side - square) + 1, ())) for side in larger.size)  # right, down
    cut = larger.crop((*corner, *(min(side, start + square) for side, start in zip(larger.size, corner, strict=True))))
    return as_tensor(cut), moved(target, image.size, larger.size, corner, cut.size)


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


def moved(target: Target, before: Size, after: Size, corner: Size, cut: Size) -> Target:
    """The objects of an image that was resized and then cropped from a corner (right, down). All sizes are (width, height).

    Only the pixels that are left of the masks are looked up, each in the middle of where it comes from.
    """
    columns, rows = (source_places(*one) for one in zip(before, after, corner, cut, strict=True))
    boxes = target["boxes"] * torch.tensor([after[0] / before[0], after[1] / before[1]] * 2) - torch.tensor([*corner, *corner])
    target = without_empty(target | {"boxes": clipped(boxes, cut[::-1]), "masks": target["masks"][:, rows][:, :, columns]})
    return target | {"boxes": boxes_of(target["masks"])}


def source_places(before: int, after: int, start: int, length: int) -> Tensor:
    """Where the pixels start to start + length of a side of `after` pixels lie among `before`."""
    middle = (torch.arange(start, start + length, dtype=torch.float64) + 0.5) * before / after
    return middle.floor().long().clamp(max=before - 1)


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
