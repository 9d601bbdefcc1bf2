"""A data set in COCO's format: its images, its objects, and the numbers of its categories.

G objects of an image.  Labels 1 to K stand for category ids in rising order, whatever gaps those have; 0 is the background.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vit_prune.detection.data.check import BadData, PackedObjects, read_coco
from vit_prune.detection.data.masks import bitmap, run_lengths
from vit_prune.train.data.images import read_image


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
        content = read_coco(self.path)
        categories = sorted(content["categories"], key=lambda one: one["id"])
        self.categories = Categories(tuple(one["id"] for one in categories), tuple(one["name"] for one in categories))
        self.images = sorted(content["images"], key=lambda one: one["id"])
        self.objects: Mapping[int, list[dict]] = PackedObjects([one["id"] for one in self.images], content["annotations"])
        if not self.folder.is_dir():
            raise FileNotFoundError(f"no folder of images {self.folder}")

    def check_files(self) -> None:
        """Raises: FileNotFoundError for the first image that is not there."""
        there = {path.name for path in self.folder.iterdir()}
        for entry in self.images:
            if entry["file_name"] not in there and not (self.folder / entry["file_name"]).exists():
                raise FileNotFoundError(f"{self.path} lists {self.folder / entry['file_name']}, which does not exist")

    def __len__(self) -> int:
        return len(self.images)

    def size(self, index: int) -> tuple[int, int]:
        """(height, width)."""
        return self.images[index]["height"], self.images[index]["width"]

    def learnt(self, index: int) -> list[dict]:
        """The annotations that are no crowd."""
        return [one for one in self.objects[self.images[index]["id"]] if not one["iscrowd"]]

    def image(self, index: int) -> Image.Image:
        """RGB, upright as its EXIF orientation says, which is what width and height in the file are of.

        Raises: UnreadableImage; ValueError that names a file of another size than the annotations say.
        """
        path = self.folder / self.images[index]["file_name"]
        image = read_image(path)
        height, width = self.size(index)
        if image.size != (width, height):
            raise BadData(
                f"{path} has {image.size[0]} x {image.size[1]} pixels once it stands upright, {self.path} says {width} x {height}: "
                "annotations are of the upright image"
            )
        return image

    def target(self, index: int) -> dict[str, Tensor]:
        """Objects to learn: boxes [G, 4] x1 y1 x2 y2 float32, labels [G] int64, masks [G, h, w] uint8; `dropped` counts those without any area.

        A crowd is not learnt. Boxes are clipped to the image. Raises: ValueError that names the annotation.
        """
        size, objects = self.size(index), self.learnt(index)
        target = {
            "boxes": clipped(torch.tensor([corners(one["bbox"]) for one in objects], dtype=torch.float32).reshape(-1, 4), size),
            "labels": torch.tensor([self.categories.label_of(one["category_id"]) for one in objects], dtype=torch.int64),
            "masks": torch.from_numpy(np.stack([self.mask(one, size) for one in objects])) if objects else torch.zeros(0, *size, dtype=torch.uint8),
        }
        return without_empty(target | {"dropped": torch.tensor(0)})

    def mask(self, annotation: Mapping, size: tuple[int, int]) -> np.ndarray:
        """[h, w] uint8. Raises: ValueError that names the annotation."""
        try:
            return bitmap(annotation["segmentation"], size)
        except ValueError as error:
            raise self.bad_mask(annotation, error) from None

    def runs(self, annotation: Mapping, size: tuple[int, int]) -> dict | None:
        """Its compressed run lengths; None where there is nothing to draw. Raises: ValueError that names the annotation."""
        try:
            return run_lengths(annotation["segmentation"], size)
        except ValueError as error:
            raise self.bad_mask(annotation, error) from None

    def bad_mask(self, annotation: Mapping, error: ValueError) -> BadData:
        return BadData(f"{self.path}: annotation {annotation['id']}: {error}")


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
    kept = {name: target[name] if keep.all() else target[name][keep] for name in ("boxes", "labels", "masks")}
    return kept | {"dropped": target["dropped"] + (~keep).sum()}
