"""Cut and add up the units of a weight: the heads of an attention, the channels of an MLP.

An axis of a weight lies as parts x units x size. H heads, d head dim, D width, C channels:

    weight             shape        axis   parts   units   size
    qkv                [3 H d, D]   0      3       H       d      (queries, keys, values)
    proj               [D, H d]     1      1       H       d
    fc1                [C, D]       0      1       C       1
    fc1, gated         [2 C, D]     0      2       C       1      (its two halves meet channel by channel)
    fc2                [D, C]       1      1       C       1

A bias is cut as axis 0 of its weight.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def keep_units(value: Tensor, kept: Sequence[int], *, num_units: int, parts: int = 1, dim: int = 0) -> Tensor:
    """The kept units, in the order given, of each part along `dim`: a new, contiguous tensor."""
    index = torch.tensor(kept, dtype=torch.long, device=value.device)
    return value.unflatten(dim, (parts, num_units, -1)).index_select(dim + 1, index).flatten(dim, dim + 2)


def sum_units(value: Tensor, *, num_units: int, parts: int = 1, dim: int = 0) -> Tensor:
    """[num_units]: the sum of everything that belongs to each unit along `dim`."""
    return value.unflatten(dim, (parts, num_units, -1)).movedim(dim + 1, 0).flatten(1).sum(1)
