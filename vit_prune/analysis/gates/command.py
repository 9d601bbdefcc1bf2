"""`tools/analyze.py gates`: from its flags to gates.json, pictures and tables."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import timm
import torch
import tyro
from torch import Tensor, nn
from torch.utils.data import Dataset

from vit_prune.analysis.gates.base import GatesCommand
from vit_prune.analysis.gates.heads import chosen_stack
from vit_prune.analysis.gates.part import spread
from vit_prune.analysis.gates.pictures import draw_head_maps
from vit_prune.analysis.gates.report import analyse
from vit_prune.text.encoder import TextTransformer
from vit_prune.train.data import broken_count, create_dataset, read_image
from vit_prune.train.evaluation.tables import images
from vit_prune.train.labels import check_classes, label_names
from vit_prune.train.loaders import data_config, eval_loader, worker_deaths_explained

SPLIT = "val"


@dataclass(frozen=True)
class Gates(GatesCommand):
    """Budgets and relevances of gated heads over a data set: by block, class and difficulty, and over the epochs of a run."""

    checkpoint: Path | None = None  # a folder written by vp.save (None: best/ of --run)
    run_folder: Annotated[Path | None, tyro.conf.arg(name="run")] = None  # written by tools/train.py: adds the epochs of the training
    dataset: str = "folder"  # as in tools/train.py
    data_dir: str | None = None
    class_map: str | None = None  # a file with one class per line: only these classes of a folder, numbered by line
    skip_broken: bool = False  # leave out images that cannot be read, instead of stopping
    image: Path | None = None  # adds the attention maps of every head for this image
    block: int | None = None  # of the attention maps (None: the last)
    batch_size: int = 256
    images: int | None = None  # at most so many, spread evenly over the data set
    workers: int = 4  # processes that load images
    device: str | None = None  # e.g. cpu, cuda, cuda:1 (None: cuda where there is one)
    output: Path = Path("gates")  # a folder, for gates.json and the pictures

    def load(self) -> nn.Module:
        """Raises: ValueError for a text encoder."""
        model = super().load()
        if isinstance(model, TextTransformer):
            raise ValueError(f"{self.source} is a {type(model).__name__}, which takes no images: tools/analyze.py gates-text analyses text encoders")
        return model

    def sample(self, model: nn.Module) -> Tensor:
        """[1, 3, H, W], as the model takes it. Raises: as `head_maps`, and UnreadableImage."""
        chosen_stack(model, self.block)
        return timm.data.create_transform(**data_config(model), is_training=False)(read_image(self.image))[None]

    def draw_sample(self, model: nn.Module, sample: Tensor, path: Path) -> Path:
        return draw_head_maps(model, sample, path, block=self.block)

    def analyse(self, model: nn.Module, device: torch.device) -> dict:
        """Of the evaluation split. Raises: as `open`, and as `collect`."""
        dataset = self.open(model)
        part = spread(dataset, self.images)
        loader = eval_loader(part, batch_size=self.batch_size, workers=self.workers, data=data_config(model), device=device)
        with worker_deaths_explained():
            report = analyse(model, loader, tuple(map(str, dataset.classes)), device)
        return {"broken_images": broken_count(dataset, device)} | report

    def open(self, model: nn.Module) -> Dataset:
        """The data set. Raises: ValueError where its classes are not the model's; OSError."""
        dataset = create_dataset(self.dataset, self.data_dir, SPLIT, class_map=self.class_map, skip_broken=self.skip_broken, batch_size=self.batch_size)
        check_classes(str(self.source), model, tuple(map(str, dataset.classes)), label_names(model))
        return dataset

    def context(self, model: nn.Module, device: torch.device) -> dict:
        found = super().context(model, device)
        return found | {"settings": found["settings"] | {"split": SPLIT}}

    def conditions(self, report: dict) -> str:
        broken = report["broken_images"]
        text = f"{self.dataset} ({SPLIT}); {super().conditions(report)}"
        return text + (f"; left out: {images(broken)} that could not be read" if broken else "")
