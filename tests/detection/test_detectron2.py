"""The two engines agree: the same weights, images and seed give the same losses and detections. Skipped where detectron2 cannot be imported."""

import warnings
from pathlib import Path

import pytest
import torch

from tests.detection import test_coco as files
from tests.detection.test_masks import OTHER, SQUARE, encodings, square
from tests.detection.test_model import images, target
from vit_prune.detection.pooling import crop_masks
from vit_prune.detection.weights import from_detectron2, to_detectron2

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("detectron2")
    from detectron2 import model_zoo
    from detectron2.config import LazyCall, LazyConfig, instantiate
    from detectron2.data import DatasetCatalog, DatasetMapper
    from detectron2.evaluation import COCOEvaluator
    from detectron2.modeling.backbone.fpn import LastLevelMaxPool
    from detectron2.structures import BitMasks, Boxes, Instances
    from detectron2.utils.events import EventStorage

    from vit_prune.detection.detectron2_engine import Pyramid, ViT, register_coco

pytestmark = pytest.mark.filterwarnings("ignore")
LOSSES = {"loss_classifier": "loss_cls", "loss_box_reg": "loss_box_reg", "loss_mask": "loss_mask"} | {
    "loss_objectness": "loss_rpn_cls",
    "loss_rpn_box_reg": "loss_rpn_loc",
}
SETTINGS = {
    "global": {},
    "pruned in windows": {"keep": "0.5", "window": 4, "global_blocks": (1,)},
    "pruned, no square": {"keep": "0.5", "square": False},
}


@pytest.fixture(params=SETTINGS.values(), ids=SETTINGS)
def engines(request, detector):
    """Ours and detectron2's, with the same weights."""
    changes = {"channels": 256, "hidden": 1024, "proposals": 1000, "sampled_proposals": 512, "train_candidates": 2000, "test_candidates": 1000}
    ours = detector(**changes, score_thresh=0.05, **request.param)
    vit = {"depth": 2, "embed_dim": 32, "num_heads": 2} | {name: value for name, value in request.param.items() if name != "square"}
    config = model_zoo.get_config("common/models/mask_rcnn_vitdet.py").model
    config.backbone = LazyCall(Pyramid)(
        net=LazyCall(ViT)(model="vit_ti_bias", **vit),
        in_feature="last_feat",
        out_channels=256,
        scale_factors=(4.0, 2.0, 1.0, 0.5),
        top_block=LazyCall(LastLevelMaxPool)(),
        norm="LN",
        square_pad=96 if request.param.get("square", True) else 0,
    )
    config.roi_heads.num_classes = 3
    theirs = instantiate(config)
    theirs.load_state_dict(to_detectron2(ours.state_dict()))
    return ours, theirs.eval()


def filled_targets(*sizes):
    """Objects whose masks are all of the image: at an edge of a mask a sample may lie just between two pixels, and 1e-5 of a pixel decides."""
    targets = [target((50, 70), ((4, 6, 40, 45), (30, 10, 63, 47))), target()]
    assert sizes == tuple(tuple(one["masks"].shape[1:]) for one in targets)
    return [one | {"masks": torch.ones_like(one["masks"])} for one in targets]


def as_instances(one, size):
    instances = Instances(size)
    instances.gt_boxes, instances.gt_classes, instances.gt_masks = Boxes(one["boxes"].clone()), one["labels"] - 1, BitMasks(one["masks"])
    return instances


def test_five_losses_agree(engines):
    ours, theirs = engines
    sizes = ((50, 70), (64, 96))
    targets = filled_targets(*sizes)
    torch.manual_seed(3)
    losses = ours.train()(images(*sizes), targets)
    with EventStorage():
        torch.manual_seed(3)
        batch = [{"image": image, "instances": as_instances(*one)} for image, one in zip(images(*sizes), zip(targets, sizes, strict=True), strict=True)]
        expected = theirs.train()(batch)
    for name, their_name in LOSSES.items():
        assert losses[name].item() == pytest.approx(expected[their_name].item(), abs=1e-5), name


