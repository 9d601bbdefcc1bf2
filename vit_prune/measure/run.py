"""From a LatencyConfig to results and files: refuse what cannot be measured, then measure setting by setting."""

import importlib.util
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

import torch
from tqdm import tqdm

from vit_prune.measure.accuracy import accuracies
from vit_prune.measure.candidates import Candidate
from vit_prune.measure.compare import SideBySide, closed_form
from vit_prune.measure.config import LatencyConfig
from vit_prune.measure.environment import environment
from vit_prune.measure.memory import Peak
from vit_prune.measure.pictures import draw_speedups
from vit_prune.measure.plan import candidates_of
from vit_prune.measure.setting import Row, Setting
from vit_prune.measure.tables import Results
from vit_prune.train.state import as_csv, write_atomically

log = logging.getLogger(__name__)

OPEN = "there is no CUDA device here; --device cpu measures on the CPU"

Models = dict[int | None, list[Candidate]]


def run_latency(config: LatencyConfig, device: torch.device, save: Callable[[Results], object]) -> Results:
    """Measure the whole grid; `save` is given what there is before the first setting and after each.

    Raises: ValueError, TypeError or OSError, before the first model is timed for what can be known then.
    """
    torch.set_num_threads(config.threads or torch.get_num_threads())
    check_settings(config, device)
    models = {size: candidates_of(config, size) for size in config.img_size or (None,)}
    owed = owed_settings(config, models, device)
    accuracy = accuracies(config, next(iter(models.values())), device)
    results = replace(frame(config, models), owed=owed, accuracy=accuracy)
    save(results)
    with tqdm(total=rounds(config, owed), unit=" rounds", file=sys.stderr, disable=None, leave=False) as bar:
        for setting in [setting for setting in config.settings if setting not in owed]:
            bar.set_description(str(setting))
            results = replace(results, rows=(*results.rows, *measure(config, setting, models, device, bar)))
            save(results)
    return results


def rounds(config: LatencyConfig, owed: dict[Setting, str]) -> int:
    """Of the whole run, warm-up included."""
    return (len(config.settings) - len(owed)) * (config.warmup + config.runs)


def check_settings(config: LatencyConfig, device: torch.device) -> None:
    """Raises: ValueError for the first setting that cannot be had; a table of the paper leaves it open."""
    for setting in config.settings if config.layout == "rows" else ():
        setting.check(device)


def owed_settings(config: LatencyConfig, models: Models, device: torch.device) -> dict[Setting, str]:
    """Why a setting cannot be measured here. Raises: ValueError instead, unless the layout is one of the paper's."""
    if config.is_owed:
        return dict.fromkeys(config.settings, OPEN)
    owed = {}
    for setting in config.settings:
        try:
            setting.check(device)
            if setting.backend != "auto":
                side_by_side(config, setting, models, device).check_served()
        except ValueError as error:
            if config.layout == "rows":
                raise
            owed[setting] = str(error)
    return owed


def side_by_side(config: LatencyConfig, setting: Setting, models: Models, device: torch.device) -> SideBySide:
    """The models of the setting's size, as they are timed."""
    return SideBySide(setting, models[setting.img_size], device, fused=config.fuse, seed=config.seed)


def measure(config: LatencyConfig, setting: Setting, models: Models, device: torch.device, bar: tqdm) -> list[Row]:
    """The rows of one setting; the bar counts rounds. The copies that are timed end with it."""
    threads = torch.get_num_threads()
    compared = side_by_side(config, setting, models, device)
    latency = compared.latency(runs=config.runs, warmup=config.warmup, threads=threads, after_round=bar.update)
    return compared.rows(latency, peaks(compared, threads) if config.memory else {})


def peaks(compared: SideBySide, threads: int) -> dict[str, Peak]:
    """Where a process fails, out of memory say, the times that were measured are not lost with it: the log says why its figures are missing."""
    try:
        return compared.peaks(threads)
    except ChildProcessError as error:
        log.warning("no peak memory for %s: %s", compared.setting, error)
        return {}


def frame(config: LatencyConfig, models: Models) -> Results:
    """What is known before anything is timed."""
    size, candidates = next(iter(models.items()))
    costs = {candidate.label: closed_form(candidate.model, size) for candidate in candidates}
    return Results(
        layout=config.layout,
        labels=tuple(costs),
        settings=config.settings,
        baselines={candidate.label: candidate.baseline for candidate in candidates},
        flops={label: None if cost is None else cost.flops for label, cost in costs.items()},
    )


def new_folder(config: LatencyConfig) -> Path:
    """One per run. Raises: OSError."""
    folder = Path(config.output) / f"{datetime.now():%Y%m%d-%H%M%S-%f}"
    folder.mkdir(parents=True)
    return folder


def write_files(folder: Path, config: LatencyConfig, results: Results, found: dict, text: str) -> None:
    """results.json, results.csv, table.txt, and speedups.png where something was compared; each complete or as it was."""
    report = {
        "environment": found,
        "config": asdict(config),
        "baselines": results.baselines,
        "flops": results.flops,
        "accuracy": {label: {"top1": top1, "top5": top5} for label, (top1, top5) in results.accuracy.items()},
        "owed": {str(setting): reason for setting, reason in results.owed.items()},
        "results": [row.to_dict() for row in results.rows],
    }
    write_atomically(folder / "results.json", json.dumps(report, indent=2) + "\n")
    write_atomically(folder / "table.txt", text + "\n")
    if results.rows:
        write_atomically(folder / "results.csv", as_csv([environment_cells(found) | row.to_dict() for row in results.rows]))
        draw(results.rows, folder / "speedups.png")


def draw(rows: Sequence[Row], path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no picture: matplotlib is not installed (pip install 'vit_prune[analysis]')")
    else:
        draw_speedups(rows, path)


def environment_cells(found: dict) -> dict:
    """The environment on each line of the CSV."""
    versions = {f"{name}_version": version for name, version in found["versions"].items()}
    cells = {name: value for name, value in found.items() if name not in ("versions", "dtypes")}
    return cells | versions | {"warnings": "; ".join(found.get("warnings", ()))}


def environment_of(config: LatencyConfig, device: torch.device) -> dict:
    """The header of a run."""
    return environment(device, threads=config.threads or torch.get_num_threads(), dtypes=config.dtype, onnxruntime="onnxruntime" in config.engine)
