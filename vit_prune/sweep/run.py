"""Run a sweep: point by point, each written down before the next begins."""

import csv
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from vit_prune.checkpoint import load
from vit_prune.measure.inputs import image_size
from vit_prune.measure.macs import macs
from vit_prune.sweep.bench import Point, SizeBench, first_folder, folders_of, unpruned
from vit_prune.sweep.config import UNPRUNED, SweepConfig, shares_of
from vit_prune.sweep.judge import Labelled
from vit_prune.sweep.same import record
from vit_prune.train.state import as_csv, write_atomically

FILE = "points.csv"
NEEDED = ("method", "target_share", "img_size", "latency_share", "peak_mib", "note")  # columns that a second start reads


def run_sweep(config: SweepConfig) -> list[dict]:
    """The rows of the whole sweep as the file holds them, those of an earlier start among them.

    Raises: ValueError or OSError before the first point for what can be known then.
    """
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    path = Path(config.output) / FILE
    rows = {point_of(row): row for row in read_rows(path)}
    check_folders(config)
    record(config)
    points = [point for point in points_of(config) if not is_finished(rows.get(point), config)]
    with tqdm(total=len(points), unit=" points", file=sys.stderr, disable=None) as bar:
        for point, row in measured(config, points, rows, bar):
            rows[point] = row
            write_atomically(path, as_csv(list(rows.values())))
            bar.update()
    return read_rows(path)


def is_finished(row: Mapping | None, config: SweepConfig) -> bool:
    """A row that was made without latency, or memory, is finished only where none is asked for."""
    wanted = ("latency_share", "peak_mib") if config.memory else ("latency_share",)
    return row is not None and bool(row["note"] or row["method"] == UNPRUNED or not config.latency or all(row[name] for name in wanted))


def check_folders(config: SweepConfig) -> None:
    """Raises: OSError or ValueError for a trained folder that cannot be loaded, or is of other classes or another size than the sweep's."""
    size = None
    for folder in [folder for label in config.trained for folder in folders_of(config, label)]:
        model = load(folder).eval()
        size = size or own_size(config)
        macs(model, size)
        Labelled(model, replace(config, methods={}, model=None)).check(folder, model)


def points_of(config: SweepConfig) -> list[Point]:
    """All that is asked for; sizes vary slowest, since each has a model of its own."""
    found = []
    for size in config.img_size or (None,):
        size = size or own_size(config)
        found += [Point(label, None, size) for label in (UNPRUNED,) if config.methods]
        found += [Point(label, share, size) for label in config.methods for share in shares_of(config, label)]
        found += [Point(label, None, size) for label in config.trained]
    return found


def own_size(config: SweepConfig) -> int:
    model = unpruned(config, None) if config.methods else load(first_folder(config))
    return image_size(model)[0]


def measured(config: SweepConfig, points: list[Point], rows: Mapping[Point, dict], bar: tqdm) -> Iterator[tuple[Point, dict]]:
    """A row for each point; of one that is there, the latency that it lacks. One size after the other: its model and searches serve all of its points."""
    for size in dict.fromkeys(point.img_size for point in points):
        bench = SizeBench(config, size)
        for point in [point for point in points if point.img_size == size]:
            bar.set_description(f"{size} px, {point.method}{'' if point.share is None else f' {point.share:g}'}")
            yield point, bench.row(point) if point not in rows else rows[point] | bench.latency(next(bench.models(point))[1])


def read_rows(path: Path) -> list[dict]:
    """What an earlier start left; numbers stay text."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        if lost := [name for name in NEEDED if name not in (rows.fieldnames or ())]:
            raise ValueError(f"{path} has no column {lost[0]}: it is of another version or was edited; move it away, and its points are made again")
        return list(rows)


def point_of(row: Mapping) -> Point:
    return Point(row["method"], float(row["target_share"]) if row["target_share"] else None, int(row["img_size"]))
