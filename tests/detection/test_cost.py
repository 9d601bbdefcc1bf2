"""What a detector costs, in closed form and as PyTorch counts it, and the figures of the paper's Table 2."""

import pytest
import torch
from torch import nn

from vit_prune.detection.build import build_backbone, build_detector
from vit_prune.detection.config import DetectorConfig
from vit_prune.detection.cost import backbone_macs, cost_rows, detector_macs
from vit_prune.detection.timing import time_cells, times
from vit_prune.measure.counter import count_macs


def gflops(**settings) -> float:
    with torch.device("meta"):
        return 2e-9 * backbone_macs(build_backbone(DetectorConfig(**settings)), (1024, 1024))


def test_the_backbone_of_table_2():
    assert gflops() == pytest.approx(485.60, abs=0.005)
    assert gflops(model="deit_s_bias", keep="linear:1.0:0.0853") == pytest.approx(331.17, abs=0.005)


@pytest.mark.parametrize("settings", [{}, {"keep": "0.5"}, {"window": 4}, {"window": 4, "global_blocks": (1,), "keep": "1,.5"}, {"keep": "0.5", "window": 3}])
def test_the_closed_form_is_what_pytorch_counts(detector, settings):
    backbone = detector(**settings).backbone.net
    assert backbone_macs(backbone, (96, 128)) == count_macs(backbone, inputs=torch.empty(1, 3, 96, 128))


class Heads(nn.Module):
    """What a detector computes on an image, without the choosing between."""

    def __init__(self, model) -> None:
        super().__init__()
        self.model = model

    def forward(self, image, boxes, masks):
        self.model.rpn.head(list(self.model.backbone(image).values()))
        self.model.roi_heads.box_predictor(self.model.roi_heads.box_head(boxes))
        self.model.roi_heads.mask_predictor(self.model.roi_heads.mask_head(masks))


@pytest.mark.parametrize(("size", "padded"), [((96, 96), 96), ((70, 50), 96)])
def test_the_whole_detector_is_what_pytorch_counts_padding_and_all(detector, size, padded):
    model = detector(keep="0.5")
    inputs = torch.empty(1, 3, padded, padded), torch.empty(50, 16, 7, 7), torch.empty(100, 16, 14, 14)
    assert detector_macs(model, size).total == count_macs(Heads(model), inputs=inputs)


def test_rows_are_shares_of_the_first(detector):
    costs = {"dense": detector_macs(detector(keep="1"), (96, 96)), "pruned": detector_macs(detector(keep="0.5"), (96, 96))}
    dense, pruned = cost_rows(costs)
    assert dense["backbone_share"] == dense["detector_share"] == 1
    assert pruned["backbone_share"] < pruned["detector_share"] < 1
    assert pruned["detector_gflops"] == 2e-9 * costs["pruned"].total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_are_timed_in_turn_in_either_precision(dtype):
    small = {"model": "vit_ti_bias", "model_kwargs": {"depth": 2, "embed_dim": 32, "num_heads": 2}, "image_size": 64, "channels": 8, "hidden": 16}
    models = {name: build_detector(DetectorConfig(**small, keep=keep, num_classes=3, proposals=20)) for name, keep in (("dense", "1"), ("pruned", "0.5"))}
    before = {name: value.clone() for name, value in models["pruned"].state_dict().items()}
    costs = {name: detector_macs(model, (64, 64)) for name, model in models.items()}
    timed = times(models, 64, dtype=dtype, device=torch.device("cpu"), runs=6)
    cells = time_cells(timed, costs, "pruned")
    assert cells["detector_ms"] > cells["backbone_ms"] > 0
    predicted = costs["dense"].total / costs["pruned"].total
    assert cells["detector_efficiency"] == pytest.approx(cells["detector_speedup"] / predicted)
    assert time_cells(timed, costs, "dense")["backbone_speedup"] == 1
    assert all(torch.equal(value, before[name]) for name, value in models["pruned"].state_dict().items())
