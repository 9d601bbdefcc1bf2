"""A recipe as text."""

from torch import nn

from vit_prune.measure.report import text_table
from vit_prune.methods.columns import Columns
from vit_prune.methods.tome import ToMe
from vit_prune.prune import plan_of
from vit_prune.search.found import Found

HEADERS = ("", "keep", "r", "heads", "MLP channels")


def settings_table(model: nn.Module, found: Found) -> str:
    """Of each block: the share of the columns that it keeps, tokens that it merges, heads and channels that it keeps."""
    depth = len(model.blocks)
    keep = next((method.keep.ratios(depth) for method in found.methods if isinstance(method, Columns)), (1.0,) * depth)
    merges = next((method.counts(depth) for method in found.methods if isinstance(method, ToMe)), (0,) * depth)
    cut = [(f"{len(block.heads)} of {block.num_heads}", f"{len(block.channels)} of {block.num_channels}") for block in (found.plan or plan_of(model)).blocks]
    return text_table(HEADERS, [(f"blocks.{index}", f"{keep[index]:g}", str(merges[index]), *cut[index]) for index in range(depth)])
