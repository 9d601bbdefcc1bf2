"""Find which methods, and how strong in each block, lose least at a cost.

python tools/search.py --model vit_small_patch14_dinov2 --checkpoint FILE --img-size 560 --methods tome columns --target macs:0.75 latency:0.85 \\
    --output output/search

Writes a recipe per target into the output folder; `vit_prune.search.load_found(FILE).apply(model)` puts one on a model.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import nn

from vit_prune.analysis.photographs import TWELVE, photograph_batches
from vit_prune.measure.inputs import image_size
from vit_prune.measure.report import text_table
from vit_prune.methods.columns import Columns
from vit_prune.methods.tome import ToMe
from vit_prune.prune import plan_of
from vit_prune.search import Found, Search, parse_target
from vit_prune.sweep.bench import unpruned
from vit_prune.sweep.config import PHOTOGRAPHS, SEARCH, SweepConfig, configured
from vit_prune.sweep.judge import Labelled
from vit_prune.train.cli import main

ENTRIES = {
    "tome": {"name": "tome"},
    "columns": {"name": "columns", "importance": "column_mean", "dropped": "merge", "sampling": "systematic"},
    "l1": {"name": "l1", "heads": 0.5, "mlp": 0.5},
}
HEADERS = ("", "keep", "r", "heads", "MLP channels")


@dataclass(frozen=True)
class Flags:
    model: str  # a name of timm's registry
    output: Path  # the folder of the recipes, one per target
    target: tuple[str, ...]  # macs:SHARE or latency:SHARE of the unpruned model's, several at will
    methods: tuple[Literal["tome", "columns", "l1"], ...] = ("tome", "columns")  # that are mixed
    checkpoint: str | None = None  # weights of the model
    pretrained: bool = False  # timm's weights
    img_size: int | None = None  # pixels per side (None: the model's own)
    fidelity: Literal["features", "logits", "labels"] = "features"  # what is lost: cosine of the features, divergence of predictions, or cross-entropy added
    data: str = PHOTOGRAPHS  # or a data set as in tools/train.py, whose training split is searched on
    data_dir: str | None = None  # where the data lies
    images: int = 64  # that are searched on; of the photographs there are twelve
    threads: int = 1  # of the CPU
    exchanges: int = 3  # rounds in which blocks and methods give to each other what they need more
    seed: int = 0  # of random weights


def as_sweep(flags: Flags) -> SweepConfig:
    """For what builds the model and reads the data. Raises: ValueError for flags that do not go together."""
    for target in flags.target:
        parse_target(target)
    if flags.pretrained and flags.checkpoint is not None:
        raise ValueError("give --pretrained or --checkpoint, not both")
    if flags.data == PHOTOGRAPHS and flags.fidelity != "features":
        raise ValueError(f"photographs have no classes, and are searched by features: --fidelity {flags.fidelity} needs --data, e.g. fashion-mnist")
    if flags.images < 1:
        raise ValueError(f"images must be at least 1, got {flags.images}")
    same = {name: getattr(flags, name) for name in ("model", "data", "data_dir", "threads", "seed")}
    methods = {SEARCH: {SEARCH: [ENTRIES[name] for name in flags.methods]}}
    return SweepConfig(checkpoint="" if flags.pretrained else flags.checkpoint, methods=methods, calibration_images=flags.images, **same)


def settings_table(model: nn.Module, found: Found) -> str:
    """Of each block: the share of the columns that it keeps, tokens that it merges, heads and channels that it keeps."""
    depth = len(model.blocks)
    keep = next((method.keep.ratios(depth) for method in found.methods if isinstance(method, Columns)), (1.0,) * depth)
    merges = next((method.counts(depth) for method in found.methods if isinstance(method, ToMe)), (0,) * depth)
    cut = [(f"{len(block.heads)} of {block.num_heads}", f"{len(block.channels)} of {block.num_channels}") for block in (found.plan or plan_of(model)).blocks]
    return text_table(HEADERS, [(f"blocks.{index}", f"{keep[index]:g}", str(merges[index]), *cut[index]) for index in range(depth)])


def run() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    config = as_sweep(flags)
    torch.set_num_threads(flags.threads)
    model = unpruned(config, flags.img_size)
    size = image_size(model)[0]
    batches = photograph_batches(model, size, 1, names=TWELVE)[: flags.images] if flags.data == PHOTOGRAPHS else Labelled(model, config).spread_out()
    search = Search(model, batches, [configured(ENTRIES[name], {}) for name in flags.methods], fidelity=flags.fidelity)
    for target in flags.target:
        found = search.find(target, exchanges=flags.exchanges)
        path = flags.output / f"{target.replace(':', '-')}.yaml"
        found.save(path, comment=f"vp.search, {flags.model} at {size} px, {flags.data}, {flags.threads} thread(s), float32")
        measured = "" if found.measured is None else f", measured {found.measured:.3f}"
        print(f"{target}: predicted {found.share:.3f}{measured}, loss {found.loss:.5f} ({found.fidelity})\n\n{settings_table(model, found)}\n\nsaved: {path}\n")


if __name__ == "__main__":
    main(run)
