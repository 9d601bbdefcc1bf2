"""COCO's encodings of a mask, each made a bitmap: polygons, run lengths as a list, and compressed run lengths as bytes or text.

h x w pixels.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from faster_coco_eval import mask as coco_mask

POINTS = 3  # that a polygon has at least


def bitmap(segmentation: object, size: tuple[int, int]) -> np.ndarray:
    """[h, w] uint8, 1 inside; all 0 where there is nothing to draw (no polygon of three points or more).

    Raises: ValueError for what is no mask of COCO's, or one of another size (height, width).
    """
    if isinstance(segmentation, Mapping):
        return decoded(segmentation, size)
    if isinstance(segmentation, Sequence) and not isinstance(segmentation, (str, bytes)):
        return drawn(segmentation, size)
    raise ValueError(f"a segmentation is a list of polygons or run lengths, got {segmentation!r:.80}")


def decoded(runs: Mapping, size: tuple[int, int]) -> np.ndarray:
    """Run lengths {"size": [h, w], "counts": a list, bytes or text}."""
    counts = runs.get("counts")
    if list(runs.get("size") or ()) != list(size):
        raise ValueError(f"the mask is of {runs.get('size')} (height, width) pixels, the image of {list(size)}")
    if isinstance(counts, Sequence) and not isinstance(counts, (str, bytes)):
        if sum(counts) != size[0] * size[1]:
            raise ValueError(f"the run lengths of a mask sum to {sum(counts)}, the image has {size[0] * size[1]} pixels")
        return coco_mask.decode(coco_mask.frPyObjects({"size": list(size), "counts": list(counts)}, *size))
    if isinstance(counts, (str, bytes)):
        return coco_mask.decode({"size": list(size), "counts": counts.encode() if isinstance(counts, str) else counts})
    raise ValueError(f"counts of run lengths are a list, bytes or text, got {counts!r:.80}")


def drawn(polygons: Sequence, size: tuple[int, int]) -> np.ndarray:
    """The union of polygons, each [x0, y0, x1, y1, ...]; those of fewer than three points are left out."""
    for polygon in polygons:
        if not isinstance(polygon, Sequence) or len(polygon) % 2 or not all(isinstance(value, (int, float)) for value in polygon):
            raise ValueError(f"a polygon is a list of x and y in turn, got {polygon!r:.80}")
    usable = [list(map(float, polygon)) for polygon in polygons if len(polygon) >= 2 * POINTS]
    if not usable:
        return np.zeros(size, dtype=np.uint8)
    return coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(usable, *size)))


def encode(masks: np.ndarray) -> list[dict]:
    """[n, h, w] bool -> compressed run lengths, counts as text, as results go into JSON."""
    runs = coco_mask.encode(np.asfortranarray(masks.astype(np.uint8).transpose(1, 2, 0))) if len(masks) else []
    return [{"size": [int(side) for side in one["size"]], "counts": one["counts"].decode()} for one in runs]
