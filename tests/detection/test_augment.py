"""Image and objects change together."""

import numpy as np
import pytest
import torch
from PIL import Image

from vit_prune.detection.data import augment


def sample(height=40, width=60, objects=3):
    """An image whose brightness is 50 + the number of the object that a pixel belongs to, and its target."""
    generator = np.random.default_rng(0)
    masks = torch.zeros(objects, height, width, dtype=torch.uint8)
    for mask in masks:
        top, left = generator.integers(height - 12), generator.integers(width - 12)
        mask[top : top + 10, left : left + 10] = 1
    target = {"boxes": augment.boxes_of(masks), "labels": torch.arange(1, objects + 1), "masks": masks, "dropped": torch.tensor(0)}
    pixels = (50 + 60 * masks[:1].amax(0)).numpy() if objects else np.full((height, width), 50, dtype=np.uint8)
    return Image.fromarray(pixels).convert("RGB"), target


def test_boxes_of_masks_end_beyond_the_last_pixel():
    masks = torch.zeros(2, 6, 8, dtype=torch.uint8)
    masks[0, 2:4, 3:7] = 1
    masks[1, 5, 7] = 1
    assert augment.boxes_of(masks).tolist() == [[3, 2, 7, 4], [7, 5, 8, 6]]
    assert augment.boxes_of(masks[:0]).shape == (0, 4)


def test_a_mirror_mirrors_all_and_twice_is_nothing():
    image, target = sample()
    mirrored, other = augment.mirrored(image, target)
    assert torch.equal(augment.boxes_of(other["masks"]), other["boxes"])
    assert np.array_equal(np.array(mirrored), np.array(image)[:, ::-1])
    again = augment.mirrored(mirrored, other)[1]
    assert torch.equal(again["boxes"], target["boxes"])
    assert torch.equal(again["masks"], target["masks"])


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.7])
def test_a_resize_keeps_boxes_and_masks_together(ratio):
    image, target = sample()
    after = augment.resize_image(image, ratio).size
    other = augment.moved(target, image.size, after, (0, 0), after)
    assert (other["masks"].shape[1:], after) == ((round(40 * ratio), round(60 * ratio)), (round(60 * ratio), round(40 * ratio)))
    assert (other["boxes"] - target["boxes"] * ratio).abs().max() <= 1
    expected = torch.nn.functional.interpolate(target["masks"][None], size=after[::-1], mode="nearest-exact")[0]
    assert torch.equal(other["masks"], expected)


def test_what_is_resized_to_nothing_is_left_out_and_counted():
    image, target = sample()
    target["masks"][1] = 0
    target["masks"][1, 3, 3] = 1
    target["boxes"][1] = torch.tensor([3.0, 3, 4, 4])
    other = augment.moved(target, image.size, (6, 4), (0, 0), (6, 4))
    assert int(other["dropped"]) == 1
    assert other["labels"].tolist() == [1, 3]


@pytest.mark.parametrize("corner", [(0, 0), (11, 5), (36, 16)])
def test_a_crop_takes_boxes_from_the_masks_that_are_left(corner):
    image, target = sample()
    other = augment.moved(target, image.size, image.size, corner, (24, 24))
    assert torch.equal(augment.boxes_of(other["masks"]), other["boxes"])
    assert len(other["boxes"]) + int(other["dropped"]) == 3
    right, down = corner
    whole = target["masks"][other["labels"] - 1]
    assert torch.equal(other["masks"], whole[:, down : down + 24, right : right + 24])


def test_image_and_masks_are_cut_in_the_same_place():
    image, target = sample(objects=1)
    torch.manual_seed(1)
    for _ in range(20):
        pixels, other = augment.large_scale_jitter(image, target, 48, (1.0, 2.0))
        assert len(other["labels"]) + int(other["dropped"]) == 1
        if len(other["labels"]):
            inside = pixels[0][other["masks"][0].bool()].float()
            assert inside.mean() > 100  # 110, but for its blurred edge
            assert pixels[0][~other["masks"][0].bool()].float().mean() < 60


def test_crops_reach_every_corner():
    image = Image.fromarray(np.arange(9, dtype=np.uint8).reshape(3, 3)).convert("RGB")
    empty = sample(3, 3, 0)[1]
    corners = {int(augment.large_scale_jitter(image, empty, 2, (1.5, 1.5))[0][0, 0, 0]) for _ in range(100)}
    assert corners == {0, 1, 2, 3, 4, 5}  # four places of the image and of its mirror


def test_jitter_is_of_the_scale_that_is_asked_for_and_never_beyond_the_square():
    image, target = sample()
    torch.manual_seed(0)
    sizes = [augment.large_scale_jitter(image, target, 32, (0.5, 2.0))[0].shape[-2:] for _ in range(60)]
    assert max(max(size) for size in sizes) == 32
    assert 10 <= min(min(size) for size in sizes) <= 13  # .5 x 32 / 60 x 40 = 10.7
    assert len(set(sizes)) > 20


def test_an_image_without_objects_goes_through_all_of_it():
    image, target = sample(objects=0)
    pixels, other = augment.large_scale_jitter(image, target, 32)
    assert other["masks"].shape == (0, *pixels.shape[-2:])
    assert other["boxes"].shape == (0, 4)


@pytest.mark.parametrize(("size", "expected"), [((60, 40), (48, 32)), ((40, 60), (32, 48)), ((7, 5), (48, 34)), ((200, 1), (48, 1))])
def test_the_longer_side_is_fitted(size, expected):
    width, height = size
    assert augment.fit(Image.new("RGB", size), 48).shape[1:][::-1] == expected
    assert width / height == pytest.approx(expected[0] / expected[1], rel=0.05) or min(expected) == 1