def test_masks_are_cropped_alike_to_the_last_pixel():
    generator = torch.Generator().manual_seed(0)
    masks = torch.rand(3, 12, 20, generator=generator) > 0.5
    masks = masks.repeat_interleave(5, 1).repeat_interleave(5, 2)
    corner = torch.rand(200, 2, generator=generator) * torch.tensor([60.0, 30.0])
    boxes, which = torch.cat([corner, corner + 1 + 40 * torch.rand(200, 2, generator=generator)], dim=1), torch.arange(200) % 3
    assert torch.equal(crop_masks(masks, which, boxes, 28).bool(), BitMasks(masks[which]).crop_and_resize(boxes, 28))


@torch.no_grad()
def test_detections_agree(engines):
    ours, theirs = engines
    sizes, wanted = ((50, 70), (64, 64)), ((100, 210), (64, 64))  # sizes that an image is padded to nothing by, where the constraint is misspelt
    found = ours(images(*sizes), output_sizes=wanted)
    expected = theirs([{"image": image, "height": size[0], "width": size[1]} for image, size in zip(images(*sizes), wanted, strict=True)])
    for one, other in zip(found, expected, strict=True):
        other = other["instances"]
        assert len(one["boxes"]) == len(other) > 50
        near = (one["boxes"] - other.pred_boxes.tensor).abs().amax(1) < 0.01
        near &= ((one["scores"] - other.scores).abs() < 1e-4) & (one["labels"] == other.pred_classes + 1)
        assert near.float().mean() >= 0.99
        assert (one["masks"] == other.pred_masks).float().mean() > 0.9999


def test_weights_come_back_as_they_were(engines):
    ours, theirs = engines
    back = from_detectron2(theirs.state_dict())
    assert back.keys() == ours.state_dict().keys()
    assert all(torch.equal(value, back[name]) for name, value in ours.state_dict().items())


def test_weights_of_something_else_are_refused():
    with pytest.raises(ValueError, match=r"head\.weight is no weight of this detector"):
        to_detectron2({"head.weight": torch.zeros(1)})


@pytest.mark.parametrize("path", sorted(Path("configs/detectron2").glob("*.py")), ids=lambda path: path.name)
def test_every_lazy_config_builds_its_backbone_at_full_size(path):
    config = LazyConfig.load(str(path))
    config.model.backbone.net.pretrained = False
    with torch.device("meta"):
        backbone = instantiate(config.model.backbone)
    assert backbone.output_shape()["p4"].stride == 16
    assert config.dataloader.train.total_batch_size == 64


def test_every_kind_of_mask_is_read_alike(tmp_path):
    masks = encodings(square(SQUARE))
    segmentations = [[SQUARE], [SQUARE, OTHER], masks["uncompressed"], masks["compressed text"], [], [[1.0, 1.0, 4.0, 4.0]]]
    data = files.write(tmp_path, [files.one(segmentation=value, iscrowd=crowd) for crowd in (0, 1) for value in segmentations])
    register_coco("masks", tmp_path / "a.json", tmp_path)
    [record] = DatasetCatalog.get("masks")
    mapper = DatasetMapper(is_train=True, augmentations=[], image_format="RGB", use_instance_mask=True, instance_mask_format="bitmask")
    instances, target = mapper(record)["instances"], data.target(0)
    assert torch.equal(instances.gt_masks.tensor.to(torch.uint8), target["masks"])
    assert torch.equal(instances.gt_boxes.tensor, target["boxes"])
    assert torch.equal(instances.gt_classes + 1, target["labels"])


def test_nothing_detected_is_no_crash(coco, tmp_path):
    register_coco("shapes", coco / "annotations/instances_val2017.json", coco / "val2017")
    judge = COCOEvaluator("shapes", tasks=("bbox", "segm"), distributed=False, use_fast_impl=False, output_dir=str(tmp_path))
    judge.reset()
    for record in DatasetCatalog.get("shapes")[:3]:
        empty = Instances((record["height"], record["width"]))
        empty.pred_boxes, empty.scores, empty.pred_classes = Boxes(torch.zeros(0, 4)), torch.zeros(0), torch.zeros(0, dtype=torch.int64)
        empty.pred_masks = torch.zeros(0, record["height"], record["width"], dtype=torch.bool)
        judge.process([record], [{"instances": empty}])
    figures = judge.evaluate()
    assert all(value != value or value == 0 for value in figures["bbox"].values())
