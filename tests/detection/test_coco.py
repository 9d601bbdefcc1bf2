"""A file in COCO's format: what is learnt of it, and what is refused."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from tests.detection.test_masks import SQUARE, encodings, square
from vit_prune.detection.data.coco import CocoImages
from vit_prune.detection.evaluate import FittedImages

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
    data.objects = {7: [*data.objects[7], one(id=9, segmentation=masks["compressed bytes"], iscrowd=crowd)]}  # which JSON cannot hold
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


@pytest.mark.parametrize(
    "segmentation", ["x", [[1.0]], {"size": [12, 20], "counts": [-1, 241]}, {"size": [12, 20], "counts": "broken"}, {"size": [12, 20], "counts": [1.5]}]
)
def test_a_mask_that_cannot_be_read_is_told_with_its_annotation(tmp_path, segmentation):
    with pytest.raises(ValueError, match=r"a\.json: annotation 0: "):
        write(tmp_path, [one(segmentation=segmentation)]).target(0)


NOWHERE = {"id": 1, "image_id": 2, "category_id": 3, "bbox": [0, 0, 1, 1], "segmentation": []}
BROKEN = {
    "not JSON": ("{", "is not JSON"),
    "a list": ("[1]", "has no list of images: it is not in COCO's format"),
    "no categories": ('{"images": [], "annotations": []}', "has no list of categories"),
    "no width": ('{"images": [{"id": 1, "file_name": "a", "height": 1}], "annotations": [], "categories": []}', "an entry of images has no width"),
    "another image": (
        json.dumps({"images": [], "annotations": [NOWHERE], "categories": [{"id": 3, "name": "a"}]}),
        "annotation 1 is of image 2, which is not listed",
    ),
    "a text for an id": ('{"images": [{"id": "a", "file_name": "a", "width": 1, "height": 1}], "annotations": [], "categories": []}', "the image id 'a' is no"),
    "half a pixel": (
        '{"images": [{"id": 1, "file_name": "a", "width": 1.5, "height": 1}], "annotations": [], "categories": []}',
        "image 1 has a width of 1.5",
    ),
    "no dict": ('{"images": [3], "annotations": [], "categories": []}', "an entry of images has no id"),
    "a name twice": ('{"images": [], "annotations": [], "categories": [{"id": 1, "name": "a"}, {"id": 2, "name": "a"}]}', "two categories are called 'a'"),
    "a category twice": (
        '{"images": [], "annotations": [], "categories": [{"id": 1, "name": "a"}, {"id": 1, "name": "b"}]}',
        "two entries have the same category id",
    ),
    "twice": (
        json.dumps({"images": [{"id": 1, "file_name": "a", "width": 1, "height": 1}] * 2, "annotations": [], "categories": []}),
        "two entries have the same image id",
    ),
}


@pytest.mark.parametrize(("text", "sentence"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_named(tmp_path, text, sentence):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=rf"a\.json.*{sentence}"):
        CocoImages(tmp_path / "a.json", tmp_path)


ODD = {
    "another category": ({"category_id": 5}, "annotation 0 is of category 5, which is not listed"),
    "a box of three": ({"bbox": [1, 2, 3]}, r"annotation 0 has the bbox \[1, 2, 3\]"),
    "no box": ({"bbox": None}, "annotation 0 has the bbox None"),
    "a crowd in text": ({"iscrowd": "0"}, "annotation 0 has iscrowd '0', expected 0 or 1"),
}


@pytest.mark.parametrize(("changes", "sentence"), ODD.values(), ids=ODD)
def test_an_odd_annotation_is_named(tmp_path, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        write(tmp_path, [one(**changes)])


def test_without_a_segmentation_nothing_is_learnt(tmp_path):
    with pytest.raises(ValueError, match=r"an entry of annotations has no segmentation, which Mask R-CNN learns masks from"):
        write(tmp_path, [{"category_id": 3, "bbox": [0, 0, 2, 2]}])


def test_sizes_may_be_written_as_fractions_of_one(tmp_path):
    data = write(tmp_path, [one()], images=[{"id": 7, "file_name": "a.png", "width": 20.0, "height": 12.0}])
    assert data.target(0)["masks"].shape == (1, 12, 20)


def test_files_that_are_listed_and_not_there_are_found_before_they_are_needed(tmp_path):
    data = write(tmp_path, [], images=[{"id": number, "file_name": name, "width": 20, "height": 12} for number, name in ((1, "a.png"), (2, "b.png"))])
    with pytest.raises(FileNotFoundError, match=r"b\.png, which does not exist"):
        data.check_files()


def test_an_error_in_a_loaders_process_is_one_sentence(tmp_path):
    data = write(tmp_path, [], images=[{"id": 7, "file_name": "a.png", "width": 12, "height": 20}])
    with pytest.raises(ValueError, match="once it stands upright") as caught:
        list(DataLoader(FittedImages(data, 32), num_workers=1))
    assert "Traceback" not in str(caught.value)


def test_a_missing_folder_and_a_missing_image_are_named(tmp_path):
    data = write(tmp_path, [])
    with pytest.raises(FileNotFoundError, match="no folder of images"):
        CocoImages(tmp_path / "a.json", tmp_path / "nothing")
    (tmp_path / "a.png").unlink()
    with pytest.raises(OSError, match=r"a\.png"):
        data.image(0)
