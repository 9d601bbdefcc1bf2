"""A file in COCO's format: what is learnt of it, and what is refused."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from tests.detection.test_masks import SQUARE, encodings, square
from vit_prune.detection.data.coco import CocoImages

SIZE = (12, 20)  # height, width


def write(folder, annotations, *, image=None, name="a.png", categories=((90, "dog"), (3, "cat")), images=None):
    """A file with one image, and the data set of it."""
    image = Image.new("RGB", SIZE[::-1]) if image is None else image
    image.save(folder / name)
    content = {
        "images": [{"id": 7, "file_name": name, "width": SIZE[1], "height": SIZE[0]}] if images is None else images,
        "annotations": [{"id": number, "image_id": 7, **one} for number, one in enumerate(annotations)],
        "categories": [{"id": number, "name": text} for number, text in categories],
    }
    (folder / "a.json").write_text(json.dumps(content))
    return CocoImages(folder / "a.json", folder)


def one(**changes):
    return {"category_id": 3, "bbox": [2, 3, 7, 5], "iscrowd": 0, "segmentation": [SQUARE], **changes}


def test_sparse_ids_become_labels_in_rising_order_and_come_back(tmp_path):
    data = write(tmp_path, [one(category_id=90), one(category_id=3)])
    assert (data.categories.ids, data.categories.names) == ((3, 90), ("cat", "dog"))
    assert data.target(0)["labels"].tolist() == [2, 1]
    assert [data.categories.id_of(label) for label in (2, 1)] == [90, 3]


@pytest.mark.parametrize("crowd", [0, 1])
def test_every_encoding_is_learnt_and_no_crowd_is(tmp_path, crowd):
    masks = encodings(square(SQUARE))
    segmentations = [[SQUARE], [SQUARE, SQUARE], masks["uncompressed"], masks["compressed text"], [], [[1.0, 1.0, 4.0, 4.0]]]
    data = write(tmp_path, [one(segmentation=value, iscrowd=crowd) for value in segmentations])
    data.objects[7].append(one(id=9, segmentation=masks["compressed bytes"], iscrowd=crowd))  # which JSON cannot hold
    target = data.target(0)
    assert len(target["boxes"]) == (0 if crowd else 5)
    assert int(target["dropped"]) == (0 if crowd else 2)  # the empty polygon and the line
    assert target["masks"].shape == (len(target["boxes"]), *SIZE)
    assert all(np.array_equal(mask, square(SQUARE)) for mask in target["masks"].numpy())


def test_boxes_are_clipped_and_those_without_area_are_counted(tmp_path):
    target = write(tmp_path, [one(bbox=[15, 5, 30, 30]), one(bbox=[3, 3, 0, 5]), one(bbox=[25, 3, 4, 4]), one(bbox=[3, 3, 4, -1])]).target(0)
    assert target["boxes"].tolist() == [[15, 5, 20, 12]]
    assert int(target["dropped"]) == 3


def test_an_image_without_objects_has_an_empty_target(tmp_path):
    target = write(tmp_path, []).target(0)
    assert {name: tuple(value.shape) for name, value in target.items()} == {"boxes": (0, 4), "labels": (0,), "masks": (0, 12, 20), "dropped": ()}
    assert target["labels"].dtype == torch.int64


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "LA", "I;16", "CMYK"])
def test_images_of_every_mode_are_rgb(tmp_path, mode):
    image = Image.new(mode, SIZE[::-1])
    name = "a.tif" if mode == "CMYK" else "a.png"
    assert np.array(write(tmp_path, [], image=image, name=name).image(0)).shape == (12, 20, 3)


def test_an_image_stands_upright_and_its_annotations_are_of_that(tmp_path):
    pixels = np.zeros((*SIZE, 3), dtype=np.uint8)
    pixels[0, 0] = 255
    turned = Image.fromarray(pixels).transpose(Image.Transpose.ROTATE_90)  # what EXIF 6 turns back
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / "b.png", exif=exif)
    data = write(tmp_path, [], images=[{"id": 7, "file_name": "b.png", "width": 20, "height": 12}])
    assert np.array_equal(np.array(data.image(0)), pixels)
    data = write(tmp_path, [], images=[{"id": 7, "file_name": "b.png", "width": 12, "height": 20}])
    with pytest.raises(ValueError, match=r"b\.png has 20 x 12 pixels once it stands upright, .*a\.json says 12 x 20"):
        data.image(0)


WRONG = {
    "no segmentation": ([{"category_id": 3, "bbox": [0, 0, 2, 2]}], {}, "annotation 0 has no segmentation"),
    "another mask": ([one(segmentation="x")], {}, r"a\.json: annotation 0: a segmentation is"),
}


@pytest.mark.parametrize(("annotations", "kwargs", "sentence"), WRONG.values(), ids=WRONG)
def test_a_mask_that_cannot_be_read_is_told_with_its_annotation(tmp_path, annotations, kwargs, sentence):
    with pytest.raises(ValueError, match=sentence):
        write(tmp_path, annotations, **kwargs).target(0)


BROKEN = {
    "not JSON": ("{", "is not JSON"),
    "a list": ("[1]", "has no list of images: it is not in COCO's format"),
    "no categories": ('{"images": [], "annotations": []}', "has no list of categories"),
    "no width": ('{"images": [{"id": 1, "file_name": "a", "height": 1}], "annotations": [], "categories": []}', "an entry of images has no width"),
    "another image": (
        '{"images": [], "annotations": [{"id": 1, "image_id": 2, "category_id": 3, "bbox": [0, 0, 1, 1]}], "categories": [{"id": 3, "name": "a"}]}',
        "annotation 1 is of image 2, which is not listed",
    ),
    "twice": (
        json.dumps({"images": [{"id": 1, "file_name": "a", "width": 1, "height": 1}] * 2, "annotations": [], "categories": []}),
        "two images have the same id",
    ),
}


@pytest.mark.parametrize(("text", "sentence"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_named(tmp_path, text, sentence):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=rf"a\.json.*{sentence}"):
        CocoImages(tmp_path / "a.json", tmp_path)


def test_an_annotation_of_an_unknown_category_is_named(tmp_path):
    with pytest.raises(ValueError, match="annotation 0 is of category 5, which is not listed"):
        write(tmp_path, [one(category_id=5)])


def test_a_missing_folder_and_a_missing_image_are_named(tmp_path):
    data = write(tmp_path, [])
    with pytest.raises(FileNotFoundError, match="no folder of images"):
        CocoImages(tmp_path / "a.json", tmp_path / "nothing")
    (tmp_path / "a.png").unlink()
    with pytest.raises(OSError, match=r"a\.png"):
        data.image(0)
