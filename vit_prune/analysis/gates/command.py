"""`tools/analyze.py gates`: from its flags to gates.json, pictures and tables."""

import importlib.util
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import timm
import torch
import tyro
from torch import Tensor, nn
from torch.utils.data import Dataset

from vit_prune.analysis.gates.heads import chosen_stack
from vit_prune.analysis.gates.history import over_epochs
from vit_prune.analysis.gates.part import spread
from vit_prune.analysis.gates.pictures import draw_head_maps
from vit_prune.analysis.gates.record import gated_blocks
from vit_prune.analysis.gates.report import analyse, as_text, draw, with_epochs
from vit_prune.checkpoint import load
from vit_prune.measure.environment import environment
from vit_prune.measure.report import write_json
from vit_prune.train.build import pick_device
from vit_prune.train.checks import check_device, check_positive, check_ranges
from vit_prune.train.data import broken_count, create_dataset, read_image
from vit_prune.train.evaluation.results import dtype_of
from vit_prune.train.evaluation.tables import images
from vit_prune.train.labels import check_classes, label_names
from vit_prune.train.loaders import data_config, eval_loader, worker_deaths_explained

SPLIT, REPORT, MAPS = "val", "gates.json", "heads.png"


@dataclass(frozen=True)
class Gates:
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

    def run(self) -> None:
        """What can be refused is refused before the first batch, and nothing is written before the last."""
        self.check()
        epochs = None if self.run_folder is None else over_epochs(self.run_folder)
        model, device = load(self.source), pick_device(self.device)
        gated_blocks(model)
        image = None if self.image is None else self.sample(model)
        dataset = self.open(model)
        part = spread(dataset, self.images)
        loader = eval_loader(part, batch_size=self.batch_size, workers=self.workers, data=data_config(model), device=device)
        with worker_deaths_explained():
            report = analyse(model, loader, tuple(map(str, dataset.classes)), device)
        report = self.context(model, device) | {"broken_images": broken_count(dataset, device)} | report
        report = report if epochs is None else with_epochs(report, epochs)
        self.output.mkdir(parents=True, exist_ok=True)
        drawn = draw(report, self.output)
        if image is not None:
            drawn.append(draw_head_maps(model, image, self.output / MAPS, block=self.block))
        write_json(self.output / REPORT, report)
        print(as_text(report))
        print(f"\n{self.conditions(report)}\nwritten: {self.output / REPORT}; drawn: {', '.join(map(str, drawn))}")

    def check(self) -> None:
        """Raises: ValueError, OSError, ModuleNotFoundError for what the flags alone tell."""
        if self.checkpoint is None and self.run_folder is None:
            raise ValueError("give --checkpoint, a folder of vp.save, or --run, a folder of tools/train.py whose best/ is taken")
        check_ranges(self)
        for name in ("batch_size", *(("images",) if self.images is not None else ())):
            check_positive(name, getattr(self, name))
        check_device(self.device)
        if self.block is not None and self.image is None:
            raise ValueError("--block says of which block attention maps are drawn: give --image too")
        if self.output.exists() and not self.output.is_dir():
            raise NotADirectoryError(f"{self.output} is a file: --output takes a folder")
        if importlib.util.find_spec("matplotlib") is None:
            raise ModuleNotFoundError("the pictures need matplotlib: pip install 'vit_prune[analysis]'")

    @property
    def source(self) -> Path:
        """The checkpoint."""
        return self.run_folder / "best" if self.checkpoint is None else self.checkpoint

    def sample(self, model: nn.Module) -> Tensor:
        """[1, 3, H, W], as the model takes it. Raises: as `head_maps`, and UnreadableImage."""
        chosen_stack(model, self.block)
        return timm.data.create_transform(**data_config(model), is_training=False)(read_image(self.image))[None]

    def open(self, model: nn.Module) -> Dataset:
        """The data set. Raises: ValueError where its classes are not the model's; OSError."""
        dataset = create_dataset(self.dataset, self.data_dir, SPLIT, class_map=self.class_map, skip_broken=self.skip_broken, batch_size=self.batch_size)
        check_classes(str(self.source), model, tuple(map(str, dataset.classes)), label_names(model))
        return dataset

    def context(self, model: nn.Module, device: torch.device) -> dict:
        """What the numbers depend on."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
        ran_on = environment(device, threads=torch.get_num_threads(), dtypes=[dtype_of(model)])
        return {"settings": settings | {"checkpoint": str(self.source), "split": SPLIT}, "environment": ran_on}

    def conditions(self, report: dict) -> str:
        ran_on, broken = report["environment"], report["broken_images"]
        text = f"{self.dataset} ({SPLIT}); {ran_on['device']}, {', '.join(ran_on['dtypes'])}, threads {ran_on['threads']}, batch size {self.batch_size}"
        return text + (f"; left out: {images(broken)} that could not be read" if broken else "")
