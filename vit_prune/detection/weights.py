"""Weights between our detector and detectron2's: the same numbers under other names, and the background first here, last there."""

from collections.abc import Mapping

from torch import Tensor

CLASS_LOGITS = "roi_heads.box_predictor.cls_score."
NAMES = {  # ours: detectron2's
    **{f"rpn.head.conv.{number}.0.": f"proposal_generator.rpn_head.conv.conv{number}." for number in range(2)},
    "rpn.head.cls_logits.": "proposal_generator.rpn_head.objectness_logits.",
    "rpn.head.bbox_pred.": "proposal_generator.rpn_head.anchor_deltas.",
    **{f"roi_heads.box_head.{number}.0.": f"roi_heads.box_head.conv{number + 1}." for number in range(4)},
    **{f"roi_heads.box_head.{number}.1.": f"roi_heads.box_head.conv{number + 1}.norm." for number in range(4)},
    "roi_heads.box_head.5.": "roi_heads.box_head.fc1.",
    **{f"roi_heads.mask_head.{number}.0.": f"roi_heads.mask_head.mask_fcn{number + 1}." for number in range(4)},
    **{f"roi_heads.mask_head.{number}.1.": f"roi_heads.mask_head.mask_fcn{number + 1}.norm." for number in range(4)},
    "roi_heads.mask_predictor.": "roi_heads.mask_head.",
}
SAME = ("backbone.", "roi_heads.box_predictor.")


def to_detectron2(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our detector's state dict for detectron2's. Raises: ValueError for a weight that is not of our detector."""
    return {renamed(name, NAMES): rolled(name, value, -1) for name, value in weights.items()}


def from_detectron2(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The way back."""
    return {renamed(name, {theirs: ours for ours, theirs in NAMES.items()}): rolled(name, value, 1) for name, value in weights.items()}


def renamed(name: str, names: Mapping[str, str]) -> str:
    """By the longest of the prefixes that fits: mask_head.mask_fcn1.norm. is not mask_head.mask_fcn1."""
    fitting = [prefix for prefix in names if name.startswith(prefix)]
    if fitting:
        prefix = max(fitting, key=len)
        return names[prefix] + name[len(prefix) :]
    if not name.startswith(SAME):
        raise ValueError(f"{name} is no weight of this detector")
    return name


def rolled(name: str, value: Tensor, by: int) -> Tensor:
    return value.roll(by, dims=0) if name.startswith(CLASS_LOGITS) else value
