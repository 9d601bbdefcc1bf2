"""The frontier of a sweep: quality against MACs, and against time."""

from collections.abc import Mapping, Sequence
from pathlib import Path

AXES = {"macs_share": "MACs, share of the unpruned model's", "latency_share": "time, share of the unpruned model's"}
QUALITY = {"patch_cosine": "loss of the patches' features, 1 - cosine", "top1": "top-1 accuracy, %"}
MARKERS = "osD^v<>pPXh*"


def draw_frontier(rows: Sequence[Mapping], path: Path, title: str) -> Path | None:
    """A PNG with a row of panels per image size, a line per method; None where there is nothing to draw. Rows are those of the CSV, numbers as text."""
    quality = next((name for name in QUALITY if any(filled(row, name) for row in rows)), None)
    axes_shown = [axis for axis in AXES if any(filled(row, axis) for row in rows)]
    sizes = list(dict.fromkeys(row["img_size"] for row in rows))
    if quality is None or not axes_shown:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes a second, and is optional
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 * len(axes_shown), 5 * len(sizes) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(sizes), len(axes_shown), squeeze=False)
    for line, size in zip(panels, sizes, strict=True):
        for panel, axis in zip(line, axes_shown, strict=True):
            draw_panel(panel, [row for row in rows if row["img_size"] == size], axis, quality)
            panel.set_title(f"{size} px", fontsize=10)
    figure.suptitle(title, fontsize=11)
    unfinished = path.with_name(f".{path.name}.unfinished")
    figure.savefig(unfinished, dpi=90, format="png")
    unfinished.replace(path)
    return path


def draw_panel(panel, rows: Sequence[Mapping], axis: str, quality: str) -> None:
    if quality == "patch_cosine":
        rows = [row for row in rows if filled(row, "target_share")]  # the unpruned model itself loses nothing, which no logarithm shows
    for place, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        points = sorted((float(row[axis]), value(row, quality)) for row in rows if row["method"] == method and filled(row, axis) and filled(row, quality))
        if points:
            panel.plot(*zip(*points, strict=True), marker=MARKERS[place % len(MARKERS)], markersize=4, linewidth=1, label=method)
    if quality == "patch_cosine":
        panel.set_yscale("log")
        panel.invert_yaxis()
    panel.set_xlabel(AXES[axis])
    panel.set_ylabel(QUALITY[quality])
    panel.grid(alpha=0.3)
    if panel.lines:
        panel.legend(fontsize=6)


def value(row: Mapping, quality: str) -> float:
    return max(1e-7, 1 - float(row[quality])) if quality == "patch_cosine" else float(row[quality])


def filled(row: Mapping, name: str) -> bool:
    return row.get(name) not in (None, "")
