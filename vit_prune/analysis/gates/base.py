"""What `tools/analyze.py gates` and `gates-text` have in common: the order of things, the checks of the flags, the files."""

import importlib.util
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor, nn

from vit_prune.analysis.gates.history import over_epochs
from vit_prune.analysis.gates.record import gated_blocks
from vit_prune.analysis.gates.report import as_text, draw, with_epochs
from vit_prune.checkpoint import load
from vit_prune.measure.environment import environment
from vit_prune.measure.report import write_json
from vit_prune.train.build import pick_device
from vit_prune.train.checks import check_device, check_positive, check_ranges
from vit_prune.train.evaluation.results import dtype_of

REPORT, MAPS = "gates.json", "heads.png"


class GatesCommand:
    """A command is a dataclass with the fields checkpoint, run_folder, batch_size, block, device, output and those that `one` and `many` name.

    It says how one input is made ready (`sample`) and drawn (`draw_sample`), and how the data is analysed (`analyse`).
    """

    one, many = "image", "images"  # the fields of an input whose attention maps are drawn, and of how many inputs are taken
    trainer = "tools/train.py"

    def run(self) -> None:
        """What can be refused is refused before the first batch, and nothing is written before the last."""
        self.check()
        epochs = None if self.run_folder is None else over_epochs(self.run_folder)
        model, device = self.load(), pick_device(self.device)
        gated_blocks(model)
        sample = self.sample(model) if getattr(self, self.one) else None
        found = self.analyse(model, device)
        report = self.context(model, device) | found
        report = report if epochs is None else with_epochs(report, epochs)
        self.output.mkdir(parents=True, exist_ok=True)
        drawn = draw(report, self.output)
        if sample is not None:
            drawn.append(self.draw_sample(model, sample, self.output / MAPS))
        write_json(self.output / REPORT, report)
        print(as_text(report))
        print(f"\n{self.conditions(report)}\nwritten: {self.output / REPORT}; drawn: {', '.join(map(str, drawn))}")

    def check(self) -> None:
        """Raises: ValueError, OSError, ModuleNotFoundError for what the flags alone tell."""
        if self.checkpoint is None and self.run_folder is None:
            raise ValueError(f"give --checkpoint, a folder of vp.save, or --run, a folder of {self.trainer} whose best/ is taken")
        check_ranges(self)
        for name in ("batch_size", *((self.many,) if getattr(self, self.many) is not None else ())):
            check_positive(name, getattr(self, name))
        check_device(self.device)
        if self.block is not None and not getattr(self, self.one):
            raise ValueError(f"--block says of which block attention maps are drawn: give --{self.one} too")
        if self.output.exists() and not self.output.is_dir():
            raise NotADirectoryError(f"{self.output} is a file: --output takes a folder")
        if importlib.util.find_spec("matplotlib") is None:
            raise ModuleNotFoundError("the pictures need matplotlib: pip install 'vit_prune[analysis]'")

    @property
    def source(self) -> Path:
        """The checkpoint."""
        return self.run_folder / "best" if self.checkpoint is None else self.checkpoint

    def load(self) -> nn.Module:
        """Of the checkpoint, on the CPU."""
        return load(self.source)

    def sample(self, model: nn.Module) -> object:
        """What `draw_sample` draws; everything about it that can be refused is refused here."""
        raise NotImplementedError

    def draw_sample(self, model: nn.Module, sample: Tensor, path: Path) -> Path:
        raise NotImplementedError

    def analyse(self, model: nn.Module, device: torch.device) -> dict:
        """What `report.analyse` gives, and what is to be known of the data. The model ends on the CPU."""
        raise NotImplementedError

    def context(self, model: nn.Module, device: torch.device) -> dict:
        """What the numbers depend on."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
        ran_on = environment(device, threads=torch.get_num_threads(), dtypes=[dtype_of(model)])
        return {"settings": settings | {"checkpoint": str(self.source)}, "environment": ran_on}

    def conditions(self, report: dict) -> str:
        """The line below the tables."""
        ran_on = report["environment"]
        return f"{ran_on['device']}, {', '.join(ran_on['dtypes'])}, threads {ran_on['threads']}, batch size {self.batch_size}"
