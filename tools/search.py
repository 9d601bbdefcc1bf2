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

from vit_prune.measure.inputs import image_size
from vit_prune.search import Search, parse_target
from vit_prune.search.greedy import CannotReach
from vit_prune.search.report import settings_table
from vit_prune.sweep.bench import unpruned
from vit_prune.sweep.config import PHOTOGRAPHS, SEARCH, SweepConfig, configured
from vit_prune.sweep.judge import search_batches
from vit_prune.train.cli import main

ENTRIES = {
    "tome": {"name": "tome"},
    "columns": {"name": "columns", "importance": "column_mean", "dropped": "merge", "sampling": "systematic"},
    "l1": {"name": "l1", "heads": 0.5, "mlp": 0.5},
}


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
    """What builds the model and reads the data. Raises: ValueError for flags that do not go together."""
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


def free_path(output: Path, target: str) -> Path:
    """Raises: FileExistsError where there is a recipe already."""
    path = output / f"{target.replace(':', '-')}.yaml"
    if path.exists():
        raise FileExistsError(f"{path} is there already: give another --output, or remove it")
    return path


def run() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    config = as_sweep(flags)
    torch.set_num_threads(flags.threads)
    paths = {target: free_path(flags.output, target) for target in flags.target}
    model = unpruned(config, flags.img_size)
    size = image_size(model)[0]
    batches = search_batches(config, model, size, by_labels=flags.fidelity == "labels")
    search = Search(model, batches, [configured(ENTRIES[name], {}) for name in flags.methods], fidelity=flags.fidelity)
    missed = []
    for target, path in paths.items():
        try:
            found = search.find(target, exchanges=flags.exchanges)
        except CannotReach as error:
            missed.append(f"{target}: {error}")
            continue
        found.save(path, comment=f"vp.search, {flags.model} at {size} px, {flags.data}, {flags.threads} thread(s), float32")
        measured = "" if found.measured is None else f", measured {found.measured:.3f}"
        print(f"{target}: predicted {found.share:.3f}{measured}, loss {found.loss:.5f} ({found.fidelity})\n\n{settings_table(model, found)}\n\nsaved: {path}\n")
    if missed:
        raise ValueError("; ".join(missed))


if __name__ == "__main__":
    main(run)
