"""Every encoding of a mask is the same bitmap (detectron2 5027 and 1692, vision 8351)."""

import numpy as np
import pytest
import torch
from pycocotools import mask as coco_mask

from tests.detection.shapes import run_lengths
from vit_prune.detection.data.masks import bitmap, encode

SIZE = (12, 20)
SQUARE = [2.0, 3.0, 9.0, 3.0, 9.0, 8.0, 2.0, 8.0]
OTHER = [12.0, 1.0, 18.0, 1.0, 18.0, 6.0, 12.0, 6.0]


def square(*outlines):
    mask = np.zeros(SIZE, dtype=bool)
    for x1, y1, _, _, x2, y2, *_ in outlines:
        mask[int(y1) : int(y2), int(x1) : int(x2)] = True
    return mask


def encodings(mask):
    [compressed] = encode(mask[None])
    return {
        "uncompressed": run_lengths(mask),
        "compressed text": compressed,
        "compressed bytes": compressed | {"counts": compressed["counts"].encode()},
        "compressed, an array's size": compressed | {"size": tuple(SIZE)},
    }


MASKS = {"one": square(SQUARE), "two": square(SQUARE, OTHER), "all": np.ones(SIZE, dtype=bool), "none": np.zeros(SIZE, dtype=bool)}


@pytest.mark.parametrize("which", ["uncompressed", "compressed text", "compressed bytes", "compressed, an array's size"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_run_lengths_of_every_kind_are_the_mask(which, mask):
    assert np.array_equal(bitmap(encodings(mask)[which], SIZE), mask)


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of pycocotools under numpy 2
def test_polygons_are_drawn_as_pycocotools_draws_them_and_parts_are_united():
    assert np.array_equal(bitmap([SQUARE], SIZE), square(SQUARE))
    both = coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects([SQUARE, OTHER], *SIZE)))
    assert np.array_equal(bitmap([SQUARE, OTHER], SIZE), both)
    assert np.array_equal(both, square(SQUARE, OTHER))


@pytest.mark.parametrize("polygons", [[], [[]], [[1.0, 1.0, 5.0, 5.0]], [[1.0, 1.0]]])
def test_a_polygon_of_fewer_than_three_points_is_nothing(polygons):
    assert not bitmap(polygons, SIZE).any()
    assert np.array_equal(bitmap([*polygons, SQUARE], SIZE), square(SQUARE))


@pytest.mark.parametrize(
    ("segmentation", "sentence"),
    [
        ("text", "a list of polygons or run lengths"),
        (None, "a list of polygons or run lengths"),
        ([[1.0, 2.0, 3.0]], "a polygon is a list of x and y in turn"),
        ([5], "a polygon is a list of x and y in turn"),
        ({"size": [20, 12], "counts": [240]}, r"the mask is of \[20, 12\] \(height, width\) pixels, the image of \[12, 20\]"),
        ({"size": [12, 20], "counts": [100]}, "whole numbers that sum to the image's 240 pixels"),
        ({"size": [12, 20]}, "counts of run lengths are a list, bytes or text"),
        ({"counts": [240]}, "the mask is of None"),
    ],
)
def test_what_is_no_mask_is_refused(segmentation, sentence):
    with pytest.raises(ValueError, match=sentence):
        bitmap(segmentation, SIZE)


def test_results_are_encoded_and_read_back():
    masks = np.stack([square(SQUARE), square(OTHER), np.zeros(SIZE, dtype=bool)])
    assert all(np.array_equal(bitmap(one, SIZE), mask) for one, mask in zip(encode(masks), masks, strict=True))
    assert encode(masks[:0]) == []
    assert torch.tensor(encode(masks)[0]["size"]).tolist() == list(SIZE)
