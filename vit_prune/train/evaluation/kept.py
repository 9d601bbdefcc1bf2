"""How many columns each block keeps, per image, counted while a model is evaluated.  B batch, L blocks, M kept columns."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vit_prune.methods.base import KeptColumns
from vit_prune.methods.stack import Prune, prune_stacks
from vit_prune.train.distributed import sum_over_ranks
from vit_prune.train.statistics import num_columns


class KeptCounter:
    """The batches of a loader, for the one loop that passes each of them through the model; M is counted on the way.

    With `with`: hooks watch the model's blocks for that long. Images with targets below zero are left out, as `evaluate` does it.
    """

    def __init__(self, model: nn.Module, loader: DataLoader, device: torch.device) -> None:
        self.batches = loader
        self.stacks = prune_stacks(model)
        self.widths: list[Tensor] = []  # of the batch that is under way, [B] per block
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
            if self.widths:
                self.add(torch.stack(self.widths), targets.to(self.sums.device) >= 0)
            self.widths = []

    def measure(self, _stack: Prune, args: tuple[Tensor], kept: KeptColumns) -> None:
        self.widths.append(num_columns(kept, len(args[0])))

    def add(self, widths: Tensor, seen: Tensor) -> None:
        """widths [L, B], seen [B]."""
        widths = widths * seen
        squares = widths.sum(0).square().sum()
        self.sums = self.sums + torch.cat([widths.sum(1), squares[None], seen.sum()[None]])

    def result(self) -> dict:
        """Over all processes; call it in each of them.

        Returns: {"columns": mean M over images and blocks, "columns_spread": standard deviation over the images of an image's mean over the blocks,
        "columns_per_block": mean M over images}, each None where no block is patched or no image was seen.
        """
        *per_block, squares, images = sum_over_ranks(self.sums).tolist()
        if not per_block or not images:
            return dict.fromkeys(("columns", "columns_spread", "columns_per_block"))
        total, blocks = sum(per_block), len(per_block)
        variance = (images * squares - total**2) / images**2  # of whole numbers: exactly 0 where all images keep as many
        return {
            "columns": total / images / blocks,
            "columns_spread": math.sqrt(variance) / blocks,
            "columns_per_block": [columns / images for columns in per_block],
        }
