"""The detector's parts: anchors, pooling, pasting, batching; and what it takes and gives."""

import pytest
import torch
from torchvision.models.detection.image_list import ImageList

from vit_prune.detection.backbone import ViTBackbone
from vit_prune.detection.build import dense_vit
from vit_prune.detection.model import Batch
from vit_prune.detection.pooling import PyramidRoIAlign, crop_masks, paste_masks
from vit_prune.detection.pyramid import SimpleFeaturePyramid
from vit_prune.detection.rpn import LevelAnchors


def target(size=(64, 96), boxes=((4, 6, 40, 50), (50, 10, 90, 60)), labels=(1, 3)):
    masks = torch.zeros(len(boxes), *size, dtype=torch.uint8)
    for mask, (x1, y1, x2, y2) in zip(masks, boxes, strict=True):
        mask[y1:y2, x1:x2] = 1
    return {"boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4), "labels": torch.tensor(labels, dtype=torch.int64), "masks": masks}


def images(*sizes):
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator) for size in sizes]


@pytest.mark.parametrize(("patch", "levels", "strides"), [(16, "p2 p3 p4 p5 p6", (4, 8, 16, 32, 64)), (8, "p1 p2 p3 p4 p5", (2, 4, 8, 16, 32))])
def test_five_maps_at_strides_of_powers_of_two(patch, levels, strides):
    vit = dense_vit("vit_tiny_patch16_224", depth=1, embed_dim=32, num_heads=2, patch_size=patch)
    pyramid = SimpleFeaturePyramid(ViTBackbone(vit), channels=8)
    maps = pyramid(torch.randn(1, 3, 64, 96))
    assert (" ".join(maps), pyramid.strides) == (levels, strides)
    assert [tuple(one.shape[1:]) for one in maps.values()] == [(8, -(-64 // stride), -(-96 // stride)) for stride in strides]


def test_anchors_are_not_rounded_stand_at_exact_strides_and_are_float32():
    maps = [torch.zeros(1, 1, 33, 5, dtype=torch.bfloat16), torch.zeros(1, 1, 17, 3, dtype=torch.bfloat16)]
    [anchors] = LevelAnchors((32, 64))(ImageList(torch.zeros(1, 3, 1056, 160), [(1056, 160)]), maps)
    assert (anchors.shape, anchors.dtype) == ((33 * 5 * 3 + 17 * 3 * 3, 4), torch.float32)
    wide = 256 / 0.5**0.5 / 2
    torch.testing.assert_close(anchors[0], torch.tensor([-wide, -wide / 2, wide, wide / 2]))
    assert (anchors[3, :2] - anchors[0, :2]).tolist() == [32, 0]
    second = anchors[33 * 5 * 3 :]
    assert (second[3 * 3 :, 1][0] - second[0, 1]).item() == 64  # 1056 // 17 would be 62


def test_a_box_is_pooled_at_the_level_of_its_size():
    pool = PyramidRoIAlign(("p2", "p3", "p4", "p5"), (4, 8, 16, 32), 7)
    sides = torch.tensor([1.0, 50, 111, 112, 224, 447, 448, 2000])
    boxes = torch.stack([torch.zeros(8), torch.zeros(8), sides, sides], dim=1)
    assert pool.level_of(boxes).tolist() == [0, 0, 0, 1, 2, 2, 3, 3]


def test_a_ramp_is_pooled_where_it_lies():
    ramp = torch.arange(32.0).expand(1, 1, 32, 32) * 4 + 2  # the pixel that each place's middle stands for
    maps = {"p2": ramp, "p3": torch.zeros(1, 1, 16, 16)}
    out = PyramidRoIAlign(("p2", "p3"), (4, 8), 4)(maps, [torch.tensor([[16.0, 16, 80, 80]])])
    torch.testing.assert_close(out[0, 0, 0], torch.tensor([24.0, 40, 56, 72]))


def test_no_boxes_are_pooled_to_nothing_and_leave_a_gradient_of_zero():
    maps = {"p2": torch.randn(2, 3, 8, 8, requires_grad=True)}
    out = PyramidRoIAlign(("p2",), (4,), 7)(maps, [torch.zeros(0, 4), torch.zeros(0, 4)])
    assert out.shape == (0, 3, 7, 7)
    out.sum().backward()
    assert maps["p2"].grad.abs().sum() == 0


def test_a_mask_that_is_pasted_fills_its_box_and_is_cropped_back():
    masks = torch.zeros(2, 28, 28)
    masks[0] = 1
    masks[1, :14] = 1
    boxes = torch.tensor([[3.0, 5.0, 13.0, 25.0], [20.0, 0.0, 40.0, 20.0]])
    pasted = paste_masks(masks, boxes, (30, 50))
    expected = torch.zeros(2, 30, 50, dtype=torch.bool)
    expected[0, 5:25, 3:13] = True
    expected[1, 0:10, 20:40] = True
    assert torch.equal(pasted, expected)
    assert torch.equal(crop_masks(expected, torch.tensor([0, 1]), boxes, 28), masks)


@pytest.mark.parametrize("box", [(-5.0, -5.0, 10.0, 10.0), (40.0, 20.0, 70.0, 60.0), (10.2, 10.2, 10.4, 10.4), (60.0, 60.0, 70.0, 70.0)])
def test_a_box_at_the_edge_or_beyond_it_is_pasted_as_far_as_there_is_an_image(box):
    pasted = paste_masks(torch.ones(1, 28, 28), torch.tensor([box]), (30, 50))
    ys, xs = torch.arange(30) + 0.5, torch.arange(50) + 0.5
    inside = ((ys >= box[1]) & (ys <= box[3]))[:, None] & ((xs >= box[0]) & (xs <= box[2]))
    assert torch.equal(pasted[0], inside)


SIZES = {(50, 70): (64, 96), (64, 64): (64, 64)}  # detectron2 4676: without a square nothing was padded


@pytest.mark.parametrize(("size", "padded"), SIZES.items())
def test_without_a_square_images_are_padded_to_the_divisibility(size, padded, detector):
    model = detector(square=False)
    assert tuple(model.transform(images(size)).tensors.shape[-2:]) == padded
    [found] = model(images(size))
    assert found["masks"].shape[1:] == size


def test_a_mixed_batch_gives_what_each_image_gives_in_the_same_canvas(detector):
    model = detector(square=False)
    both = images(*SIZES)
    with torch.no_grad():
        found, square = model(both), detector(image_size=96)
        alone = [square([image])[0] for image in both]
    assert tuple(model.transform(both).tensors.shape[-2:]) == (64, 96)
    assert [one["masks"].shape[1:] for one in found] == list(SIZES)
    assert all(one["boxes"][:, 0::2].max() <= width and one["boxes"][:, 1::2].max() <= height for one, (height, width) in zip(found, SIZES, strict=True))
    assert all(len(one["boxes"]) for one in alone)


def test_padding_is_zero_after_the_normalisation_and_floats_are_pixels_over_255():
    [image] = images((50, 70))
    batch = Batch(32, 96)
    out, same = batch([image]), batch([image.float() / 255])
    torch.testing.assert_close(out.tensors, same.tensors)
    assert (out.tensors.shape, out.image_sizes) == ((1, 3, 96, 96), [(50, 70)])
    assert out.tensors[..., 50:, :].abs().sum() == out.tensors[..., 70:].abs().sum() == 0
    torch.testing.assert_close(out.tensors[0, 0, 0, 0], (image[0, 0, 0] - 123.675) / 58.395)


def test_losses_come_from_every_weight_and_from_images_without_objects(detector):
    model = detector().train()
    losses = model(images((64, 96), (96, 80)), [target(), target((96, 80), (), ())])
    assert list(losses) == ["loss_classifier", "loss_box_reg", "loss_mask", "loss_objectness", "loss_rpn_box_reg"]
    sum(losses.values()).backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]
    model.zero_grad()
    losses = model(images((96, 80)), [target((96, 80), (), ())])
    sum(losses.values()).backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert losses["loss_mask"] == losses["loss_box_reg"] == losses["loss_rpn_box_reg"] == 0
    assert all(loss.isfinite() for loss in losses.values())


def test_detections_are_in_the_pixels_that_are_asked_for(detector):
    model = detector()
    with torch.no_grad():
        [own], [twice] = model(images((64, 96))), model(images((64, 96)), output_sizes=[(128, 288)])
    assert twice["masks"].shape[1:] == (128, 288)
    torch.testing.assert_close(twice["boxes"], own["boxes"] * torch.tensor([3.0, 2, 3, 2]))
    assert torch.equal(twice["labels"], own["labels"])
    assert set(own["labels"].tolist()) <= {1, 2, 3}
    assert (own["scores"].diff() <= 0).all()


def test_nothing_is_detected_where_no_score_is_high_enough(detector):
    model = detector()
    model.roi_heads.score_thresh = 1.1
    [found] = model(images((64, 96)))
    assert {name: tuple(value.shape) for name, value in found.items()} == {"boxes": (0, 4), "scores": (0,), "labels": (0,), "masks": (0, 64, 96)}


@torch.no_grad()
def test_an_image_without_proposals_has_no_detections(detector, monkeypatch):
    model = detector()
    monkeypatch.setattr(model.rpn, "forward", lambda batch, *_: ([torch.zeros(0, 4) for _ in batch.image_sizes], {}))
    assert [len(found["boxes"]) for found in model(images((64, 96), (32, 32)))] == [0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_boxes_are_computed_in_float32_under_autocast(detector, dtype):
    model = detector()
    with torch.no_grad(), torch.autocast("cpu", dtype):
        [found] = model(images((64, 96)))
    assert found["boxes"].dtype == found["scores"].dtype == torch.float32
    with torch.autocast("cpu", dtype):
        losses = model.train()(images((64, 96)), [target()])
    assert all(loss.isfinite() and loss.dtype == torch.float32 for loss in losses.values())


WRONG = {
    "no targets": ((64, 96), None, "training needs a target for each of the 1 images, got None"),
    "another number": ((64, 96), [], "got 0"),
    "a box without area": ((64, 96), [target() | {"boxes": torch.tensor([[1.0, 1, 5, 5], [3, 3, 3, 8]])}], r"a box without area, \[3.0, 3.0, 3.0, 8.0\]"),
    "boxes of another shape": ((64, 96), [target() | {"boxes": torch.zeros(4)}], r"must be \[G, 4\]"),
    "too large": ((64, 97), [target()], "64 x 97 pixels is larger than the square of 96"),
}


@pytest.mark.parametrize(("size", "targets", "sentence"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_learnt_from_is_refused(detector, size, targets, sentence):
    with pytest.raises(ValueError, match=sentence):
        detector().train()(images(size), targets)


def test_a_square_that_does_not_fit_the_pyramid_is_refused(detector):
    with pytest.raises(ValueError, match="image_size must be a multiple of 32 to be padded to a square of it, got 112"):
        detector(image_size=112)
    assert detector(image_size=112, square=False)


def test_an_image_that_is_no_image_is_refused(detector):
    with pytest.raises(ValueError, match=r"an image must be \[3, height, width\]"):
        detector()([torch.zeros(1, 3, 64, 64)])
