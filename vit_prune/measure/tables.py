"""The results of a run as text: a table per setting, or the paper's layouts. MACs and FLOPs never share a column."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vit_prune.measure.report import GIGA, text_table
from vit_prune.measure.setting import Row, Setting

DASH = "-"
OWED = "owed"
HEADERS = (
    *("model", "median ms", "mean ± std ms", "p10", "p90", "images/s", "speedup", "interval", "predicted", "efficiency", "ceiling"),
    *("GMACs", "GFLOPs", "peak MiB", "of the call"),
)


@dataclass(frozen=True)
class Results:
    """What a run found.

    Args:
        layout: rows, table1, table11 or table12.
        labels: the models, in order. settings: the grid.
        baselines: label -> label of its baseline. flops: label -> 2 x MACs of one image at the first size; None where they are not known.
        rows: what was measured. owed: why a setting was not, by setting.
        accuracy: label -> (top-1, top-5) in percent, of those that were evaluated.
    """

    layout: str
    labels: tuple[str, ...]
    settings: tuple[Setting, ...]
    baselines: dict[str, str | None]
    flops: dict[str, int | None]
    rows: tuple[Row, ...] = ()
    owed: dict[Setting, str] = field(default_factory=dict)
    accuracy: dict[str, tuple[float, float]] = field(default_factory=dict)

    def of(self, setting: Setting) -> list[Row]:
        return [row for row in self.rows if row.setting == setting]


def as_text(results: Results) -> str:
    if results.layout == "rows":
        measured = [setting for setting in results.settings if results.of(setting)]
        return "\n\n".join(f"{title(setting, results.of(setting))}\n{rows_table(results.of(setting))}" for setting in measured)
    return "\n".join([paper_table(results), *notes(results)])


def as_report(results: Results) -> str:
    """The tables, and what speaks against the speedups in them."""
    return "\n".join([as_text(results), *(f"warning: {text}" for text in warnings_of(results.rows))])


def title(setting: Setting, rows: Sequence[Row]) -> str:
    """The setting, with the pixels that the models have where all have the same."""
    sizes = {row.img_size for row in rows}
    return str(setting).replace("own size", " x ".join(map(str, *sizes)) + " px") if len(sizes) == 1 else str(setting)


def rows_table(rows: Sequence[Row]) -> str:
    """One line per model; a dash where a figure is not known, or is the baseline's own."""
    return text_table(HEADERS, [cells(row) for row in rows])


def cells(row: Row) -> tuple[str, ...]:
    return (
        row.model + ("" if row.noise is None else " (noisy)"),
        f"{row.median_ms:.3f}",
        mean_std(row),
        f"{row.p10_ms:.3f}",
        f"{row.p90_ms:.3f}",
        f"{row.throughput:.1f}",
        number(row.speedup, ".3f", "x"),
        DASH if row.speedup_low is None else f"{row.speedup_low:.3f} to {row.speedup_high:.3f}",
        number(row.predicted, ".3f", "x"),
        number(row.efficiency, ".3f"),
        number(row.ceiling, ".3f", "x"),
        giga(row.macs),
        giga(row.flops),
        number(row.peak_mib, ".0f"),
        number(row.above_rest_mib, ".1f"),
    )


def paper_table(results: Results) -> str:
    """One line per model, a column per setting: table1 with accuracies, table12 with mean and standard deviation, the others with medians.

    In parentheses the speedup, the median of the paired ratios against the model's baseline.
    """
    with_accuracy = results.layout == "table1"
    headers = ("model", *(("top-1 %", "top-5 %") if with_accuracy else ()), "GFLOPs (2 x GMACs)", *column_titles(results.settings))
    lines = []
    for label in results.labels:
        found = [next((row for row in results.of(setting) if row.model == label), None) for setting in results.settings]
        top = [f"{value:.2f}" for value in results.accuracy.get(label, ())] or [OWED, OWED]
        lines.append((label, *(top if with_accuracy else ()), giga(results.flops[label]), *(paper_cell(row, results.layout) for row in found)))
    return text_table(headers, lines)


def column_titles(settings: Sequence[Setting]) -> list[str]:
    """The kernel, and what else differs between the columns."""
    differing = [name for name in ("img_size", "batch_size", "dtype", "engine") if len({getattr(setting, name) for setting in settings}) > 1]
    return [", ".join([setting.backend, *(f"{name} {getattr(setting, name)}" for name in differing)]) + " ms" for setting in settings]


def paper_cell(row: Row | None, layout: str) -> str:
    if row is None:
        return OWED
    text = mean_std(row) if layout == "table12" else f"{row.median_ms:.2f}"
    return text if row.speedup is None else f"{text} ({row.speedup:.2f}x)"


def notes(results: Results) -> list[str]:
    """What the cells are, and why some are open."""
    what = "mean ± standard deviation" if results.layout == "table12" else "median"
    lines = ["", f"ms: {what} per call; in parentheses the speedup, median of paired ratios against the model's original; owed: not measured here"]
    lines += [f"measured: {title(setting, results.of(setting))}" for setting in results.settings if results.of(setting)]
    lines += [f"owed: {setting}: {reason}" for setting, reason in results.owed.items()]
    if results.layout == "table1" and len(results.accuracy) < len(results.labels):
        lines.append("owed: accuracy needs --data-dir and --checkpoint NAME=PATH for each model")
    return lines


def warnings_of(rows: Sequence[Row]) -> list[str]:
    """What speaks against the speedups, each reason once."""
    reasons: dict[str, list[Row]] = {}
    for row in rows:
        if row.noise is not None:
            reasons.setdefault(row.noise, []).append(row)
    return [f"{found[0].setting}: {noise}" if len(found) == 1 else f"{len(found)} speedups: {noise}" for noise, found in reasons.items()]


def mean_std(row: Row) -> str:
    return f"{row.mean_ms:.2f}" + ("" if row.std_ms is None else f" ± {row.std_ms:.2f}")


def number(value: float | None, form: str, unit: str = "") -> str:
    return DASH if value is None else f"{value:{form}}{unit}"


def giga(count: int | None) -> str:
    return DASH if count is None else f"{count / GIGA:.3f}"
