"""What `tools/analyze.py` does: one dataclass of flags per command."""

from dataclasses import dataclass
from pathlib import Path

import timm
import torch

from vit_prune.analysis import noop
from vit_prune.analysis.fidelity import fidelity, fidelity_table
from vit_prune.analysis.merged import draw_merged
from vit_prune.analysis.pictures import draw_kept
from vit_prune.checkpoint import load, load_weights
from vit_prune.measure.report import write_json
from vit_prune.methods.schedules import parse_keep
from vit_prune.methods.tome import ToMe
from vit_prune.patch import patch
from vit_prune.patch.check import check_host
from vit_prune.train.build import build_model
from vit_prune.train.data import Folder
from vit_prune.train.loaders import data_config


@dataclass(frozen=True)
class Fidelity:
    """Mean cosine of the features with those of the unpruned model, by what is kept and what becomes of the dropped."""

    model: str
    checkpoint: Path  # dense weights
    img_size: int = 224
    keep: str = "0.5"
    crops: int = 2  # of each of the eight photographs
    rank: int = 32  # principal directions in which merge looks for the nearest column
    seed: int = 0
    threads: int = 1
    json: Path | None = None

    def run(self) -> None:
        parse_keep(self.keep)
        if self.crops < 1:
            raise ValueError(f"crops must be at least 1, got {self.crops}")
        torch.set_num_threads(self.threads)
        model = build_model(self.model, img_size=self.img_size, num_classes=0).eval()
        check_host(model)
        load_weights(model, self.checkpoint)
        rows = fidelity(model, keep=self.keep, size=self.img_size, crops=self.crops, rank=self.rank, seed=self.seed)
        crops = rows[0].crops_by_half
        print(f"{self.model}, {self.img_size} px, keep {self.keep}, float32, calibrated on one half and evaluated on the other, {crops[0]} + {crops[1]} crops")
        print(fidelity_table(rows))
        if self.json is not None:
            write_json(self.json, {"rows": [row.to_dict() for row in rows]})


@dataclass(frozen=True)
class Noop:
    """Largest difference between a model patched with zero bias and keep = 1 and timm's own, over the largest output."""

    depth: int | None = None  # cut each model to that many blocks
    json: Path | None = None

    def run(self) -> None:
        if self.depth is not None and self.depth < 1:
            raise ValueError(f"depth must be at least 1, got {self.depth}")
        print(f"| model | {' | '.join(noop.OUTPUTS)} | unpatched again |\n| --- | --- | --- | --- | --- |")
        table = {}
        for case in noop.CASES:
            table[case.title] = noop.differences(*noop.build(case, depth=self.depth))
            print(f"| {case.title} | {' | '.join(f'{value:.1e}' for value in table[case.title].values())} |", flush=True)
        if self.json is not None:
            write_json(self.json, table)


@dataclass(frozen=True)
class Kept:
    """Draw which columns each block kept, on your images."""

    checkpoint: Path  # a folder written by vp.save
    images: tuple[Path, ...]
    output: Path = Path("kept.png")
    keep: str | None = None  # another schedule than the saved one

    def run(self) -> None:
        model = load(self.checkpoint, keep=self.keep).eval()
        transform = timm.data.create_transform(**data_config(model), is_training=False)
        batch = torch.stack([transform(Folder.read(str(path))) for path in self.images])
        print(f"drawn: {draw_kept(model, batch, self.output)}")


@dataclass(frozen=True)
class Merged:
    """Draw which patches merged, on your images."""

    model: str  # a name of timm
    images: tuple[Path, ...]
    r: str = "8"  # merges per block: 8, decreasing:8 or one number per block
    checkpoint: Path | None = None  # its weights (None: timm's pretrained ones)
    img_size: int | None = None
    output: Path = Path("merged.png")

    def run(self) -> None:
        merging = ToMe(r=self.r)
        size = {} if self.img_size is None else {"img_size": self.img_size}
        model = build_model(self.model, pretrained=self.checkpoint is None, **size).eval()
        if self.checkpoint is not None:
            load_weights(model, self.checkpoint)
        transform = timm.data.create_transform(**data_config(model), is_training=False)
        batch = torch.stack([transform(Folder.read(str(path))) for path in self.images])
        print(f"drawn: {draw_merged(patch(model, merging), batch, self.output)}")
