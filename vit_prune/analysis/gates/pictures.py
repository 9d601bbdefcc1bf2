"""The analyses of gates as pictures. Each function writes a PNG, whole or not at all, from the rows of `summaries` and `history`."""

import math
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from vit_prune.analysis.gates.heads import HeadMaps, head_maps, over_patches
from vit_prune.analysis.gates.summaries import THIRDS
from vit_prune.analysis.pictures import denormalised, grid_of, upsample
from vit_prune.train.state import replacing

BUDGET, ENTROPY = "budget s", "entropy of p, nats"
NAMED_CLASSES = 60  # more do not fit beside a heat map
PANELS_PER_ROW, PANEL_INCHES = 6, 2.2
OVERLAY = 0.65  # opacity of an attention map on its image
COLOURS = ("#2ca02c", "#ff7f0e", "#d62728", "#1f77b4", "#7f7f7f")  # easy, medium, hard, right, wrong


def new_figure(width: float, height: float):
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes a second, and is optional
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure, path: Path) -> Path:
    with replacing(path) as unfinished:
        figure.savefig(unfinished, dpi=110, format="png")
    return path


def draw_budget_and_accuracy(epochs: Sequence[dict], path: Path) -> Path:
    """Mean s over the epochs, and the accuracy on an axis of its own."""
    figure = new_figure(6, 3.6)
    axes = figure.add_subplot()
    numbers = [row["epoch"] for row in epochs]
    twin = axes.twinx()
    lines = [
        *axes.plot(numbers, [row["budget"] for row in epochs], "o-", color="C0", markersize=3, label="s, mean over the blocks"),
        *twin.plot(numbers, [row["accuracy"] for row in epochs], "s--", color="C1", markersize=3, label="top-1 accuracy"),
    ]
    axes.set(xlabel="epoch", ylabel=BUDGET)
    axes.xaxis.get_major_locator().set_params(integer=True)
    twin.set_ylabel("top-1 accuracy, %")
    figure.legend(handles=lines, loc="outside upper center", ncols=2, fontsize=8)
    axes.grid(alpha=0.3)
    return save(figure, path)


def draw_entropy_over_epochs(epochs: Sequence[dict], path: Path) -> Path:
    """A line per block."""
    figure = new_figure(6, 3.6)
    axes = figure.add_subplot()
    for place, block in enumerate(epochs[0]["blocks"]):
        axes.plot([row["epoch"] for row in epochs], [row["entropy_per_block"][place] for row in epochs], "o-", markersize=3, label=f"block {block}")
    axes.set(xlabel="epoch", ylabel=ENTROPY)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=7, ncols=2)
    axes.grid(alpha=0.3)
    return save(figure, path)


def draw_blocks(rows: Sequence[dict], path: Path) -> Path:
    """Mean s of each block, and its standard deviation over the inputs."""
    figure = new_figure(max(4, 1.5 + 0.5 * len(rows)), 3.6)
    axes = figure.add_subplot()
    places = range(len(rows))
    axes.bar(places, [row["budget"] for row in rows], yerr=[row["budget_std"] for row in rows], color="C0", capsize=3)
    axes.set_xticks(places, [str(row["block"]) for row in rows])
    axes.set(xlabel="block", ylabel=f"{BUDGET}, mean ± standard deviation", ylim=(0, 1.05))
    return save(figure, path)


def draw_classes(rows: Sequence[dict], path: Path) -> Path:
    """A heat map of mean s: a line per class, a column per block."""
    classes, blocks = (list(dict.fromkeys(row[name] for row in rows)) for name in ("class", "block"))
    grid = [[row["budget"] for row in rows[start : start + len(blocks)]] for start in range(0, len(rows), len(blocks))]
    named = len(classes) <= NAMED_CLASSES
    figure = new_figure(max(4, 3 + 0.5 * len(blocks)), max(2.5, 1 + 0.25 * min(len(classes), NAMED_CLASSES)))
    axes = figure.add_subplot()
    image = axes.imshow(grid, aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(blocks)), [str(block) for block in blocks])
    axes.set_yticks(range(len(classes)) if named else [], classes if named else [], fontsize=8, parse_math=False)
    axes.set(xlabel="block", ylabel="" if named else f"{len(classes)} classes in the order of their numbers")
    figure.colorbar(image, label=f"{BUDGET}, mean")
    return save(figure, path)


def draw_difficulty(rows: Sequence[dict], blocks: Sequence[int], path: Path) -> Path:
    """Mean s of each group with its spread, and block by block for the thirds; groups without inputs are left out."""
    figure = new_figure(8, 3.4)
    bars, lines = figure.subplots(1, 2)
    for place, (row, colour) in enumerate(zip(rows, COLOURS, strict=True)):
        if not row["inputs"]:
            continue
        bars.bar(place, row["budget"], yerr=row["budget_std"], color=colour, capsize=3)
        if row["group"] in THIRDS:
            lines.plot(range(len(blocks)), row["budget_per_block"], "o-", color=colour, markersize=3, label=row["group"])
    known = [row["group"] + (f"\n{row['accuracy']:.1f} %" if row["group"] in THIRDS and row["inputs"] else "") for row in rows]
    bars.set_xticks(range(len(rows)), known, fontsize=8)
    bars.set(ylabel=f"{BUDGET}, mean ± standard deviation", ylim=(0, 1.05), xlabel="third by loss (accuracy); right and wrong")
    lines.set_xticks(range(len(blocks)), [str(block) for block in blocks])
    lines.set(xlabel="block", ylabel=BUDGET)
    lines.legend(fontsize=8)
    return save(figure, path)


def draw_head_maps(model: nn.Module, image: Tensor, path: Path, *, block: int | None = None, grid: tuple[int, int] | None = None) -> Path:
    """Attention of every head over the patches of one image, by falling p, each from 0 to its own largest weight.

    Args: image [1, 3, H, W] as the model takes it; block: its number (None: the last); grid: patches down and across (None: the model's).
    Raises: as `head_maps`.
    """
    maps = head_maps(model, image, block)
    weights, pixels = over_patches(model, maps.weights), denormalised(model, image, None, None)[0]
    size = grid or grid_of(model, weights.shape[1])
    across = min(PANELS_PER_ROW, len(weights) + 1)
    down = math.ceil((len(weights) + 1) / across)
    figure = new_figure(PANEL_INCHES * across, PANEL_INCHES * down)
    first, *panels = figure.subplots(down, across, squeeze=False).flat
    for panel in (first, *panels):
        panel.axis("off")
    draw_panel(first, "image", pixels.numpy())
    for place, (panel, of_head) in enumerate(zip(panels, weights, strict=False)):
        draw_panel(panel, head_title(maps, place), pixels.numpy(), upsample(of_head.view(size), pixels.shape[:2]).numpy())
    return save(figure, path)


def head_title(maps: HeadMaps, place: int) -> str:
    runs = "runs" if maps.runs[place] else "does not run"
    return f"head {int(maps.heads[place])}: p = {maps.relevance[place].item():.3f}, {runs}"


def draw_panel(panel, title: str, pixels, weights=None) -> None:
    """The image, pixels [H, W, 3], and over it the weights [H, W], if any."""
    panel.imshow(pixels)
    if weights is not None:
        panel.imshow(weights, cmap="inferno", vmin=0, alpha=OVERLAY)
    panel.set_title(title, fontsize=7)
