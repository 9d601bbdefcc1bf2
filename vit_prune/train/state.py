"""The folder of one run: recipe.yaml, resume.pt, summary.csv, layers.csv, last/, best/, epoch-N/. Each file is whole at any time: written aside, then renamed.

resume.pt is written first and holds everything; the rest is drawn from it. After a kill between the two, `publish` draws it again.
"""

import csv
import errno
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO

import torch
from torch import nn

from vit_prune import checkpoint

RECIPE, RESUME, SUMMARY, LAYERS, LOCK = "recipe.yaml", "resume.pt", "summary.csv", "layers.csv", ".lock"
RESULTS = (RESUME, SUMMARY, "best", "last")


@dataclass
class History:
    """Rows of summary.csv, one per epoch with `epoch` and `eval_top1`, and of layers.csv, one per epoch and block."""

    rows: list[dict] = field(default_factory=list)
    layers: list[dict] = field(default_factory=list)

    @property
    def best(self) -> dict:
        """The row with the highest top-1, the first of equals."""
        return max(self.rows, key=lambda row: row["eval_top1"])

    @property
    def last_layers(self) -> list[dict]:
        """The rows of the last epoch."""
        return [layer for layer in self.layers if layer["epoch"] == self.rows[-1]["epoch"]]


class RunFolder:
    """Where one run leaves its results. `best` is the checkpoint with the highest top-1, the first of equals.

    Args:
        path: the folder. keep_every: epochs between checkpoints that are kept in epoch-N (None: none).
        files: name and text of what lies in the folder and beside each model in it.
    """

    def __init__(self, path: str | Path, *, keep_every: int | None = None, files: Mapping[str, str] | None = None) -> None:
        self.path, self.keep_every, self.files = Path(path), keep_every, files or {}

    def check_free(self) -> None:
        """Raises: FileExistsError where the folder holds results already."""
        for name in RESULTS:
            if (self.path / name).exists():
                raise FileExistsError(f"{self.path} holds the results of an earlier run: give another --experiment, go on with --resume, or remove it")

    def open(self) -> None:
        """Make the folder, and keep others from writing into it until this process ends. What a kill left half written is removed.

        Raises: BlockingIOError where another process trains in it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = lock(self.path / LOCK)
        for path in self.path.rglob(".*.tmp"):
            path.unlink()
        self.write_files(self.path)

    def commit(self, state: dict) -> None:
        """Replace resume.pt. Raises: OSError for a full disk; the old file is whole then."""
        write_state(self.path / RESUME, state)

    def publish(self, model: nn.Module, history: History) -> None:
        """Save the model of the last epoch, and write down what all epochs gave."""
        epoch = history.rows[-1]["epoch"]
        self.save(model, "last")
        if history.best is history.rows[-1]:
            self.save(model, "best")
        if self.keep_every and epoch % self.keep_every == 0:
            self.save(model, f"epoch-{epoch:04d}")
        write_atomically(self.path / SUMMARY, as_csv(history.rows))
        if history.layers:
            write_atomically(self.path / LAYERS, as_csv(history.layers))

    def save(self, model: nn.Module, name: str) -> None:
        checkpoint.save(model, self.path / name)
        self.write_files(self.path / name)

    def write_files(self, folder: Path) -> None:
        for name, text in self.files.items():
            write_atomically(folder / name, text)

    def read(self) -> dict | None:
        """What `commit` wrote, on the CPU; None where no epoch was finished. Raises: ValueError for a broken file."""
        return read_state(self.path / RESUME, f"start anew with --initial-checkpoint {self.path / 'last'}")


def write_state(path: Path, state: dict) -> None:
    """Replace a file of tensors and plain values. Raises: OSError for a full disk; the old file is whole then."""
    with replacing(path) as temporary:
        try:
            torch.save(state, temporary)
        except RuntimeError as error:  # what a full disk is to torch
            raise OSError(f"cannot write {path}: {error}") from error


def read_state(path: Path, advice: str) -> dict | None:
    """What `write_state` wrote, on the CPU; None where there is no file. Raises: ValueError for a broken one, with what else can be done."""
    if not path.exists():
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a broken pickle may raise anything
        reason = f"{path} is not whole ({type(error).__name__}), which a kill alone cannot do: it is renamed only when it is written"
        raise ValueError(f"{reason}. Copy it again, or {advice}") from error


def lock(path: Path) -> IO | None:
    """A file that this process, and no child of it, has locked as long as it is open; a kill ends that too.

    Raises: BlockingIOError where another process holds it.
    """
    if os.name != "posix":
        return None
    import fcntl

    file = open(path, "w")  # noqa: SIM115  (it stays open)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno not in (errno.EACCES, errno.EAGAIN):  # a file system without locks
            return None
        raise BlockingIOError(f"another process trains in {path.parent}: wait for its end, or write into another folder") from None
    return file


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside a file. It takes the file's place at the end of the block, and is removed where the block fails."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        checkpoint.sync(temporary)
        os.replace(temporary, path)
        checkpoint.sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: str | Path, text: str) -> None:
    """Replace a file in one step: a reader, or a crash, sees the old text or the new one."""
    with replacing(Path(path)) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def new_name(model: str, img_size: int) -> str:
    """A name as timm's train script makes it: time, model, pixels."""
    return f"{datetime.now():%Y%m%d-%H%M%S-%f}-{model.replace('/', '_')}-{img_size}"


def as_csv(rows: list[dict]) -> str:
    with io.StringIO(newline="") as text:
        writer = csv.DictWriter(text, fieldnames=dict.fromkeys(name for row in rows for name in row))  # an older version may have begun the run
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()
