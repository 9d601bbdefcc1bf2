"""Region proposals as in detectron2's ViTDet, by torchvision's parts.  n anchors of an image, L levels; boxes x1 y1 x2 y2 in pixels."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import boxes as box_ops

RATIOS = (0.5, 1.0, 2.0)  # height / width
SIZE = 8  # of a level's anchors, in its strides


class LevelAnchors(AnchorGenerator):
    """One size per level, not rounded, at exact strides, in float32 whatever the features are."""

    def __init__(self, strides: Sequence[int]) -> None:
        self.strides = tuple(strides)
        super().__init__(sizes=tuple((SIZE * stride,) for stride in strides), aspect_ratios=(RATIOS,) * len(strides))

    def generate_anchors(self, scales: Sequence[int], aspect_ratios: Sequence[float], dtype=torch.float32, device="cpu") -> Tensor:
        """[3, 4] around 0."""
        corners = []
        for ratio in aspect_ratios:
            width = (scales[0] ** 2 / ratio) ** 0.5
            height = ratio * width
            corners.append((-width / 2, -height / 2, width / 2, height / 2))
        return torch.tensor(corners, dtype=dtype, device=device)

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """[n, 4] for each image."""
        device = feature_maps[0].device
        self.set_cell_anchors(torch.float32, device)
        strides = [[torch.tensor(stride, device=device)] * 2 for stride in self.strides]
        anchors = torch.cat(self.grid_anchors([one.shape[-2:] for one in feature_maps], strides))
        return [anchors] * len(image_list.image_sizes)


class ProposalHead(RPNHead):
    """Two convolutions, then objectness and box deltas, in float32 from there on."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, num_anchors=len(RATIOS), conv_depth=2)

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        logits, deltas = super().forward(x)
        return [one.float() for one in logits], [one.float() for one in deltas]


class ProposalNetwork(RegionProposalNetwork):
    """torchvision's, with L1 losses over a fixed number of anchors per image, suppression by logits, and no least size or score."""

    def filter_proposals(
        self, proposals: Tensor, objectness: Tensor, image_shapes: list[tuple[int, int]], num_anchors_per_level: list[int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The best of each image: boxes [m, 4] and logits [m], in falling order."""
        logits = objectness.detach().reshape(len(proposals), -1)
        best = self._get_top_n_idx(logits, num_anchors_per_level)  # [B, k]
        counts = torch.tensor(num_anchors_per_level, device=logits.device)
        level = torch.arange(len(counts), device=logits.device).repeat_interleave(counts)
        each = zip(proposals, logits, best, image_shapes, strict=True)
        chosen = [self._filtered(boxes[index], one[index], level[index], size) for boxes, one, index, size in each]
        return [boxes for boxes, _ in chosen], [scores for _, scores in chosen]

    def _filtered(self, boxes: Tensor, logits: Tensor, level: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        finite = boxes.isfinite().all(1) & logits.isfinite()
        boxes = box_ops.clip_boxes_to_image(boxes, size)
        keep = torch.where(finite & not_empty(boxes))[0]
        boxes, logits, level = boxes[keep], logits[keep], level[keep]
        keep = box_ops.batched_nms(boxes, logits, level, self.nms_thresh)[: self.post_nms_top_n()]
        return boxes[keep], logits[keep]

    def compute_loss(self, objectness: Tensor, pred_bbox_deltas: Tensor, labels: list[Tensor], regression_targets: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Objectness and boxes, both sums over the sampled anchors divided by what a full sample would be."""
        positive, negative = (torch.where(torch.cat(sampled))[0] for sampled in self.fg_bg_sampler(labels))
        sampled = torch.cat([positive, negative])
        whole = self.fg_bg_sampler.batch_size_per_image * len(labels)
        box_loss = F.l1_loss(pred_bbox_deltas[positive], torch.cat(regression_targets)[positive], reduction="sum")
        objectness_loss = F.binary_cross_entropy_with_logits(objectness.flatten()[sampled], torch.cat(labels)[sampled], reduction="sum")
        return objectness_loss / whole, box_loss / whole


def not_empty(boxes: Tensor) -> Tensor:
    """[n, 4] -> [n] bool."""
    return (boxes[:, 2:] > boxes[:, :2]).all(1)
