"""A data set in COCO's format: its images, its objects, and the numbers of its categories.

G objects of an image.  Labels 1 to K stand for category ids in rising order, whatever gaps those have; 0 is the background.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vit_prune.detection.data.masks import bitmap
from vit_prune.train.data.images import read_image

NEEDED = {"images": ("id", "file_name", "width", "height"), "annotations": ("id", "image_id", "category_id", "bbox"), "categories": ("id", "name")}
FEW = 3


@dataclass(frozen=True)
class Categories:
    """names by label - 1, and their ids in the file."""

    ids: tuple[int, ...]
    names: tuple[str, ...]

    def label_of(self, category: int) -> int:
        return self.ids.index(category) + 1

    def id_of(self, label: int) -> int:
        return self.ids[label - 1]


class CocoImages:
    """Images and their objects, read and checked once.

    Args:
        annotations: COCO's JSON. images: the folder that its file names lie in.

    Raises: OSError; ValueError that names the file and what is wrong with it.
    """

    def __init__(self, annotations: str | Path, images: str | Path) -> None:
        self.path, self.folder = Path(annotations), Path(images)
        content = read_json(self.path)
        categories = sorted(content["categories"], key=lambda one: one["id"])
        self.categories = Categories(tuple(one["id"] for one in categories), tuple(one["name"] for one in categories))
        self.images = sorted(content["images"], key=lambda one: one["id"])
        self.objects = self.by_image(content["annotations"])
        if not self.folder.is_dir():
            raise FileNotFoundError(f"no folder of images {self.folder}")

    def by_image(self, annotations: list[dict]) -> dict[int, list[dict]]:
        objects: dict[int, list[dict]] = {image["id"]: [] for image in self.images}
        if len(objects) < len(self.images):
            raise ValueError(f"{self.path}: two images have the same id")
        for one in annotations:
            if one["image_id"] not in objects:
                raise ValueError(f"{self.path}: annotation {one['id']} is of image {one['image_id']}, which is not listed")
            if one["category_id"] not in self.categories.ids:
                raise ValueError(f"{self.path}: annotation {one['id']} is of category {one['category_id']}, which is not listed")
            objects[one["image_id"]].append(one)
        return objects

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int) -> Image.Image:
        """RGB, upright as its EXIF orientation says, which is what width and height in the file are of.

        Raises: UnreadableImage; ValueError that names a file of another size than the annotations say.
        """
        entry = self.images[index]
        path = self.folder / entry["file_name"]
        image = read_image(path)
        if image.size != (entry["width"], entry["height"]):
            raise ValueError(
                f"{path} has {image.size[0]} x {image.size[1]} pixels once it stands upright, {self.path} says {entry['width']} x {entry['height']}: "
                "annotations are of the upright image"
            )
        return image

    def target(self, index: int) -> dict[str, Tensor]:
        """Objects to learn: boxes [G, 4] x1 y1 x2 y2 float32, labels [G] int64, masks [G, h, w] uint8; `dropped` counts those without any area.

        A crowd is not learnt. Boxes are clipped to the image. Raises: ValueError that names the annotation.
        """
        entry = self.images[index]
        size = entry["height"], entry["width"]
        objects = [one for one in self.objects[entry["id"]] if not one.get("iscrowd", 0)]
        boxes = clipped(torch.tensor([corners(one["bbox"]) for one in objects], dtype=torch.float32).reshape(-1, 4), size)
        target = {
            "boxes": boxes,
            "labels": torch.tensor([self.categories.label_of(one["category_id"]) for one in objects], dtype=torch.int64),
            "masks": torch.from_numpy(np.stack([self.mask(one, size) for one in objects])) if objects else torch.zeros(0, *size, dtype=torch.uint8),
        }
        return without_empty(target | {"dropped": torch.tensor(0)})

    def mask(self, annotation: Mapping, size: tuple[int, int]) -> np.ndarray:
        if "segmentation" not in annotation:
            raise ValueError(f"{self.path}: annotation {annotation['id']} has no segmentation, which Mask R-CNN learns masks from")
        try:
            return bitmap(annotation["segmentation"], size)
        except ValueError as error:
            raise ValueError(f"{self.path}: annotation {annotation['id']}: {error}") from None


def read_json(path: Path) -> dict:
    """Raises: OSError; ValueError for what is not COCO's."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    for part, keys in NEEDED.items():
        entries = content.get(part) if isinstance(content, dict) else None
        if not isinstance(entries, list):
            raise ValueError(f"{path} has no list of {part}: it is not in COCO's format")
        for entry in entries:
            if missing := [key for key in keys if key not in entry]:
                raise ValueError(f"{path}: an entry of {part} has no {missing[0]}: {entry!r:.100}")
    return content


def corners(box: list[float]) -> list[float]:
    """x y width height -> x1 y1 x2 y2."""
    x, y, width, height = box
    return [x, y, x + width, y + height]


def clipped(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    return torch.stack([boxes[:, 0::2].clamp(0, size[1]), boxes[:, 1::2].clamp(0, size[0])], dim=2).flatten(1)


def without_empty(target: dict[str, Tensor]) -> dict[str, Tensor]:
    """The target without objects whose box or mask has no area; `dropped` grows by their number. Do so after each change of an image."""
    boxes, masks = target["boxes"], target["masks"]
    keep = (boxes[:, 2:] > boxes[:, :2]).all(1) & masks.flatten(1).any(1).bool()  # torch: of uint8 it is uint8
    kept = {name: target[name][keep] for name in ("boxes", "labels", "masks")}
    return kept | {"dropped": target["dropped"] + (~keep).sum()}
