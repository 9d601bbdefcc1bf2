"""A data set that is drawn: coloured shapes on photographs, in COCO's format, with all that such files may hold.

Sparse category ids, masks as polygons, polygons of two parts, run lengths and compressed run lengths, crowds, and images without objects.
"""

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from vit_prune.analysis.photographs import TWELVE, photographs
from vit_prune.detection.data.masks import encode

CATEGORIES = {3: "circle", 17: "square", 90: "triangle"}
HUES = {3: 0, 17: 85, 90: 170}  # of 255
SIDES = (24, 72)  # pixels of a shape
EMPTY_EVERY, CROWD_EVERY = 10, 7  # images


def draw_coco(folder: Path, *, train: int = 200, val: int = 60, size: int = 160, seed: int = 0) -> Path:
    """COCO's layout under a folder, which is returned."""
    grounds = list(photographs(TWELVE).values())
    for split, count, half in (("train", train, 0), ("val", val, 1)):
        draw_split(folder, split, count, grounds[half::2], size, np.random.default_rng((seed, half)))
    return folder


def draw_split(folder: Path, split: str, count: int, grounds: list[Image.Image], size: int, random: np.random.Generator) -> None:
    images, annotations = [], []
    (folder / f"{split}2017").mkdir(parents=True, exist_ok=True)
    (folder / "annotations").mkdir(exist_ok=True)
    for number in range(count):
        width, height = (int(random.integers(size * 3 // 4, size + 1)) for _ in range(2))
        image = background(grounds[number % len(grounds)], width, height, random)
        for annotation in draw_objects(image, number, random):
            annotations.append({"id": len(annotations) + 1, "image_id": number + 100, **annotation})
        images.append({"id": number + 100, "file_name": f"{number:04d}.png", "width": width, "height": height})
        image.save(folder / f"{split}2017" / f"{number:04d}.png")
    categories = [{"id": number, "name": name} for number, name in reversed(CATEGORIES.items())]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(content))


def background(photograph: Image.Image, width: int, height: int, random: np.random.Generator) -> Image.Image:
    left, top = int(random.integers(photograph.width - width + 1)), int(random.integers(photograph.height - height + 1))
    return photograph.crop((left, top, left + width, top + height))


def draw_objects(image: Image.Image, number: int, random: np.random.Generator) -> list[dict]:
    """One to four shapes, of which a later one covers an earlier one; none in some images, a crowd in others."""
    if number % EMPTY_EVERY == EMPTY_EVERY - 1:
        return []
    kinds = random.choice(list(CATEGORIES), int(random.integers(1, 5)))
    shapes = [draw_shape(image, int(kind), float(random.integers(*SIDES)), random) for kind in kinds]
    masks = np.stack([mask for mask, _ in shapes])
    for index in range(len(masks)):
        masks[index] &= ~masks[index + 1 :].any(0)
    each = enumerate(zip(masks, kinds, shapes, strict=True))
    found = [annotation(mask, int(kind), polygon, index) for index, (mask, kind, (_, polygon)) in each if mask.any()]
    return [*found, crowd(image, random)] if number % CROWD_EVERY == 0 else found


def draw_shape(image: Image.Image, kind: int, side: float, random: np.random.Generator) -> tuple[np.ndarray, list[float]]:
    """Draws it, and gives its mask [h, w] and its outline."""
    x, y = random.uniform(0, max(1, image.width - side)), random.uniform(0, max(1, image.height - side))
    turns = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    corners = {
        3: [(x + side / 2 * (1 + np.cos(t)), y + side / 2 * (1 + np.sin(t))) for t in turns],
        17: [(x, y), (x + side, y), (x + side, y + side), (x, y + side)],
        90: [(x + side / 2, y), (x + side, y + side), (x, y + side)],
    }[kind]
    hue = (HUES[kind] + int(random.integers(-15, 16))) % 256
    ImageDraw.Draw(image).polygon(corners, fill=Image.new("HSV", (1, 1), (hue, 230, int(random.integers(160, 256)))).convert("RGB").getpixel((0, 0)))
    stencil = Image.new("1", image.size)
    ImageDraw.Draw(stencil).polygon(corners, fill=1)
    return np.array(stencil), [float(value) for corner in corners for value in corner]


def annotation(mask: np.ndarray, kind: int, polygon: list[float], index: int) -> dict:
    """Of a mask, in an encoding by turns; a polygon only where nothing covers it."""
    rows, columns = np.where(mask.any(1))[0], np.where(mask.any(0))[0]
    box = [float(columns[0]), float(rows[0]), float(columns[-1] + 1 - columns[0]), float(rows[-1] + 1 - rows[0])]
    encodings = [run_lengths(mask), encode(mask[None])[0], [polygon], [polygon, polygon[:6]]]
    return {"category_id": kind, "bbox": box, "area": float(mask.sum()), "iscrowd": 0, "segmentation": encodings[index % 4]}


def run_lengths(mask: np.ndarray) -> dict:
    """Uncompressed, column by column."""
    flat = mask.T.ravel()
    edges = np.flatnonzero(np.diff(flat.astype(np.int8))) + 1
    counts = np.diff([0, *edges, len(flat)]).tolist()
    return {"size": list(mask.shape), "counts": [0, *counts] if flat[0] else counts}


def crowd(image: Image.Image, random: np.random.Generator) -> dict:
    """Many small circles that nobody has to tell apart."""
    mask = np.zeros((image.height, image.width), dtype=bool)
    for _ in range(12):
        mask |= draw_shape(image, 3, 10.0, random)[0]
    return annotation(mask, 3, [], 0) | {"iscrowd": 1}


if __name__ == "__main__":
    draw_coco(Path(sys.argv[1]), train=400, val=80)
