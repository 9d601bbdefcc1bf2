"""The folder of one run: recipe.yaml, summary.csv, best/ and last/. Each file is whole at any time: written aside, then renamed."""

import csv
import io
import os
from datetime import datetime
from pathlib import Path

from torch import nn

from vit_prune import checkpoint

RESULTS = ("summary.csv", "best", "last")


class RunFolder:
    """Where one run leaves its results. `best` is the checkpoint with the highest top-1, the first of equals.

    Args:
        output: parent folder. experiment: name of the folder.
    Raises: FileExistsError where the folder holds results already.
    """

    def __init__(self, output: str | Path, experiment: str) -> None:
        self.path = Path(output) / experiment
        for name in RESULTS:
            if (self.path / name).exists():
                raise FileExistsError(f"{self.path} holds the results of an earlier run: give another --experiment, or remove it")
        self.path.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict] = []
        self.best: dict | None = None

    def record(self, model: nn.Module, row: dict) -> None:
        """Save what one epoch gave: row holds `epoch`, `eval_top1` and what else the summary shows."""
        self.rows.append(row)
        checkpoint.save(model, self.path / "last")
        if self.best is None or row["eval_top1"] > self.best["eval_top1"]:
            checkpoint.save(model, self.path / "best")
            self.best = row
        write_atomically(self.path / "summary.csv", as_csv(self.rows))


def new_name(model: str, img_size: int) -> str:
    """A name as timm's train script makes it: time, model, pixels."""
    return f"{datetime.now():%Y%m%d-%H%M%S-%f}-{model.replace('/', '_')}-{img_size}"


def as_csv(rows: list[dict]) -> str:
    with io.StringIO(newline="") as text:
        writer = csv.DictWriter(text, fieldnames=rows[0])
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()


def write_atomically(path: str | Path, text: str) -> None:
    """Replace a file in one step: a reader, or a crash, sees the old text or the new one."""
    path = Path(path)
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with open(aside, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
