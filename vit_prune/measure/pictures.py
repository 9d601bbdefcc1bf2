"""The results of a run as bars: measured, predicted and highest speedup."""

from collections.abc import Sequence
from pathlib import Path

from vit_prune.measure.setting import Row

BARS = {"speedup": ("measured", "#1f77b4"), "predicted": ("predicted from MACs", "#aec7e8"), "ceiling": ("ceiling", "#d9d9d9")}
HEIGHT = 0.25  # of a bar; a row is 1 high
INCHES_PER_ROW, FEWEST_INCHES = 0.7, 2.5


def draw_speedups(rows: Sequence[Row], path: Path) -> Path | None:
    """A PNG with a group of bars for each row that has a baseline, the interval drawn on the measured one; None where there is no such row."""
    compared = [row for row in rows if row.speedup is not None]
    if not compared:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes a second, and is optional
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, max(FEWEST_INCHES, 1 + INCHES_PER_ROW * len(compared))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, (name, (label, colour)) in enumerate(BARS.items()):
        places = [index + place * HEIGHT for index in range(len(compared))]
        axes.barh(places, [getattr(row, name) or 0 for row in compared], height=HEIGHT, label=label, color=colour)
    lows, highs = ([abs(row.speedup - bound) for row, bound in ((row, getattr(row, end)) for row in compared)] for end in ("speedup_low", "speedup_high"))
    axes.errorbar([row.speedup for row in compared], range(len(compared)), xerr=[lows, highs], fmt="none", ecolor="black", capsize=2)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks([index + HEIGHT for index in range(len(compared))], [f"{row.model}\n{row.setting}" for row in compared], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("speedup against the baseline (1: as fast)")
    axes.legend(fontsize=7)
    unfinished = path.with_name(f".{path.name}.unfinished")
    figure.savefig(unfinished, dpi=120, format="png")
    unfinished.replace(path)
    return path
