"""The frontier of a sweep: quality against MACs, and against time."""

from collections.abc import Mapping, Sequence
from pathlib import Path

AXES = {"macs_share": "MACs, share of the unpruned model's", "latency_share": "time, share of the unpruned model's"}
QUALITY = {"patch_cosine": "loss of the patches' features, 1 - cosine", "top1": "top-1 accuracy, %"}
MARKERS = "osD^v<>pPXh*"
LEGEND_COLUMNS = 4
LEGEND = {"loc": "outside lower center", "ncols": LEGEND_COLUMNS, "fontsize": 8}


def draw_frontier(rows: Sequence[Mapping], path: Path, title: str) -> Path | None:
    """A PNG with a row of panels per image size, a line per method; None where there is nothing to draw. Rows are those of the CSV, numbers as text."""
    quality = next((name for name in QUALITY if any(filled(row, name) for row in rows)), None)
    axes_shown = [axis for axis in AXES if any(filled(row, axis) for row in rows)]
    sizes = list(dict.fromkeys(row["img_size"] for row in rows))
    if quality is None or not axes_shown:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes a second, and is optional
    from matplotlib.figure import Figure

    methods = list(dict.fromkeys(row["method"] for row in rows if filled(row, quality)))
    figure = Figure(figsize=(7 * len(axes_shown), 5 * len(sizes) + 0.5 + 0.2 * len(methods) / LEGEND_COLUMNS), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(sizes), len(axes_shown), squeeze=False)
    for line, size in zip(panels, sizes, strict=True):
        for panel, axis in zip(line, axes_shown, strict=True):
            draw_panel(panel, [row for row in rows if row["img_size"] == size], methods, axis, quality)
            panel.set_title(f"{size} px", fontsize=10)
    lines = {line.get_label(): line for panel in panels.flat for line in panel.lines}
    figure.legend([lines[method] for method in methods if method in lines], [method for method in methods if method in lines], **LEGEND)
    figure.suptitle(title, fontsize=11)
    unfinished = path.with_name(f".{path.name}.unfinished")
    figure.savefig(unfinished, dpi=90, format="png")
    unfinished.replace(path)
    return path


def draw_panel(panel, rows: Sequence[Mapping], methods: Sequence[str], axis: str, quality: str) -> None:
    """A line for each of the methods that has points; its colour and marker are its place among them all, the same in every panel."""
    if quality == "patch_cosine":
        rows = [row for row in rows if filled(row, "target_share")]  # the unpruned model itself loses nothing, which no logarithm shows
    for place, method in enumerate(methods):
        points = sorted((float(row[axis]), value(row, quality)) for row in rows if row["method"] == method and filled(row, axis) and filled(row, quality))
        if points:
            style = {"marker": MARKERS[place % len(MARKERS)], "color": f"C{place % 10}", "markersize": 4, "linewidth": 1}
            panel.plot(*zip(*points, strict=True), label=method, **style)
    if quality == "patch_cosine":
        panel.set_yscale("log")
        panel.invert_yaxis()
    panel.set_xlabel(AXES[axis])
    panel.set_ylabel(QUALITY[quality])
    panel.grid(alpha=0.3)


def value(row: Mapping, quality: str) -> float:
    return max(1e-7, 1 - float(row[quality])) if quality == "patch_cosine" else float(row[quality])


def filled(row: Mapping, name: str) -> bool:
    return row.get(name) not in (None, "")
