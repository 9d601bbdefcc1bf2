"""Features of boxes from a pyramid, and masks back into an image."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import roi_align

CANONICAL_SIZE, CANONICAL_LEVEL = 224, 4  # a box of 224 x 224 pixels is pooled at stride 16 (FPN, arXiv 1612.03144, equation 1)
PASTED_AT_ONCE = 2**26  # pixels, of three numbers in float32 each


class PyramidRoIAlign(nn.Module):
    """RoIAlign with half-pixel alignment and as many samples as a bin has pixels, each box at the level of its size, in float32.

    Args: levels: names in the pyramid. strides: theirs. output_size: bins per side.
    """

    def __init__(self, levels: Sequence[str], strides: Sequence[int], output_size: int) -> None:
        super().__init__()
        self.levels, self.strides, self.output_size = tuple(levels), tuple(strides), output_size

    def forward(self, features: Mapping[str, Tensor], boxes: list[Tensor], image_shapes: object = None) -> Tensor:
        """features [B, C, h, w] by level, boxes [n, 4] of each image -> [all n, C, bins, bins]; image_shapes are torchvision's habit and not read."""
        rois = to_rois(boxes)
        level = self.level_of(rois[:, 1:])
        first = features[self.levels[0]]
        pooled = first.new_zeros(len(rois), first.shape[1], self.output_size, self.output_size)
        for number, (name, stride) in enumerate(zip(self.levels, self.strides, strict=True)):
            here = torch.where(level == number)[0]
            values = roi_align(features[name].float(), rois[here], self.output_size, 1 / stride, sampling_ratio=0, aligned=True)
            pooled = pooled.index_put((here,), values.to(pooled.dtype))
        return pooled

    def level_of(self, boxes: Tensor) -> Tensor:
        """[n, 4] -> [n], positions in `levels`."""
        sides = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).sqrt()
        lowest = self.strides[0].bit_length() - 1
        level = (CANONICAL_LEVEL + torch.log2(sides / CANONICAL_SIZE + 1e-8)).floor()
        return level.clamp(lowest, lowest + len(self.levels) - 1).long() - lowest


def to_rois(boxes: list[Tensor]) -> Tensor:
    """[n, 4] of each image -> [all n, 5], the number of the image first."""
    return torch.cat([F.pad(one, (1, 0), value=float(number)) for number, one in enumerate(boxes)])


def crop_masks(masks: Tensor, which: Tensor, boxes: Tensor, size: int) -> Tensor:
    """Binary targets [n, size, size] of masks [G, h, w] number `which` [n], inside boxes [n, 4]."""
    rois = torch.cat([which[:, None].to(boxes), boxes], dim=1)
    return (roi_align(masks[:, None].to(boxes), rois, size, 1.0, sampling_ratio=0, aligned=True)[:, 0] >= 0.5).to(boxes)


def paste_masks(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Probabilities [n, m, m] over boxes [n, 4] -> masks [n, *size] bool, each pixel's centre sampled from its box."""
    pasted = torch.zeros(len(masks), *size, dtype=torch.bool, device=masks.device)
    at_once = 1 if masks.device.type == "cpu" else max(1, PASTED_AT_ONCE // (size[0] * size[1]))
    for start in range(0, len(masks), at_once):
        here = slice(start, start + at_once)
        area = inner_area(boxes[here], size)
        pasted[here, area[0], area[1]] = sample(masks[here], boxes[here], area) >= 0.5
    return pasted


def inner_area(boxes: Tensor, size: tuple[int, int]) -> tuple[slice, slice]:
    """Rows and columns that hold these boxes, with a pixel around them."""
    x1, y1 = (boxes[:, :2].amin(0).floor() - 1).clamp(min=0).int().tolist()
    x2, y2 = (boxes[:, 2:].amax(0).ceil() + 1).int().tolist()
    return slice(y1, min(y2, size[0])), slice(x1, min(x2, size[1]))


def sample(masks: Tensor, boxes: Tensor, area: tuple[slice, slice]) -> Tensor:
    """[n, m, m] at the pixels of an area of the image -> [n, rows, columns]."""
    ys, xs = (torch.arange(side.start, max(side.start, side.stop), device=boxes.device) + 0.5 for side in area)
    x1, y1, x2, y2 = boxes[:, :, None].unbind(1)  # each [n, 1]
    x, y = (xs - x1) / (x2 - x1) * 2 - 1, (ys - y1) / (y2 - y1) * 2 - 1
    grid = torch.stack([x[:, None].expand(-1, y.shape[1], -1), y[:, :, None].expand(-1, -1, x.shape[1])], dim=-1)
    return F.grid_sample(masks[:, None].float(), grid, align_corners=False)[:, 0]
