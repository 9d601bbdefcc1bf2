"""The gates over the epochs of a training, from the summary.csv and the layers.csv of its run folder."""

import csv
import statistics
from pathlib import Path

from vit_prune.train.state import LAYERS, SUMMARY

OF_BLOCKS = ("budget", "budget_std", "entropy", "heads")  # columns of layers.csv
EPOCH_UNITS = {
    "accuracy": "percent, top-1 of the evaluation after the epoch",
    "budget": "s, mean over the blocks; this and all below over the first batch of the evaluation",
    "budget_std": "standard deviation of s over the inputs, mean over the blocks",
    "heads": "k, heads that run, mean over the blocks",
    "entropy": "of p in nats, mean over the blocks",
    "budget_per_block, entropy_per_block": "of each of `blocks`",
}


def over_epochs(run: Path) -> list[dict]:
    """A row per epoch. Raises: FileNotFoundError where the folder is not one of a run; ValueError for a run without gates, or a broken file."""
    if not run.is_dir():
        raise FileNotFoundError(f"no folder {run}")
    accuracies = {row["epoch"]: row.get("eval_top1") for row in read(run / SUMMARY)}
    epochs: dict[str, list[dict]] = {}
    for row in read(run / LAYERS):
        if row.get("budget"):
            epochs.setdefault(row["epoch"], []).append(row)
    if not epochs:
        raise ValueError(f"the model of {run} has no gates: its {LAYERS} tells of no budget")
    try:
        rows = [epoch_row(epoch, accuracies[epoch], layers) for epoch, layers in epochs.items() if epoch in accuracies]
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"{run / SUMMARY} or {run / LAYERS} is no table of a training: {error}") from error
    if not rows:
        raise ValueError(f"{run / SUMMARY} and {run / LAYERS} have no epoch in common")
    return rows


def read(path: Path) -> list[dict]:
    """The rows of a CSV, as text, one or more. Raises: FileNotFoundError; ValueError where it is another table."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: a folder that tools/train.py or tools/train_text.py has written holds it")
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or "epoch" not in rows[0]:
        raise ValueError(f"{path} holds no epochs")
    return rows


def epoch_row(epoch: str, accuracy: str, layers: list[dict]) -> dict:
    """layers: the rows of the gated blocks."""
    values = {name: [float(layer[name]) for layer in layers] for name in OF_BLOCKS}
    return {
        "epoch": int(epoch),
        "accuracy": float(accuracy),
        **{name: statistics.fmean(of_blocks) for name, of_blocks in values.items()},
        "blocks": [int(layer["block"]) for layer in layers],
        "budget_per_block": values["budget"],
        "entropy_per_block": values["entropy"],
    }
