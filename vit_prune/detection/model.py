"""Mask R-CNN on a plain ViT: torchvision's GeneralizedRCNN from parts that equal detectron2's ViTDet.

Boxes are x1 y1 x2 y2 in pixels; labels 1 to K.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.image_list import ImageList

from vit_prune.detection.config import DetectorConfig
from vit_prune.detection.pooling import PyramidRoIAlign, paste_masks
from vit_prune.detection.pyramid import SimpleFeaturePyramid
from vit_prune.detection.roi_heads import BOX_BINS, MASK_BINS, BoxHead, BoxPredictor, Heads, MaskHead, MaskPredictor, Target
from vit_prune.detection.rpn import LevelAnchors, ProposalHead, ProposalNetwork, not_empty

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # ImageNet's, of pixels from 0 to 255


class Batch(nn.Module):
    """Normalise images, and pad them to one size: a square, or the least multiple of `divisibility` that holds them all."""

    def __init__(self, divisibility: int, square: int | None) -> None:
        super().__init__()
        self.divisibility, self.square = divisibility, square
        self.register_buffer("mean", torch.tensor(MEAN)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(STD)[:, None, None], persistent=False)

    def forward(self, images: Sequence[Tensor]) -> ImageList:
        """Each [3, h, w], uint8, or float from 0 to 1. Raises: ValueError for one that is larger than the square, or anything else."""
        for image in images:
            if image.ndim != 3 or image.shape[0] != 3:
                raise ValueError(f"an image must be [3, height, width], RGB, got {tuple(image.shape)}")
        sizes = [tuple(image.shape[-2:]) for image in images]
        height, width = self.padded(max(h for h, _ in sizes), max(w for _, w in sizes))
        normal = [F.pad(self.normalise(image), (0, width - w, 0, height - h)) for image, (h, w) in zip(images, sizes, strict=True)]
        return ImageList(torch.stack(normal), sizes)

    def padded(self, height: int, width: int) -> tuple[int, int]:
        if self.square is None:
            return -(-height // self.divisibility) * self.divisibility, -(-width // self.divisibility) * self.divisibility
        if max(height, width) > self.square:
            raise ValueError(f"an image of {height} x {width} pixels is larger than the square of {self.square} that this detector pads to: resize it first")
        return self.square, self.square

    def normalise(self, image: Tensor) -> Tensor:
        pixels = image.to(self.mean) * (255 if image.is_floating_point() else 1)
        return (pixels - self.mean) / self.std


class MaskRCNN(GeneralizedRCNN):
    """Detects and segments. In training mode it returns five losses, in evaluation mode what it found in each image."""

    def forward(
        self, images: Sequence[Tensor], targets: Sequence[Target] | None = None, output_sizes: Sequence[tuple[int, int]] | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """
        Args:
            images: each [3, h, w], RGB, uint8 or float from 0 to 1.
            targets: for training, of each image boxes [G, 4], labels [G] int64 and masks [G, h, w].
            output_sizes: (height, width) that boxes and masks are wanted in, where an image was resized; None is its own.

        Returns: losses by name; or of each image boxes [m, 4], scores [m], labels [m] and masks [m, height, width] bool, by falling score.
        Raises: ValueError for training without targets, and for targets that are no boxes.
        """
        batch = self.transform(images)
        if self.training:
            check_targets(targets, len(images))
        features = self.backbone(batch.tensors, batch.image_sizes)
        proposals, proposal_losses = self.rpn(batch, features, targets)
        results, losses = self.roi_heads(features, proposals, batch.image_sizes, targets)
        if self.training:
            return losses | proposal_losses
        sizes = batch.image_sizes if output_sizes is None else output_sizes
        return [resized(*one) for one in zip(results, batch.image_sizes, sizes, strict=True)]


def check_targets(targets: Sequence[Target] | None, count: int) -> None:
    """Raises: ValueError for what nothing can be learnt from."""
    if targets is None or len(targets) != count:
        raise ValueError(f"training needs a target for each of the {count} images, got {None if targets is None else len(targets)}")
    for number, target in enumerate(targets):
        boxes = target["boxes"]
        if boxes.ndim != 2 or boxes.shape[1] != 4:
            raise ValueError(f"boxes of target {number} must be [G, 4], got {tuple(boxes.shape)}")
        if not not_empty(boxes).all():
            raise ValueError(f"target {number} holds a box without area, {boxes[~not_empty(boxes)][0].tolist()}: filter boxes after each change of the image")


def resized(result: Mapping[str, Tensor], size: tuple[int, int], wanted: tuple[int, int]) -> dict[str, Tensor]:
    """Detections of an image of `size` in an image of the wanted size; boxes that are empty there are left out."""
    height, width = wanted
    boxes = result["boxes"] * result["boxes"].new_tensor([width / size[1], height / size[0]] * 2)
    boxes = torch.stack([boxes[:, 0::2].clamp(0, width), boxes[:, 1::2].clamp(0, height)], dim=2).flatten(1)
    keep = torch.where(not_empty(boxes))[0]
    kept = {name: result[name][keep] for name in ("scores", "labels")}
    return {"boxes": boxes[keep], **kept, "masks": paste_masks(result["masks"][keep], boxes[keep], wanted)}


def mask_rcnn(config: DetectorConfig, backbone: SimpleFeaturePyramid) -> MaskRCNN:
    """Assemble a detector from its parts, with random weights outside of the backbone's. Raises: ValueError for a square that does not fit the pyramid."""
    if config.square and config.image_size % backbone.size_divisibility:
        raise ValueError(f"image_size must be a multiple of {backbone.size_divisibility} to be padded to a square of it, got {config.image_size}")
    channels, pooled = config.channels, backbone.levels[:-1]
    rpn = ProposalNetwork(
        LevelAnchors(backbone.strides),
        ProposalHead(channels),
        fg_iou_thresh=0.7,
        bg_iou_thresh=0.3,
        batch_size_per_image=256,
        positive_fraction=0.5,
        pre_nms_top_n={"training": config.train_candidates, "testing": config.test_candidates},
        post_nms_top_n={"training": config.proposals, "testing": config.proposals},
        nms_thresh=0.7,
    )
    heads = Heads(
        PyramidRoIAlign(pooled, backbone.strides[:-1], BOX_BINS),
        BoxHead(channels, config.hidden),
        BoxPredictor(config.hidden, config.num_classes),
        fg_iou_thresh=0.5,
        bg_iou_thresh=0.5,
        batch_size_per_image=config.sampled_proposals,
        positive_fraction=0.25,
        bbox_reg_weights=(10.0, 10.0, 5.0, 5.0),
        score_thresh=config.score_thresh,
        nms_thresh=config.nms_thresh,
        detections_per_img=config.detections,
        mask_roi_pool=PyramidRoIAlign(pooled, backbone.strides[:-1], MASK_BINS),
        mask_head=MaskHead(channels),
        mask_predictor=MaskPredictor(channels, config.num_classes),
    )
    return MaskRCNN(backbone, rpn, heads, Batch(backbone.size_divisibility, config.image_size if config.square else None))
