"""One training run, from its config to a folder of results."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from timm.utils import random_seed

from vit_prune.measure.memory import peak_memory_mib
from vit_prune.train import build
from vit_prune.train.board import Board
from vit_prune.train.data import broken_count, reset_broken
from vit_prune.train.distributed import is_primary, on_primary, process_group, rank
from vit_prune.train.engine import TrainingDiverged, train_one_epoch
from vit_prune.train.evaluation.accuracy import evaluate
from vit_prune.train.job import Job
from vit_prune.train.job import prepare as prepare_images
from vit_prune.train.keeping import keep_for_evaluation, keep_for_training
from vit_prune.train.loaders import set_epoch, worker_deaths_explained
from vit_prune.train.recipe import save_recipe
from vit_prune.train.resume import capture, find_state, restore, run_path
from vit_prune.train.run_config import RunConfig
from vit_prune.train.state import RECIPE, History, RunFolder
from vit_prune.train.statistics import layer_statistics

log = logging.getLogger(__name__)


def run(config: RunConfig, *, prepare: Callable[..., Job] = prepare_images) -> dict:
    """Train, evaluate after each epoch, and keep the results. Under torchrun, one call in each process.

    Args: prepare: builds the Job of a config and a device; `text.job.prepare_text` that of a TextConfig.
    Returns: {"folder": path of the run folder, "best" and "last": rows of its summary.csv as dicts, "layers": rows of layers.csv of the last
    epoch (in the first process), "seconds": of all epochs}.
    Raises: ValueError or OSError before the first batch for what can be known then; TrainingDiverged, UnreadableImage later.
    """
    with process_group(str(build.pick_device(config.device))) as device:
        if config.resume is None and config.experiment is not None:
            RunFolder(run_path(config)).check_free()
        state = find_state(config)
        job = prepare(config, device, fresh=state is None)
        folder = RunFolder(run_path(job.config), keep_every=config.checkpoint_interval, files=job.files)
        history = begin(job, folder, state)
        with worker_deaths_explained(), Board(folder.path if config.tensorboard and is_primary() else None) as board:
            board.add_last(history)  # a kill may have come before it
            for epoch in range(len(history.rows), job.config.epochs):
                finish_epoch(job, folder, history, *run_epoch(job, epoch))
                board.add_last(history)
    seconds = sum(row["seconds"] for row in history.rows)
    return {"folder": str(folder.path), "best": history.best, "last": history.rows[-1], "layers": history.last_layers, "seconds": seconds}


def begin(job: Job, folder: RunFolder, state: dict | None) -> History:
    """A new folder, or what a run that is resumed had come to. Raises: OSError for a folder that is taken, ValueError for a run that does not fit."""
    history = History() if state is None else restore(state, job)
    keep_for_evaluation(job.evaluated, job.config)
    on_primary(lambda: open_folder(job, folder, history))
    if len(history.rows) >= job.config.epochs:
        log.info(f"the run in {folder.path} is complete: {len(history.rows)} of {job.config.epochs} epochs")
    return history


def open_folder(job: Job, folder: RunFolder, history: History) -> None:
    """In the first process. Raises: FileExistsError for a folder with results of another run, BlockingIOError where another process trains in it."""
    if not history.rows:
        folder.check_free()
    folder.open()
    save_recipe(replace(job.config, experiment=None, resume=None), folder.path / RECIPE)  # run again, it takes a name of its own
    if history.rows:
        folder.publish(job.evaluated, history)  # a kill may have come before it


def run_epoch(job: Job, epoch: int) -> tuple[dict, list[dict]]:
    """Train and evaluate once. Returns: its rows of summary.csv and layers.csv.

    Raises: TrainingDiverged, also where the last step alone broke the weights.
    """
    start, training, config = time.perf_counter(), job.training, job.config
    seed_epoch(config.seed, epoch)
    set_epoch(job.train_loader, epoch)
    keep_for_training(training.model, config, epoch)
    trained = train_one_epoch(training, job.train_loader, epoch)
    judged = judge(job, epoch)
    row = {"epoch": epoch + 1, "train_loss": trained.pop("loss")} | judged | trained
    row |= {"broken_images": count_broken(job), "peak_memory_mib": round(peak_memory_mib(training.device), 1)}
    return row | {"seconds": time.perf_counter() - start}, statistics(job, epoch)


def seed_epoch(seed: int, epoch: int) -> None:
    """What the main process draws (mixup, erasing, dropout, drop path) is this epoch's and this process's own, whatever was drawn before."""
    random_seed(int(np.random.SeedSequence((seed, epoch, rank())).generate_state(1)[0]))


def judge(job: Job, epoch: int) -> dict:
    """Evaluate the model that is saved, and beside an average the weights themselves. Raises: TrainingDiverged; ValueError where no image could be read."""
    keep_for_evaluation(job.evaluated, job.config)
    metrics = evaluate_one(job, job.evaluated)
    if not metrics["images"]:
        raise ValueError("none of the images of the evaluation could be read")
    if not math.isfinite(metrics["loss"]):
        raise TrainingDiverged(metrics["loss"], f"in the evaluation after epoch {epoch + 1}")
    row = {f"eval_{name}": value for name, value in metrics.items()}
    if job.training.ema is None:
        return row
    keep_for_evaluation(job.training.model, job.config)
    return row | {"raw_top1": evaluate_one(job, job.training.model)["top1"]}


def evaluate_one(job: Job, model: torch.nn.Module) -> dict:
    return evaluate(model, job.eval_loader, job.training.device, autocast_dtype=job.training.autocast_dtype)


def count_broken(job: Job) -> int:
    """Images that no process could read in this epoch."""
    broken = sum(broken_count(dataset, job.training.device) for dataset in (job.train_set, job.eval_set))
    for dataset in (job.train_set, job.eval_set):
        reset_broken(dataset)
    return broken


def statistics(job: Job, epoch: int) -> list[dict]:
    """The epoch's rows of layers.csv, over the first batch of the evaluation; in the first process, which writes them."""
    if not is_primary():
        return []
    images, _ = next(iter(job.eval_loader))
    return [{"epoch": epoch + 1} | row for row in layer_statistics(job.evaluated, images.to(job.training.device))]


def finish_epoch(job: Job, folder: RunFolder, history: History, row: dict, layers: list[dict]) -> None:
    """Write down what the epoch gave: first the one file that a run is resumed from, then what people look at."""
    history.rows.append(row)
    history.layers += layers
    on_primary(lambda: write(job, folder, history))
    log.info(describe(history, job.config.epochs))


def write(job: Job, folder: RunFolder, history: History) -> None:
    """In the first process. Raises: OSError for a full disk; what was there before is whole then."""
    folder.commit(capture(job, history))
    folder.publish(job.evaluated, history)


def describe(history: History, epochs: int) -> str:
    row, best = history.rows[-1], history.best
    left = row["seconds"] * (epochs - row["epoch"])
    skipped = f", {row['skipped']} updates skipped" if row["skipped"] else ""
    broken = f", {row['broken_images']} broken images" if row["broken_images"] else ""
    return (
        f"epoch {row['epoch']}/{epochs}: training loss {row['train_loss']:.3f}, top-1 {row['eval_top1']:.2f} %, top-5 {row['eval_top5']:.2f} % "
        f"(best top-1 {best['eval_top1']:.2f} % in epoch {best['epoch']}){skipped}{broken}, {row['images_per_second']:.0f} images/s, "
        f"{row['seconds']:.1f} s, {left / 60:.0f} min left"
    )
