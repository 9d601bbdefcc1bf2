"""The rows of an evaluation of texts as a table; `train.evaluation.tables` has its parts, and the CSV."""

from collections.abc import Sequence

from vit_prune.measure.environment import environment_text
from vit_prune.train.evaluation.tables import accuracy, energy_notes, mmacs, number, seed_notes, value, with_energy
from vit_prune.train.evaluation.tables import csv_text as csv_of

HEADERS = ("checkpoint", "keep", "top-1 %", "top-5 %", "loss", "MMACs per text", "spread", "saved %")
GATED = ("s", "heads", "spread of heads", "MMACs, all projected")
SEEDS = "top-1 % of each seed"
OF_LENGTHS = "MACs of each text at its own length and with its own heads, padding not counted: mean, and spread over the texts"


def as_text(report: dict) -> str:
    """A line per checkpoint; below it what the numbers depend on."""
    return "\n".join([table(report["results"]), "", *notes(report)])


def table(rows: Sequence[dict]) -> str:
    """With columns for gates, seeds and energy where there are some."""
    headers, lines = HEADERS, [line(row) for row in rows]
    if any(row["heads"] is not None for row in rows):
        headers, lines = headers + GATED, [cells + gates(row) for cells, row in zip(lines, rows, strict=True)]
    if any(len(row["paths"]) > 1 for row in rows):
        headers, lines = (*headers, SEEDS), [(*cells, seeds(row)) for cells, row in zip(lines, rows, strict=True)]
    return with_energy(headers, lines, rows)


def line(row: dict) -> tuple[str, ...]:
    spread = mmacs(row | {"macs": row["macs_spread"]})
    return row["checkpoint"], row["keep"], *accuracy(row), value(row, "loss", 4), mmacs(row), spread, number(row["saved"], 1)


def gates(row: dict) -> tuple[str, ...]:
    if row["heads"] is None:
        return "", "all", "", ""
    return number(row["budget"], 3), number(row["heads"], 2), number(row["heads_spread"], 2), mmacs(row | {"macs": row["macs_all_projected"]})


def seeds(row: dict) -> str:
    return " ".join(f"{top1:.2f}" for top1 in row["top1_seeds"])


def notes(report: dict) -> list[str]:
    """What the numbers depend on, what is left out, and what a spread is."""
    ran_on = report["environment"]
    how = f"{report['device']}, {', '.join(ran_on['dtypes'])}, threads {ran_on['threads']}, batch size {report['batch_size']}"
    lines = [f"{texts(report['texts'], report['source'], report['skipped'], report['skip_label'])}; {how}", OF_LENGTHS]
    return lines + energy_notes(report) + seed_notes(report["results"])


def texts(count: int, source: str, skipped: int, skip_label: str | None) -> str:
    """Which they are."""
    return f"{count:,} text{'' if count == 1 else 's'} of {source}" + (f", {skipped:,} with the label {skip_label} left out" if skipped else "")


def csv_text(report: dict) -> str:
    """A line per row, what the numbers depend on in each."""
    return csv_of(report | {"environment": environment_text(report["environment"]).replace("\n", "; ")})
