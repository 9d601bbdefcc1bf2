"""TensorBoard: the rows of summary.csv and layers.csv as curves."""

from importlib.util import find_spec
from pathlib import Path

from vit_prune.train.state import History

GROUPS = {"eval": "eval", "raw": "eval", "train": "train"}  # prefix of a column: the group of its curve


def check_tensorboard() -> None:
    """Raises: ValueError where the package is missing."""
    if find_spec("tensorboard") is None:
        raise ValueError("tensorboard needs the package of that name: pip install 'vit_prune[train]'")


class Board:
    """Writes events into FOLDER/tensorboard; into none where the folder is None."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.writer = folder, None

    def __enter__(self) -> "Board":
        if self.folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(self.folder / "tensorboard"))
        return self

    def __exit__(self, *_error: object) -> None:
        if self.writer is not None:
            self.writer.close()

    def add_last(self, history: History) -> None:
        """The last epoch, and its blocks; to add it again changes nothing."""
        if self.writer is None or not history.rows:
            return
        row = history.rows[-1]
        for name, value in row.items():
            if name != "epoch":
                self.writer.add_scalar(f"{GROUPS.get(name.split('_')[0], 'run')}/{name}", value, row["epoch"])
        for layer in history.last_layers:
            for name, value in layer.items():
                if name not in ("epoch", "block") and value is not None:
                    self.writer.add_scalar(f"{name}/block {layer['block']:02d}", value, layer["epoch"])
        self.writer.flush()
