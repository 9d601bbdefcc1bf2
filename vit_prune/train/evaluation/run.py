"""Evaluate checkpoints side by side: from an EvaluateConfig to a report of rows, and to files."""

import json

import torch
from torch import nn
from torch.utils.data import Dataset

from vit_prune.methods.stack import columns_methods
from vit_prune.train.data import broken_count, create_dataset
from vit_prune.train.distributed import is_primary, world_size
from vit_prune.train.evaluation.candidates import check_schedules, check_seeds, load_model
from vit_prune.train.evaluation.config import EvaluateConfig
from vit_prune.train.evaluation.results import UNITS, combine, measure
from vit_prune.train.evaluation.tables import csv_text
from vit_prune.train.loaders import data_config, eval_loader, worker_deaths_explained
from vit_prune.train.state import write_atomically

SPLIT = "val"
PAIR = ("dense", "pruned")  # of the table training-inference: how each checkpoint was trained, and is evaluated

Models = list[list[nn.Module]]  # per checkpoint, per seed


def run_evaluation(config: EvaluateConfig, device: torch.device) -> dict:
    """Every checkpoint at every schedule. Under torchrun, one call in each process with its own device; the first writes the files.

    Returns: what the numbers depend on, "units", and "results": a row per checkpoint and schedule. JSON-able.
    Raises: ValueError or OSError before the first batch for what can be known then.
    """
    check_processes(config.energy)
    dataset = create_dataset(config.dataset, config.data_dir, SPLIT, class_map=config.class_map, skip_broken=config.skip_broken, batch_size=config.batch_size)
    models = load_models(config, tuple(map(str, dataset.classes)))
    with worker_deaths_explained():
        rows = evaluate_all(config, models, dataset, device)
    report = make_report(config, rows, device, broken=broken_count(dataset, device))
    if is_primary():
        write_files(config, report)
    return report


def check_processes(energy: str | None) -> None:
    """Raises: ValueError where the energy of several processes is to be metered: each would count the chips that they share."""
    if energy is not None and world_size() > 1:
        raise ValueError(f"energy is metered in one process, and these are {world_size()}: leave out --energy, or torchrun")


def load_models(config: EvaluateConfig, classes: tuple[str, ...]) -> Models:
    """On the CPU. Raises: ValueError or OSError for the first checkpoint that is broken, of other classes, or that a schedule does not fit."""
    models = []
    for candidate in config.candidates:
        dense = bool(config.eval_keep)
        seeds = [load_model(path, model=config.model, img_size=config.img_size, dense=dense, classes=classes) for path in candidate.paths]
        for path, model in zip(candidate.paths, seeds, strict=True):
            if config.table == "rules" and not columns_methods(model):
                raise ValueError(f"{path} has no Columns, so it has no rule to compare: leave it out of the table rules")
            check_schedules(path, model, config.schedules)
        check_seeds(candidate, seeds)
        models.append(seeds)
    return models


def evaluate_all(config: EvaluateConfig, models: Models, dataset: Dataset, device: torch.device) -> list[dict]:
    """The rows in the order of checkpoints, then schedules. A loader serves as long as the models take the same images."""
    autocast_dtype = None if config.autocast_dtype is None else getattr(torch, config.autocast_dtype)
    rows, data, loader = [], None, None
    for candidate, seeds in zip(config.candidates, models, strict=True):
        measured = []
        for path, model in zip(candidate.paths, seeds, strict=True):
            if data_config(model) != data:
                data = data_config(model)
                loader = eval_loader(dataset, batch_size=config.batch_size, workers=config.workers, data=data, device=device)
            how = {"autocast_dtype": autocast_dtype, "country": config.energy}
            measured.append([measure(path, model, keep, loader, device, **how) for keep in config.schedules])
        rows += [combine(candidate, seeds, of_seeds) for of_seeds in zip(*measured, strict=True)]
    return rows


def make_report(config: EvaluateConfig, rows: list[dict], device: torch.device, *, broken: int) -> dict:
    """The rows with what they depend on."""
    return {
        "table": config.table,
        "model": config.model,
        "dataset": config.dataset,
        "data_dir": config.data_dir,
        "class_map": config.class_map,
        "split": SPLIT,
        "images": rows[0]["images"],
        "broken_images": broken,
        "device": str(device),
        "autocast": config.autocast_dtype,
        "batch_size": config.batch_size,
        "ranks": world_size(),
        "energy": config.energy,
        "units": UNITS,
        "results": add_labels(config.table, rows),
    }


def add_labels(table: str, rows: list[dict]) -> list[dict]:
    """What a layout says of a row besides what was measured."""
    if table == "training-inference":
        labels = [{"trained": trained, "inference": inference} for trained in PAIR for inference in PAIR]
        return [label | row for label, row in zip(labels, rows, strict=True)]
    if table == "query-key-free":
        return [row | {"top1_difference": row["top1"] - rows[0]["top1"]} for row in rows]
    return rows


def write_files(config: EvaluateConfig, report: dict) -> None:
    if config.json is not None:
        write_atomically(config.json, json.dumps(report, indent=2) + "\n")
    if config.csv is not None:
        write_atomically(config.csv, csv_text(report))
