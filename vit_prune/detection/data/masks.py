"""COCO's encodings of a mask: polygons, run lengths as a list, and compressed run lengths as bytes or text.

h x w pixels.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from faster_coco_eval import mask as coco_mask

POINTS = 3  # that a polygon has at least


def bitmap(segmentation: object, size: tuple[int, int]) -> np.ndarray:
    """[h, w] uint8, 1 inside; all 0 where there is nothing to draw. Raises: as `run_lengths`."""
    runs = run_lengths(segmentation, size)
    return np.zeros(size, dtype=np.uint8) if runs is None else coco_mask.decode(runs)


def run_lengths(segmentation: object, size: tuple[int, int]) -> dict | None:
    """Compressed run lengths, counts as bytes; None where there is nothing to draw (no polygon of three points or more).

    Raises: ValueError for what is no mask of COCO's, or one of another size (height, width).
    """
    try:
        if isinstance(segmentation, Mapping):
            return compressed(segmentation, size)
        if isinstance(segmentation, Sequence) and not isinstance(segmentation, (str, bytes)):
            polygons = usable(segmentation)
            return coco_mask.merge(coco_mask.frPyObjects(polygons, *size)) if polygons else None
    except (RuntimeError, TypeError, OverflowError) as error:  # what the compiled code raises for counts that are none
        raise ValueError(f"the mask cannot be decoded: {error}") from None
    raise ValueError(f"a segmentation is a list of polygons or run lengths, got {segmentation!r:.80}")


def compressed(runs: Mapping, size: tuple[int, int]) -> dict:
    """Of {"size": [h, w], "counts": a list, bytes or text}."""
    counts = runs.get("counts")
    if list(runs.get("size") or ()) != list(size):
        raise ValueError(f"the mask is of {runs.get('size')} (height, width) pixels, the image of {list(size)}")
    if isinstance(counts, Sequence) and not isinstance(counts, (str, bytes)):
        if not all(isinstance(count, int) and count >= 0 for count in counts) or sum(counts) != size[0] * size[1]:
            raise ValueError(f"run lengths are whole numbers that sum to the image's {size[0] * size[1]} pixels, got {counts!r:.80}")
        return coco_mask.frPyObjects({"size": list(size), "counts": list(counts)}, *size)
    if isinstance(counts, (str, bytes)):
        return checked({"size": list(size), "counts": counts.encode() if isinstance(counts, str) else counts}, size)
    raise ValueError(f"counts of run lengths are a list, bytes or text, got {counts!r:.80}")


def checked(runs: dict, size: tuple[int, int]) -> dict:
    """Raises: ValueError for compressed counts that go beyond the image."""
    if coco_mask.area(runs) > size[0] * size[1]:
        raise ValueError("the compressed run lengths of a mask go beyond the image")
    return runs


def usable(polygons: Sequence) -> list[list[float]]:
    """Those of three points or more, each [x0, y0, x1, y1, ...]."""
    for polygon in polygons:
        if not isinstance(polygon, Sequence) or len(polygon) % 2 or not all(isinstance(value, (int, float)) for value in polygon):
            raise ValueError(f"a polygon is a list of x and y in turn, got {polygon!r:.80}")
    return [list(map(float, polygon)) for polygon in polygons if len(polygon) >= 2 * POINTS]


def encode(masks: np.ndarray) -> list[dict]:
    """[n, h, w] bool -> compressed run lengths, counts as text, as results go into JSON."""
    runs = [coco_mask.encode(np.asfortranarray(mask.view(np.uint8))) for mask in masks]  # one by one: a copy of all may be gigabytes
    return [{"size": [int(side) for side in one["size"]], "counts": one["counts"].decode()} for one in runs]
