"""ViTDet's simple feature pyramid: one map becomes five (arXiv 2203.16527, section 3).  x [B, D, h, w]; modules bear detectron2's names."""

from collections import OrderedDict
from collections.abc import Sequence

import torch.nn.functional as F
from timm.layers import LayerNorm2d
from torch import Tensor, nn

from vit_prune.detection.backbone import ViTBackbone

SCALES = (4.0, 2.0, 1.0, 0.5)  # of the backbone's map; a fifth level is every second place of the last


class ConvNorm(nn.Conv2d):
    """A convolution without bias, and a norm over channels."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=False)
        self.norm = LayerNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class SimpleFeaturePyramid(nn.Module):
    """Images [B, 3, H, W] -> {"p2": [B, channels, H / 4, W / 4], ..., "p6"}, for a backbone of 16-pixel patches.

    Args: net: the backbone. channels: of every level.
    """

    def __init__(self, net: ViTBackbone, channels: int = 256) -> None:
        super().__init__()
        self.net, self.out_channels = net, channels
        first = net.stride.bit_length() - 1 - 2  # log2 of the first level's stride
        self.levels = tuple(f"p{first + step}" for step in range(len(SCALES) + 1))
        self.strides = tuple(2 ** (first + step) for step in range(len(SCALES) + 1))
        for step, scale in enumerate(SCALES):
            self.add_module(f"simfp_{first + step}", stage(net.channels, channels, scale))

    @property
    def size_divisibility(self) -> int:
        """Image sides must be multiples of it."""
        return self.strides[-2]

    def forward(self, images: Tensor, image_sizes: Sequence[tuple[int, int]] | None = None) -> dict[str, Tensor]:
        """image_sizes: of each image without its padding, see `ViTBackbone`."""
        features = self.net(images, image_sizes)
        maps = [self.get_submodule(f"simfp_{level[1:]}")(features) for level in self.levels[:-1]]
        return OrderedDict(zip(self.levels, [*maps, F.max_pool2d(maps[-1], kernel_size=1, stride=2)], strict=True))


def stage(dim: int, channels: int, scale: float) -> nn.Sequential:
    """D channels at the backbone's stride -> `channels` at `scale` times its resolution."""
    up = [nn.ConvTranspose2d(dim, dim // 2, kernel_size=2, stride=2)]
    resize = {
        4.0: (*up, LayerNorm2d(dim // 2), nn.GELU(), nn.ConvTranspose2d(dim // 2, dim // 4, kernel_size=2, stride=2)),
        2.0: up,
        1.0: (),
        0.5: (nn.MaxPool2d(kernel_size=2, stride=2),),
    }[scale]
    width = {4.0: dim // 4, 2.0: dim // 2}.get(scale, dim)
    return nn.Sequential(*resize, ConvNorm(width, channels, 1), ConvNorm(channels, channels, 3))
