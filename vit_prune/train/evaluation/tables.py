"""The layouts of an evaluation as text and CSV. MACs and accuracy stand side by side in each of them.

A report is what `run_evaluation` returns; its results are rows of `vit_prune.train.evaluation.results`.
"""

from collections.abc import Sequence

from vit_prune.measure.report import text_table
from vit_prune.train.state import as_csv

MEGA = 1e6
UNKNOWN = "unknown"
BY_MEAN = "mass and threshold: MACs at the mean M of each block; a batch is padded to its largest M, and costs that"


def as_text(report: dict) -> str:
    """The table of the report's layout, and below it what the numbers depend on."""
    layout = {"schedules": schedules, "training-inference": training_inference, "rules": rules, "query-key-free": query_key_free}[report["table"]]
    return "\n".join([layout(report["results"]), "", *notes(report)])


def schedules(rows: Sequence[dict]) -> str:
    """One line per checkpoint and schedule; heads where some are gated."""
    headers = ("checkpoint", "keep", "top-1 %", "top-5 %", "loss", "MMACs per image", "saved %", "columns")
    lines = [(row["checkpoint"], row["keep"], *accuracy(row), value(row, "loss", 4), *cost(row), number(row["columns"], 1)) for row in rows]
    if all(row["heads"] is None for row in rows):
        return with_energy(headers, lines, rows)
    gated = [("all", "") if row["heads"] is None else (number(row["heads"], 2), mmacs(row | {"macs": row["macs_spread"]})) for row in rows]
    return with_energy((*headers, "heads", "spread of MMACs"), [line + more for line, more in zip(lines, gated, strict=True)], rows)


def training_inference(rows: Sequence[dict]) -> str:
    """Two by two: how the model was trained, how it is evaluated, top-1 (top-5); below them the MACs of each kind of inference."""
    headers = ("top-1 % (top-5 %)", "dense inference (keep 1)", f"pruned inference (keep {rows[1]['keep']})")
    pairs = (rows[:2], rows[2:])
    lines = [(f"trained {pair[0]['trained']}", *map(top1_top5, pair)) for pair in pairs]
    macs = [(f"MMACs per image, trained {pair[0]['trained']}", *map(mmacs, pair)) for pair in pairs]
    if macs[0][1:] == macs[1][1:]:
        macs = [("MMACs per image", *macs[0][1:])]
    return text_table(headers, lines + macs)


def rules(rows: Sequence[dict]) -> str:
    """One line per checkpoint: how its columns are chosen, and how many they are."""
    headers = ("checkpoint", "importance", "rule", "sampling", "dropped", "keep or tau", "columns", "spread", "MMACs per image", "top-1 %", "top-5 %")
    lines = [
        (
            row["checkpoint"],
            *(row[name] for name in ("importance", "rule", "sampling", "dropped")),
            row["keep"] if row["tau"] is None else f"{row['tau']:g}",
            number(row["columns"], 1),
            number(row["columns_spread"], 2),
            mmacs(row),
            *accuracy(row),
        )
        for row in rows
    ]
    return with_energy(headers, lines, rows)


def query_key_free(rows: Sequence[dict]) -> str:
    """One line per checkpoint: what the blocks without queries and keys save, and what they cost."""
    headers = ("checkpoint", "query-key-free blocks", "keep", "MMACs per image", "saved %", "top-1 %", "top-5 %", "top-1 to the first row")
    lines = [(row["checkpoint"], str(row["query_key_free"]), row["keep"], *cost(row), *accuracy(row), f"{row['top1_difference']:+.2f}") for row in rows]
    return with_energy(headers, lines, rows)


def with_energy(headers: Sequence[str], lines: Sequence[tuple], rows: Sequence[dict]) -> str:
    """The table, with two more columns where the energy was metered."""
    if all(row["energy_wh"] is None for row in rows):
        return text_table(headers, lines)
    metered = [(digits(row["energy_wh"]), digits(row["co2_g"])) for row in rows]
    return text_table((*headers, "Wh", "g CO2eq"), [line + more for line, more in zip(lines, metered, strict=True)])


def notes(report: dict) -> list[str]:
    """What the numbers depend on, what is left out, and what a spread is."""
    rows = report["results"]
    dtypes = ", ".join(dict.fromkeys(row["dtype"] for row in rows)) + (f" with autocast to {report['autocast']}" if report["autocast"] else "")
    ranks = f"{report['ranks']} process{'es' if report['ranks'] > 1 else ''}"
    lines = [f"{images(report['images'])} of {report['dataset']} ({report['split']}); {report['device']}, {dtypes}, batch size {report['batch_size']}, {ranks}"]
    if broken := report["broken_images"]:
        lines.append(f"{images(broken)} could not be read and {'is' if broken == 1 else 'are'} left out")
    if report["table"] == "training-inference":
        lines += [f"trained {row['trained']}: {row['checkpoint']}" for row in rows[::2]]
    if any(row["tau"] is not None and row["macs"] is not None for row in rows):
        lines.append(BY_MEAN)
    return lines + energy_notes(report) + seed_notes(rows)


def energy_notes(report: dict) -> list[str]:
    """What metered the energy, where it was metered."""
    meter = report["results"][0]["energy_meter"]
    return [] if meter is None else [f"energy of the whole evaluation of a row, electricity of {report['energy']}; {meter}"]


def seed_notes(rows: Sequence[dict]) -> list[str]:
    """What a spread is, where there are several seeds."""
    seeds = [f"{len(row['paths'])} of {row['checkpoint']}" for row in rows if len(row["paths"]) > 1]
    return [f"mean ± standard deviation over seeds: {', '.join(dict.fromkeys(seeds))}"] if seeds else []


def images(count: int) -> str:
    return f"{count:,} image{'' if count == 1 else 's'}"


def top1_top5(row: dict) -> str:
    return f"{value(row, 'top1', 2)} ({value(row, 'top5', 2)})"


def accuracy(row: dict) -> tuple[str, str]:
    return value(row, "top1", 2), value(row, "top5", 2)


def cost(row: dict) -> tuple[str, str]:
    return mmacs(row), number(row["saved"], 1)


def value(row: dict, name: str, digits: int) -> str:
    """With the standard deviation over the seeds, where there are several."""
    spread = row[f"{name}_std"]
    return f"{row[name]:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")


def mmacs(row: dict) -> str:
    if row["macs"] is None:
        return UNKNOWN
    millions = row["macs"] / MEGA
    return f"{millions:,.1f}" if millions >= 1 else f"{millions:.3g}"


def number(number: float | None, digits: int) -> str:
    return UNKNOWN if number is None else f"{number:.{digits}f}"


def digits(number: float) -> str:
    """Three of them, or all of a whole part with more."""
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


def csv_text(report: dict) -> str:
    """A line per row; what the numbers depend on is repeated in each. Lists are joined with spaces, what is not known is empty."""
    units = "; ".join(f"{name}: {unit}" for name, unit in report["units"].items())
    context = {name: entry for name, entry in report.items() if name not in ("results", "units", "images")}
    return as_csv([{name: cell(entry) for name, entry in (context | row | {"units": units}).items()} for row in report["results"]])


def cell(entry: object) -> object:
    return " ".join(map(str, entry)) if isinstance(entry, list) else entry
