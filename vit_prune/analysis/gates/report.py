"""Everything that a data set says about the gates of a model: rows, tables and pictures, whatever its inputs are."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from vit_prune.analysis.gates import pictures, summaries, tables
from vit_prune.analysis.gates.history import EPOCH_UNITS
from vit_prune.analysis.gates.record import GateRecord, collect


def analyse(
    model: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    classes: Sequence[str],
    device: torch.device,
    *,
    macs: Callable[[GateRecord, nn.Module], dict] | None = None,
) -> dict:
    """{"units", "overall", "by_block", "by_class", "by_difficulty"}; JSON-able. The model ends on the CPU. macs: as `overall`. Raises: as `collect`."""
    record = collect(model.to(device), loader, device)
    return {
        "units": summaries.units(),
        "overall": summaries.overall(record, model.to("cpu"), macs),
        "by_block": summaries.by_block(record),
        "by_class": summaries.by_class(record, classes),
        "by_difficulty": summaries.by_difficulty(record),
    }


def with_epochs(report: dict, epochs: Sequence[dict]) -> dict:
    """The report with the rows of `over_epochs`."""
    return report | {"units_over_epochs": EPOCH_UNITS, "over_epochs": list(epochs)}


def as_text(report: dict) -> str:
    """The tables, one below the other."""
    found = [
        tables.overall_table(report["overall"]),
        tables.block_table(report["by_block"]),
        tables.class_table(report["by_class"]),
        tables.difficulty_table(report["by_difficulty"]),
    ]
    if "over_epochs" in report:
        found.append(tables.epoch_table(report["over_epochs"]))
    return "\n\n".join(found)


def draw(report: dict, folder: Path) -> list[Path]:
    """The pictures of a report."""
    blocks = [row["block"] for row in report["by_block"]]
    drawn = [
        pictures.draw_blocks(report["by_block"], folder / "blocks.png"),
        pictures.draw_classes(report["by_class"], folder / "classes.png"),
        pictures.draw_difficulty(report["by_difficulty"], blocks, folder / "difficulty.png"),
    ]
    if "over_epochs" in report:
        drawn.append(pictures.draw_budget_and_accuracy(report["over_epochs"], folder / "budget_over_epochs.png"))
        drawn.append(pictures.draw_entropy_over_epochs(report["over_epochs"], folder / "entropy_over_epochs.png"))
    return drawn
