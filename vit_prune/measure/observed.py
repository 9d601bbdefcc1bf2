"""What depends on the images, seen while a model runs on some."""

import torch
from torch import Tensor, nn

from vit_prune.methods.stack import prune_stacks
from vit_prune.train.statistics import num_columns, num_heads


@torch.no_grad()
def observed(model: nn.Module, images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """M of each patched block and the heads that run in each with gates, means over the images, seen by hooks in one forward of a copy."""
    seen = []
    handles = [stack.register_forward_hook(lambda _stack, args, kept: seen.append((kept, len(args[0])))) for stack in prune_stacks(model)]
    model(images)
    for handle in handles:
        handle.remove()
    columns = tuple(num_columns(kept, batch).float().mean().item() for kept, batch in seen)
    return columns, tuple(num_heads(kept.gate).float().mean().item() for kept, _ in seen if kept.gate is not None)
