"""One training run, from a TrainConfig to a folder of results."""

import logging
import math
import time
from dataclasses import dataclass, replace

import torch
from timm.utils import random_seed
from torch.utils.data import DataLoader, Dataset

from vit_prune.train import build
from vit_prune.train.config import TrainConfig
from vit_prune.train.data import AUGMENTATION, check_same_classes, create_dataset
from vit_prune.train.engine import Training, TrainingDiverged, evaluate, train_one_epoch
from vit_prune.train.loaders import data_config, eval_loader, train_loader
from vit_prune.train.recipe import save_recipe
from vit_prune.train.state import RunFolder, new_name

log = logging.getLogger(__name__)


@dataclass
class Job:
    """A run that is ready for its first batch."""

    config: TrainConfig  # resolved: what was left to the data and the machine is filled in
    training: Training
    train_loader: DataLoader
    eval_loader: DataLoader


def run(config: TrainConfig) -> dict:
    """Train, evaluate after each epoch, and keep the results.

    Returns: {"folder": path of the run folder, "best": and "last": rows of its summary.csv as dicts}.
    Raises: ValueError or OSError before the first batch for what can be known then; TrainingDiverged, UnreadableImage later.
    """
    job = prepare(config)
    folder = RunFolder(job.config.output, job.config.experiment)
    save_recipe(replace(job.config, experiment=None), folder.path / "recipe.yaml")  # run again, it takes a name of its own
    for epoch in range(job.config.epochs):
        row = run_epoch(job, epoch)
        folder.record(job.training.model, row)
        log.info(describe(row, folder.best, job.config.epochs))
    return {"folder": str(folder.path), "best": folder.best, "last": folder.rows[-1]}


def prepare(config: TrainConfig) -> Job:
    """Build everything. Raises: ValueError or OSError for whatever can be refused before the first batch."""
    train, val = (create_dataset(config.dataset, config.data_dir, split) for split in ("train", "val"))
    check_same_classes(train, val)
    config = resolve(config, train)
    random_seed(config.seed)
    device = torch.device(config.device)
    model = build.create_model(config, config.num_classes).to(device)
    build.check_saveable(model)
    data = data_config(model)
    loader = train_loader(train, config, data, device)
    optimizer = build.create_optimizer(config, model)
    training = Training(
        model=model,
        optimizer=optimizer,
        scheduler=build.create_scheduler(config, optimizer, len(loader)),
        criterion=build.create_loss(config),
        device=device,
        epochs=config.epochs,
        mixup=build.create_mixup(config, config.num_classes),
        clip_grad=config.clip_grad,
        log_interval=config.log_interval,
    )
    config = replace(config, experiment=config.experiment or new_name(config.model, data["input_size"][-1]))
    return Job(config, training, loader, eval_loader(val, batch_size=config.batch_size, workers=config.workers, data=data, device=device))


def resolve(config: TrainConfig, train: Dataset) -> TrainConfig:
    """Fill in what depends on the data set and the machine. Raises: ValueError for a head with fewer outputs than the data has classes."""
    num_classes = len(train.classes)
    if config.num_classes is not None and config.num_classes < num_classes:
        raise ValueError(f"num_classes is {config.num_classes}, the data has {num_classes} classes")
    defaults = {"num_classes": num_classes, "device": str(build.pick_device(None))}
    if not config.no_aug:
        defaults |= AUGMENTATION[config.dataset]._asdict()
    return replace(config, **{name: value for name, value in defaults.items() if getattr(config, name) is None})


def run_epoch(job: Job, epoch: int) -> dict:
    """Train and evaluate once. Raises: TrainingDiverged, also where the last step alone broke the weights."""
    start = time.perf_counter()
    training, config = job.training, job.config
    random_seed((config.seed * 1_000_003 + epoch) % 2**32)  # the order is this epoch's own, whatever was drawn before
    train_keep, eval_keep = build.keeps(config)
    if train_keep is not None:
        build.apply_keep(training.model, train_keep)
    train_metrics = train_one_epoch(training, job.train_loader, epoch)
    if eval_keep is not None:
        build.apply_keep(training.model, eval_keep)
    eval_metrics = evaluate(training.model, job.eval_loader, training.device)
    if not math.isfinite(eval_metrics["loss"]):
        raise TrainingDiverged(eval_metrics["loss"], f"in the evaluation after epoch {epoch + 1}")
    row = {"epoch": epoch + 1, "train_loss": train_metrics["loss"]}
    row |= {f"eval_{name}": value for name, value in eval_metrics.items()}
    return row | {"lr": train_metrics["lr"], "seconds": time.perf_counter() - start}


def describe(row: dict, best: dict, epochs: int) -> str:
    return (
        f"epoch {row['epoch']}/{epochs}: training loss {row['train_loss']:.3f}, top-1 {row['eval_top1']:.2f} %, top-5 {row['eval_top5']:.2f} % "
        f"(best top-1 {best['eval_top1']:.2f} % in epoch {best['epoch']}), {row['seconds']:.1f} s"
    )
