"""The heads and MLP channels of timm's blocks: which axes of which layers belong to them, how they are cut and summed.

H heads, d head dim, C channels. A unit is a head or a channel.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from timm.layers import GluMlp, Mlp, SwiGLU
from torch import Tensor, nn

from vit_prune.ops.slicing import keep_units, sum_units

MLPS = (Mlp, GluMlp, SwiGLU)


class Axis(NamedTuple):
    """One axis of a linear layer on which units lie, as parts x units x size (see ops.slicing)."""

    name: str  # of the layer, in its attention or MLP
    linear: nn.Linear
    dim: int
    parts: int = 1
    is_scored: bool = True


class Units(NamedTuple):
    """The heads, or the channels, of one block: how many, and every axis that is cut with them."""

    count: int
    axes: tuple[Axis, ...]

    def cut(self, kept: Sequence[int]) -> None:
        """Keep these units alone: new parameters, in the same dtype and on the same device, that need a gradient where the old ones did."""
        for _, linear, dim, parts, _ in self.axes:
            linear.weight = cut_parameter(linear.weight, kept, num_units=self.count, parts=parts, dim=dim)
            if dim == 0 and linear.bias is not None:
                linear.bias = cut_parameter(linear.bias, kept, num_units=self.count, parts=parts)
            linear.out_features, linear.in_features = linear.weight.shape

    def parameters(self) -> list[nn.Parameter]:
        """What the scores read: weights, and the biases that have an entry per unit."""
        scored = [axis for axis in self.axes if axis.is_scored]
        return [axis.linear.weight for axis in scored] + [axis.linear.bias for axis in scored if axis.dim == 0 and axis.linear.bias is not None]

    def sums(self, value: Callable[[nn.Parameter], Tensor], *, biases: bool) -> Tensor:
        """[units] in float64 on the CPU: the sum of value(parameter) over all that belongs to each unit."""
        total = torch.zeros(self.count, dtype=torch.float64)
        for _, linear, dim, parts, is_scored in self.axes:
            if is_scored:
                total += sum_units(value(linear.weight).float(), num_units=self.count, parts=parts, dim=dim).cpu()
            if is_scored and biases and dim == 0 and linear.bias is not None:
                total += sum_units(value(linear.bias).float(), num_units=self.count, parts=parts).cpu()
        return total

    def magnitudes(self) -> Tensor:
        """[units]: the mean |w| of each unit's weights."""
        num_weights = sum(axis.linear.weight.numel() for axis in self.axes if axis.is_scored) / self.count
        return self.sums(lambda weight: weight.detach().abs(), biases=False) / num_weights


def cut_parameter(parameter: nn.Parameter, kept: Sequence[int], **axis) -> nn.Parameter:
    return nn.Parameter(keep_units(parameter.detach(), kept, **axis), requires_grad=parameter.requires_grad)


def head_units(attn: nn.Module) -> Units:
    """Of timm's Attention; an output gate is cut along."""
    axes = (Axis("qkv", attn.qkv, 0, parts=3), Axis("proj", attn.proj, 1))
    return Units(attn.num_heads, axes if attn.gate is None else (*axes, Axis("gate", attn.gate, 0, is_scored=False)))


def channel_units(mlp: nn.Module) -> Units:
    """Of an MLP in MLPS. A GluMlp has both halves in one layer, a SwiGLU in two."""
    if type(mlp) is SwiGLU:
        axes = (Axis("fc1_g", mlp.fc1_g, 0), Axis("fc1_x", mlp.fc1_x, 0))
    else:
        axes = (Axis("fc1", mlp.fc1, 0, parts=2 if type(mlp) is GluMlp else 1),)
    return Units(num_channels(mlp), (*axes, Axis("fc2", mlp.fc2, 1)))


def num_channels(mlp: nn.Module) -> int:
    """C; 0 for an MLP that cannot be cut."""
    return mlp.fc2.in_features if type(mlp) in MLPS and isinstance(mlp.fc2, nn.Linear) else 0


def cut_heads(attn: nn.Module, kept: Sequence[int]) -> None:
    """Keep these heads. The head dim and the scale stay; norms of queries and keys act within a head."""
    head_units(attn).cut(kept)
    attn.num_heads, attn.attn_dim = len(kept), len(kept) * attn.head_dim
