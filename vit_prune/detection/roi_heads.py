"""Box and mask heads as in detectron2's ViTDet, by torchvision's parts.

R boxes of all images, K classes.  Labels are 1 to K; 0 is the background, and the first column of the class logits.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.ops import boxes as box_ops

from vit_prune.detection.pooling import crop_masks

Target = Mapping[str, Tensor]  # boxes [G, 4], labels [G] int64, masks [G, h, w]
BOX_BINS, MASK_BINS = 7, 14


class BoxHead(FastRCNNConvFCHead):
    """Four convolutions with norms and a linear layer, [R, channels, 7, 7] -> [R, hidden]."""

    def __init__(self, channels: int, hidden: int, convs: int = 4) -> None:
        super().__init__((channels, BOX_BINS, BOX_BINS), [channels] * convs, [hidden], norm_layer=LayerNorm2d)
        nn.init.kaiming_uniform_(self[-2].weight, a=1)  # Xavier's
        nn.init.zeros_(self[-2].bias)


class BoxPredictor(nn.Module):
    """[R, hidden] -> class logits [R, 1 + K] and box deltas [R, 4 K], in float32."""

    def __init__(self, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.cls_score, self.bbox_pred = nn.Linear(hidden, 1 + num_classes), nn.Linear(hidden, 4 * num_classes)
        for layer, std in ((self.cls_score, 0.01), (self.bbox_pred, 0.001)):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.cls_score(x).float(), self.bbox_pred(x).float()


class MaskHead(MaskRCNNHeads):
    """Convolutions with norms, [R, channels, 14, 14] -> the same."""

    def __init__(self, channels: int, convs: int = 4) -> None:
        super().__init__(channels, [channels] * convs, dilation=1, norm_layer=LayerNorm2d)


class MaskPredictor(nn.Module):
    """[R, channels, 14, 14] -> mask logits [R, K, 28, 28], in float32."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.deconv, self.predictor = nn.ConvTranspose2d(channels, channels, kernel_size=2, stride=2), nn.Conv2d(channels, num_classes, kernel_size=1)
        nn.init.kaiming_normal_(self.deconv.weight, mode="fan_out", nonlinearity="relu")
        nn.init.normal_(self.predictor.weight, std=0.001)
        nn.init.zeros_(self.deconv.bias)
        nn.init.zeros_(self.predictor.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.predictor(F.relu(self.deconv(x))).float()


class Heads(RoIHeads):
    """torchvision's sampling of proposals, with L1 box losses, binary mask targets and a mask for each class but the background."""

    def forward(
        self, features: Mapping[str, Tensor], proposals: list[Tensor], image_shapes: list[tuple[int, int]], targets: list[Target] | None = None
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        if self.training:
            return [], self.losses(features, *self.select_training_samples(proposals, targets), targets)
        class_logits, deltas = self.box_outputs(features, proposals)
        found = zip(*self.postprocess_detections(class_logits, deltas, proposals, image_shapes), strict=True)
        results = [{"boxes": boxes, "scores": scores, "labels": labels} for boxes, scores, labels in found]
        logits = self.mask_outputs(features, [result["boxes"] for result in results])
        logits = of_class(logits, torch.cat([result["labels"] for result in results])).split([len(result["boxes"]) for result in results])
        return [result | {"masks": one.sigmoid()} for result, one in zip(results, logits, strict=True)], {}

    def box_outputs(self, features: Mapping[str, Tensor], boxes: list[Tensor]) -> tuple[Tensor, Tensor]:
        return self.box_predictor(self.box_head(self.box_roi_pool(features, boxes)))

    def mask_outputs(self, features: Mapping[str, Tensor], boxes: list[Tensor]) -> Tensor:
        return self.mask_predictor(self.mask_head(self.mask_roi_pool(features, boxes)))

    def losses(
        self, features: Mapping[str, Tensor], proposals: list[Tensor], matched: list[Tensor], labels: list[Tensor], deltas: list[Tensor], targets: list[Target]
    ) -> dict[str, Tensor]:
        """Of sampled proposals [n, 4], the target that each one matched [n], their labels [n] and the deltas that lead to it [n, 4], per image."""
        class_logits, predicted = self.box_outputs(features, proposals)
        label = torch.cat(labels)
        positive = torch.where(label > 0)[0]
        own = predicted.unflatten(1, (-1, 4))[positive, label[positive] - 1]
        box_loss = F.l1_loss(own, torch.cat(deltas)[positive], reduction="sum") / max(1, len(label))
        class_loss = F.cross_entropy(class_logits, label) if len(label) else class_logits.sum() * 0
        return {"loss_classifier": class_loss, "loss_box_reg": box_loss, "loss_mask": self.mask_loss(features, proposals, matched, labels, targets)}

    def mask_loss(self, features: Mapping[str, Tensor], proposals: list[Tensor], matched: list[Tensor], labels: list[Tensor], targets: list[Target]) -> Tensor:
        chosen = [torch.where(label > 0)[0] for label in labels]
        boxes = [proposal[index] for proposal, index in zip(proposals, chosen, strict=True)]
        logits = self.mask_outputs(features, boxes)
        if not len(logits):
            return logits.sum() * 0
        logits = of_class(logits, torch.cat([label[index] for label, index in zip(labels, chosen, strict=True)]))
        which = [match[index] for match, index in zip(matched, chosen, strict=True)]
        wanted = [crop_masks(target["masks"], one, box, logits.shape[-1]) for target, one, box in zip(targets, which, boxes, strict=True) if len(one)]
        return F.binary_cross_entropy_with_logits(logits, torch.cat(wanted))

    def postprocess_detections(
        self, class_logits: Tensor, box_regression: Tensor, proposals: list[Tensor], image_shapes: list[tuple[int, int]]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Boxes [m, 4], scores [m] and labels [m] of each image, by falling score."""
        counts = [len(one) for one in proposals]
        boxes = self.box_coder.decode(box_regression, proposals).reshape(sum(counts), class_logits.shape[1] - 1, 4)
        each = zip(boxes.split(counts), class_logits.softmax(-1).split(counts), image_shapes, strict=True)
        found = [self._best(*one) for one in each]
        return [one[0] for one in found], [one[1] for one in found], [one[2] for one in found]

    def _best(self, boxes: Tensor, scores: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Of boxes [n, K, 4] and scores [n, 1 + K]."""
        finite = boxes.isfinite().flatten(1).all(1) & scores.isfinite().all(1)
        row, kind = torch.where((scores[:, 1:] > self.score_thresh) & finite[:, None])
        boxes, scores = box_ops.clip_boxes_to_image(boxes[row, kind], size), scores[row, kind + 1]
        keep = box_ops.batched_nms(boxes, scores, kind, self.nms_thresh)[: self.detections_per_img]
        return boxes[keep], scores[keep], kind[keep] + 1


def of_class(logits: Tensor, labels: Tensor) -> Tensor:
    """The mask of each box's own class: [R, K, m, m], [R] -> [R, m, m]."""
    return logits[torch.arange(len(logits), device=logits.device), labels - 1]
