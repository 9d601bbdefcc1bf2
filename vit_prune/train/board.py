"""TensorBoard: the rows of summary.csv and layers.csv as curves."""

from pathlib import Path

GROUPS = {"eval": "eval", "raw": "eval", "train": "train"}  # prefix of a column: the group of its curve


class Board:
    """Writes events into FOLDER/tensorboard; into none where the folder is None.

    Raises: ModuleNotFoundError where tensorboard is missing.
    """

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

    def add(self, row: dict, layers: list[dict]) -> None:
        if self.writer is None:
            return
        for name, value in row.items():
            if name != "epoch":
                self.writer.add_scalar(f"{GROUPS.get(name.split('_')[0], 'run')}/{name}", value, row["epoch"])
        for layer in layers:
            for name, value in layer.items():
                if name not in ("epoch", "block") and value is not None:
                    self.writer.add_scalar(f"{name}/block {layer['block']:02d}", value, layer["epoch"])
        self.writer.flush()
