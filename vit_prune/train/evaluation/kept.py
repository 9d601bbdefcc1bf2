"""How many columns each block keeps and how many of its heads run, per image, counted while a model is evaluated.  B batch, L blocks, M kept columns."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vit_prune.methods.base import KeptColumns
from vit_prune.methods.stack import Prune, prune_stacks
from vit_prune.train.distributed import sum_over_ranks
from vit_prune.train.statistics import num_columns, num_heads


class KeptCounter:
    """The batches of a loader, for the one loop that passes each of them through the model; columns and heads are counted on the way.

    With `with`: hooks watch the model's blocks for that long. Images with targets below zero are left out, as `evaluate` does it.
    """

    def __init__(self, model: nn.Module, loader: DataLoader, device: torch.device) -> None:
        self.batches = loader
        self.stacks = prune_stacks(model)
        self.widths: list[Tensor] = []  # of the batch that is under way, [B] per block
        self.heads: list[Tensor] = []
        self.running = HeadMoments(sum(bool(stack.gaters) for stack in self.stacks), device)
        self.sums = torch.zeros(len(self.stacks) + 2, dtype=torch.int64, device=device)  # of M per block, of (M over all blocks)^2, images

    def __enter__(self) -> "KeptCounter":
        self.handles = [stack.register_forward_hook(self.measure) for stack in self.stacks]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def __len__(self) -> int:
        return len(self.batches)

    def __getattr__(self, name: str) -> object:
        """What else is asked of a loader."""
        return getattr(self.batches, name)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, targets in self.batches:
            yield images, targets
            seen = targets.to(self.sums.device) >= 0
            if self.widths:
                self.add(torch.stack(self.widths), seen)
            if self.heads:
                self.running.add(torch.stack(self.heads) * seen)
            self.widths, self.heads = [], []

    def measure(self, _stack: Prune, args: tuple[Tensor], kept: KeptColumns) -> None:
        self.widths.append(num_columns(kept, len(args[0])))
        if kept.gate is not None:
            self.heads.append(num_heads(kept.gate))

    def add(self, widths: Tensor, seen: Tensor) -> None:
        """widths [L, B], seen [B]."""
        widths = widths * seen
        squares = widths.sum(0).square().sum()
        self.sums = self.sums + torch.cat([widths.sum(1), squares[None], seen.sum()[None]])

    def result(self) -> dict:
        """Over all processes; call it in each of them.

        Returns: {"columns": mean M over images and blocks, "columns_spread": standard deviation over the images of an image's mean over the blocks,
        "columns_per_block": mean M over images}, each None where no block is patched or no image was seen; and "heads_per_block", the mean of
        k over images, with "heads_covariance" [L, L] over them, both None where no heads are gated.
        """
        *per_block, squares, images = sum_over_ranks(self.sums).tolist()
        if not per_block or not images:
            return dict.fromkeys(("columns", "columns_spread", "columns_per_block", "heads_per_block", "heads_covariance"))
        total, blocks = sum(per_block), len(per_block)
        variance = (images * squares - total**2) / images**2  # of whole numbers: exactly 0 where all images keep as many
        return {
            "columns": total / images / blocks,
            "columns_spread": math.sqrt(variance) / blocks,
            "columns_per_block": [columns / images for columns in per_block],
            **self.running.result(images),
        }


class HeadMoments:
    """Sums of k and of its products between blocks, from which the spread of anything linear in k follows: the MACs, say."""

    def __init__(self, blocks: int, device: torch.device) -> None:
        self.first = torch.zeros(blocks, dtype=torch.int64, device=device)
        self.second = torch.zeros(blocks, blocks, dtype=torch.int64, device=device)

    def add(self, heads: Tensor) -> None:
        """heads [L, B], 0 where an image is left out."""
        self.first = self.first + heads.sum(1)
        self.second = self.second + (heads[:, None] * heads[None]).sum(-1)

    def result(self, images: int) -> dict:
        """Over all processes."""
        if not len(self.first):
            return dict.fromkeys(("heads_per_block", "heads_covariance"))
        first, second = sum_over_ranks(self.first), sum_over_ranks(self.second)
        covariance = (images * second - first[:, None] * first[None]).double() / images**2  # of whole numbers
        return {"heads_per_block": (first.double() / images).tolist(), "heads_covariance": covariance.tolist()}


def of_first_batch(layers: list[dict]) -> dict:
    """What `KeptCounter.result` would give of one batch, from the rows of layers.csv of one epoch; how the heads of its images differ is not known."""
    columns, heads = ([layer[name] for layer in layers if layer.get(name) is not None] for name in ("columns", "heads"))
    covariance = [[0.0] * len(heads)] * len(heads)
    return {
        "columns": sum(columns) / len(columns) if columns else None,
        "columns_per_block": columns,
        "heads_per_block": heads or None,
        "heads_covariance": covariance if heads else None,
    }
