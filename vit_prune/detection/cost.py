"""What a detector costs: multiply-accumulates of its backbone and of all of it, and the time of both.

N = h w tokens, W windows of w x w tokens, D width. MACs are counted as in vit_prune.measure.macs: matrix products and convolutions, of one image.
RoIAlign, suppression and pasting are none.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from vit_prune.detection.backbone import ViTBackbone
from vit_prune.detection.model import MaskRCNN
from vit_prune.detection.pyramid import SCALES, SimpleFeaturePyramid
from vit_prune.detection.roi_heads import BOX_BINS, MASK_BINS
from vit_prune.measure.counter import count_macs
from vit_prune.measure.macs import BlockCounter


@dataclass(frozen=True)
class DetectorMacs:
    """MACs by part. Those of the heads are for as many proposals and detections as the detector allows."""

    backbone: int
    pyramid: int
    rpn: int
    box_head: int
    mask_head: int

    @property
    def total(self) -> int:
        return self.backbone + self.pyramid + self.rpn + self.box_head + self.mask_head


def backbone_macs(backbone: ViTBackbone, size: tuple[int, int]) -> int:
    """Of one image of (height, width) pixels, in closed form; the weights may lie on `meta`."""
    vit, counter = backbone.vit, BlockCounter(backbone.vit)
    grid = size[0] // backbone.stride, size[1] // backbone.stride
    total = grid[0] * grid[1] * vit.patch_embed.proj.weight.numel()
    for index in range(len(vit.blocks)):
        total += block_macs(counter, index, grid, backbone.window_of(index))
    return total


def block_macs(counter: BlockCounter, index: int, grid: tuple[int, int], window: int | None) -> int:
    """Attention in windows is that of each window, padding and all; what follows sees the tokens of the image."""
    whole = counter(index, grid[0] * grid[1]).parts
    if window is None:
        return sum(whole.values())
    windows = -(-grid[0] // window) * -(-grid[1] // window)
    inside = counter(index, window * window).parts
    return windows * sum(count for part, count in inside.items() if part != "mlp") + whole["mlp"]


def detector_macs(model: MaskRCNN, size: tuple[int, int]) -> DetectorMacs:
    """Of one image of (height, width) pixels, padding counted."""
    pyramid, heads = model.backbone, model.roi_heads
    size = model.transform.padded(*size)
    channels = pyramid.out_channels
    box = torch.empty(1, channels, BOX_BINS, BOX_BINS, device="meta")
    mask = torch.empty(1, channels, MASK_BINS, MASK_BINS, device="meta")
    return DetectorMacs(
        backbone=backbone_macs(pyramid.net, size),
        pyramid=pyramid_macs(pyramid, size),
        rpn=sum(head_macs(model.rpn.head, channels, size, stride) for stride in pyramid.strides),
        box_head=model.rpn.post_nms_top_n() * count_macs(nn.Sequential(heads.box_head, heads.box_predictor), inputs=box),
        mask_head=heads.detections_per_img * count_macs(nn.Sequential(heads.mask_head, heads.mask_predictor), inputs=mask),
    )


def pyramid_macs(pyramid: SimpleFeaturePyramid, size: tuple[int, int]) -> int:
    stride = pyramid.net.stride
    features = torch.empty(1, pyramid.net.channels, size[0] // stride, size[1] // stride, device="meta")
    stages = [pyramid.get_submodule(f"simfp_{level[1:]}") for level in pyramid.levels[: len(SCALES)]]
    return sum(count_macs(stage, inputs=features) for stage in stages)


def head_macs(head: nn.Module, channels: int, size: tuple[int, int], stride: int) -> int:
    """Of the proposals' convolutions on one level."""
    level = torch.empty(1, channels, -(-size[0] // stride), -(-size[1] // stride), device="meta")
    return sum(count_macs(part, inputs=level) for part in (head.conv, head.cls_logits, head.bbox_pred))


def cost_rows(costs: Mapping[str, DetectorMacs], times_ms: Mapping[str, Mapping[str, float]] | None = None) -> list[dict]:
    """A row per detector, in the layout of the paper's Table 2: GFLOPs (2 x MACs) of the backbone and of all of it, and each as a share of the first."""
    first = next(iter(costs.values()))
    return [
        {
            "detector": name,
            "backbone_gflops": 2e-9 * cost.backbone,
            "backbone_share": cost.backbone / first.backbone,
            "detector_gflops": 2e-9 * cost.total,
            "detector_share": cost.total / first.total,
        }
        | dict((times_ms or {}).get(name, {}))
        for name, cost in costs.items()
    ]
