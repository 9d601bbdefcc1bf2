"""COCO's JSON, read and checked: whatever can be wrong with it is told before the first batch, by file and entry."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

LISTS = {
    "images": ("id", "file_name", "width", "height"),
    "annotations": ("id", "image_id", "category_id", "bbox", "segmentation"),
    "categories": ("id", "name"),
}
KEPT = ("id", "category_id", "bbox", "area", "iscrowd", "segmentation")


class BadData(ValueError):
    """Data that cannot be learnt from; the message names it. A loader's worker process wraps it in a traceback, taken off here."""

    def __str__(self) -> str:
        return super().__str__().rpartition(f"{type(self).__name__}: ")[2].strip()


class PackedObjects(Mapping):
    """The annotations of each image id, as text in one buffer: processes that load images share it, where they would each copy a list of dicts."""

    def __init__(self, images: Sequence[int], annotations: Sequence[Mapping]) -> None:
        grouped = defaultdict(list)
        for one in annotations:
            grouped[one["image_id"]].append({"iscrowd": 0} | {key: one[key] for key in KEPT if key in one})
        texts = [json.dumps(grouped[number]).encode() for number in images]
        self.places = {number: place for place, number in enumerate(images)}
        self.ends = np.cumsum([0, *map(len, texts)])
        self.buffer = np.frombuffer(b"".join(texts), dtype=np.uint8)

    def __getitem__(self, image: int) -> list[dict]:
        place = self.places[image]
        return json.loads(self.buffer[self.ends[place] : self.ends[place + 1]].tobytes())

    def __iter__(self) -> Iterator[int]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def read_coco(path: Path) -> dict[str, list[dict]]:
    """Raises: OSError; ValueError for what is not COCO's, or does not hold together."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    for part, keys in LISTS.items():
        entries = content.get(part) if isinstance(content, dict) else None
        if not isinstance(entries, list):
            raise ValueError(f"{path} has no list of {part}: it is not in COCO's format")
        for entry in entries:
            if missing := [key for key in keys if not isinstance(entry, dict) or key not in entry]:
                why = ", which Mask R-CNN learns masks from" if missing[0] == "segmentation" else ""
                raise ValueError(f"{path}: an entry of {part} has no {missing[0]}{why}: {entry!r:.100}")
    check_images(path, content["images"])
    check_categories(path, content["categories"])
    check_annotations(path, content)
    return content


def check_images(path: Path, images: list[dict]) -> None:
    """Sizes become whole numbers. Raises: ValueError."""
    check_ids(path, "image", [one["id"] for one in images])
    for one in images:
        for side in ("width", "height"):
            if not is_number(one[side]) or one[side] != int(one[side]) or one[side] < 1:
                raise ValueError(f"{path}: image {one['id']} has a {side} of {one[side]!r}, expected pixels")
            one[side] = int(one[side])


def check_categories(path: Path, categories: list[dict]) -> None:
    check_ids(path, "category", [one["id"] for one in categories])
    names = [one["name"] for one in categories]
    if twice := [name for place, name in enumerate(names) if name in names[:place]]:
        raise ValueError(f"{path}: two categories are called {twice[0]!r}")


def check_ids(path: Path, what: str, ids: list) -> None:
    """Raises: ValueError for ids that are no whole numbers, or come twice."""
    if wrong := [number for number in ids if isinstance(number, bool) or not isinstance(number, int)]:
        raise ValueError(f"{path}: the {what} id {wrong[0]!r} is no whole number, as COCO's are")
    if len(set(ids)) < len(ids):
        raise ValueError(f"{path}: two entries have the same {what} id")


def check_annotations(path: Path, content: Mapping[str, list[dict]]) -> None:
    """Of whatever ids: nobody needs them but the reader of a message. Raises: ValueError that names the annotation."""
    known = {what: {one["id"] for one in content[part]} for what, part in (("image", "images"), ("category", "categories"))}
    for one in content["annotations"]:
        where = f"{path}: annotation {one['id']}"
        for what in ("image", "category"):
            if one[f"{what}_id"] not in known[what]:
                raise ValueError(f"{where} is of {what} {one[f'{what}_id']}, which is not listed")
        box = one["bbox"]
        if not isinstance(box, list) or len(box) != 4 or not all(map(is_number, box)):
            raise ValueError(f"{where} has the bbox {box!r:.80}, expected x, y, width and height")
        if one.get("iscrowd", 0) not in (0, 1) or isinstance(one.get("iscrowd"), str):
            raise ValueError(f"{where} has iscrowd {one['iscrowd']!r}, expected 0 or 1")


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
