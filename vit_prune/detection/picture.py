"""Detections drawn into their image."""

import colorsys
from collections.abc import Mapping

from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from vit_prune.detection.data.coco import Categories

GOLDEN = 0.618034  # of the circle of hues from one label to the next: neighbours are far apart


def draw(image: Image.Image, found: Mapping[str, Tensor], categories: Categories) -> Image.Image:
    """Boxes, masks, names and scores over an RGB image; a colour for each category."""
    if not len(found["boxes"]):
        return image.copy()
    labels = found["labels"].tolist()
    colours = [colour(label) for label in labels]
    texts = [f"{categories.names[label - 1]} {score:.2f}" for label, score in zip(labels, found["scores"].tolist(), strict=True)]
    pixels = draw_segmentation_masks(pil_to_tensor(image), found["masks"], alpha=0.5, colors=colours)
    return to_pil_image(draw_bounding_boxes(pixels, found["boxes"], labels=texts, colors=colours, width=2))


def colour(label: int) -> tuple[int, int, int]:
    return tuple(round(255 * part) for part in colorsys.hsv_to_rgb(label * GOLDEN % 1, 0.9, 1.0))
