"""`tools/analyze.py gates-text`: as `gates`, for text encoders and the texts of a file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import nn
from torch.utils.data import Dataset

from vit_prune.analysis.gates.base import GatesCommand
from vit_prune.analysis.gates.heads import chosen_stack
from vit_prune.analysis.gates.part import spread
from vit_prune.analysis.gates.report import analyse
from vit_prune.analysis.gates.text_pictures import Sentence, draw_text_maps, sentence
from vit_prune.text.config import check_columns
from vit_prune.text.data.texts import eval_loader
from vit_prune.text.data.tokenizer import need_tokenizers
from vit_prune.text.evaluation.config import check_source
from vit_prune.text.evaluation.models import TextsOf, load_encoder, tokenizer_for
from vit_prune.text.evaluation.record import recorded
from vit_prune.text.evaluation.results import UNITS, cost
from vit_prune.text.evaluation.tables import OF_LENGTHS
from vit_prune.text.evaluation.tables import texts as which_texts
from vit_prune.text.job import read_rows
from vit_prune.train.evaluation.results import MACS


@dataclass(frozen=True)
class GatesText(GatesCommand):
    """Budgets and relevances of the gated heads of a text encoder: by block, class and difficulty, and over the epochs of a run."""

    checkpoint: Path | None = None  # a folder written by vp.save, with a tokenizer.json beside the model (None: best/ of --run)
    run_folder: Annotated[Path | None, tyro.conf.arg(name="run")] = None  # written by tools/train_text.py: adds the epochs of the training
    test_file: str | None = None  # the texts: FILE.csv or FILE.jsonl, with .gz or without
    dataset_dir: str | None = None  # in its place, a Hugging Face data set on this machine, as in tools/train_text.py
    test_split: str | None = None  # of dataset_dir (None: test, or validation where there is none)
    text_columns: tuple[str, ...] = ("text",)  # one column, or two for pairs; numbers, from 1, for a CSV without a header
    label_column: str = "label"  # the class, a name or a whole number
    skip_label: str | None = "-1"  # texts with this label are left out and counted
    text: tuple[str, ...] = ()  # adds the attention maps of every head for this text, or for these two where the data has pairs
    block: int | None = None  # of the attention maps (None: the last)
    batch_size: int = 64
    texts: int | None = None  # at most so many, spread evenly over the data set
    device: str | None = None  # e.g. cpu, cuda, cuda:1 (None: cuda where there is one)
    output: Path = Path("gates")  # a folder, for gates.json and the pictures

    one, many = "text", "texts"
    trainer = "tools/train_text.py"

    def check(self) -> None:
        super().check()
        check_source(self.test_file, self.dataset_dir, self.test_split)
        check_columns(self.text_columns, self.label_column)
        if self.text and len(self.text) != len(self.text_columns):
            raise ValueError(f"--text takes as many texts as --text-columns names columns, {len(self.text_columns)}, got {len(self.text)}")
        need_tokenizers()

    def load(self) -> nn.Module:
        return load_encoder(str(self.source), of_images="tools/analyze.py gates analyses models of images")

    def sample(self, model: nn.Module) -> Sentence:
        """Raises: as `head_maps`, and `tokenizer_for`."""
        chosen_stack(model, self.block)
        return sentence(tokenizer_for(str(self.source), model), self.text, model.max_length)

    def draw_sample(self, model: nn.Module, sample: Sentence, path: Path) -> Path:
        return draw_text_maps(model, sample, path, block=self.block)

    def analyse(self, model: nn.Module, device: torch.device) -> dict:
        """Raises: OSError, ValueError for texts that cannot be read or are not the model's."""
        rows = read_rows(self, self.test_file, self.test_split)
        texts = TextsOf(rows)(str(self.source), model)
        part = spread(texts, self.texts)
        found = analyse_texts(model, part, texts.classes, device, batch_size=self.batch_size)
        return {"source": rows.source, "texts": len(part), "skipped": rows.skipped} | found

    def conditions(self, report: dict) -> str:
        return f"{which_texts(report['texts'], report['source'], report['skipped'], self.skip_label)}; {super().conditions(report)}\n{OF_LENGTHS}"


def analyse_texts(model: nn.Module, texts: Dataset, classes: Sequence[str], device: torch.device, *, batch_size: int) -> dict:
    """As `analyse`, each text at its own length: the MACs as tools/evaluate_text.py gives them, and in "overall" the mean of the tokens."""
    loader = eval_loader(texts, batch_size=batch_size, max_length=model.max_length, workers=0, device=device)
    with recorded(model) as record:
        report = analyse(model, loader, classes, device, macs=lambda _gates, model: cost(model, record))
    units = report["units"] | {name: UNITS[name] for name in (*MACS, "tokens")}
    return report | {"units": units, "overall": report["overall"] | {"tokens": record.summary()["tokens"]}}
