"""A drawn data set, and a detector that takes a second."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.detection.shapes import draw_coco
from tests.helpers import single_thread
from vit_prune.detection.build import build_detector
from vit_prune.detection.config import DetectorConfig
from vit_prune.detection.data.coco import CocoImages

SMALL = DetectorConfig(
    model="vit_ti_bias",
    model_kwargs={"depth": 2, "embed_dim": 32, "num_heads": 2},
    num_classes=3,
    image_size=96,
    drop_path=0.0,
    channels=16,
    hidden=32,
    train_candidates=100,
    test_candidates=100,
    proposals=50,
    sampled_proposals=32,
    score_thresh=0.0,
)


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    with single_thread():
        yield


@pytest.fixture(scope="session")
def coco(tmp_path_factory) -> Path:
    """COCO's layout: 22 images to train on and 8 to be judged by, of 72 to 96 pixels per side."""
    return draw_coco(tmp_path_factory.mktemp("coco"), train=22, val=8, size=96)


@pytest.fixture
def val(coco) -> CocoImages:
    return CocoImages(coco / "annotations/instances_val2017.json", coco / "val2017")


@pytest.fixture
def detector():
    """A function that makes a detector whose weights are far from their start, in evaluation mode; fields of its config may be given."""

    def make(**changes):
        torch.manual_seed(0)
        model = build_detector(dataclasses.replace(SMALL, **changes))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("token_bias.weight", "cls_score.weight", "bbox_pred.weight", "predictor.weight")):
                    parameter.normal_(std=1.0 if "token_bias" in name else 0.2)
        return model.eval()

    return make
