"""One run: train, write down, evaluate, go on after a kill."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from timm.utils import random_seed
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from vit_prune.detection.build import build_detector
from vit_prune.detection.checkpoint import save_detector
from vit_prune.detection.config import DetectorConfig
from vit_prune.detection.data.coco import CocoImages
from vit_prune.detection.evaluate import evaluate
from vit_prune.detection.metrics import truth
from vit_prune.detection.model import MaskRCNN
from vit_prune.detection.train.config import DetectTrainConfig
from vit_prune.detection.train.data import JitteredImages, train_batches
from vit_prune.detection.train.optimizer import create_optimizer, set_rate
from vit_prune.detection.train.state import LAST, read_state, write_rows, write_state
from vit_prune.measure.memory import peak_memory_mib
from vit_prune.methods.base import set_progress
from vit_prune.train.build import pick_device
from vit_prune.train.distributed import from_primary, is_primary, on_primary, process_group, rank, sum_over_ranks, world_size
from vit_prune.train.engine import TrainingDiverged
from vit_prune.train.recipe import plain, save_recipe
from vit_prune.train.state import LOCK, RECIPE, lock
from vit_prune.train.update import Update

log = logging.getLogger(__name__)

LOSSES = ("loss_classifier", "loss_box_reg", "loss_mask", "loss_objectness", "loss_rpn_box_reg")
FIGURES = {f"{kind}_{name}": (kind, name) for kind in ("box", "mask") for name in ("AP", "AP50", "AP75")}
FREE = ("output", "device", "workers", "data_dir", "train_images", "val_images", "eval_interval", "max_skipped_steps")  # may change when a run goes on


@dataclass
class Job:
    """A run that is ready for its next iteration."""

    config: DetectTrainConfig
    model: MaskRCNN
    wrapped: nn.Module
    update: Update
    device: torch.device
    images: JitteredImages
    judged: CocoImages
    rows: list[dict]
    iteration: int = 0
    skipped: int = 0  # updates in a row that were left out

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return None if self.config.amp is None else getattr(torch, self.config.amp)


def run(config: DetectTrainConfig) -> dict:
    """Train and evaluate; under torchrun, one call in each process. A run that the output folder holds goes on.

    Returns: the last row of metrics.csv. Raises: ValueError or OSError before the first batch for what can be known then; TrainingDiverged.
    """
    folder = Path(config.output)
    with process_group(str(pick_device(config.device))) as device, held(folder):
        job = prepare(config, device, read_state(folder))
        on_primary(lambda: save_recipe(job.config, folder / RECIPE))
        if job.rows:
            on_primary(lambda: publish(job, folder))  # a kill may have come before it
        with iteration_bar(job) as bar:
            for _ in train(job, bar):
                on_primary(lambda: write(job, folder))
        return job.rows[-1]


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make the folder, and keep others from writing into it for the length of a with-block. Raises: BlockingIOError in every process."""
    locks = []

    def take() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        locks.append(lock(folder / LOCK))

    on_primary(take)
    try:
        yield
    finally:
        for file in filter(None, locks):
            file.close()


def prepare(config: DetectTrainConfig, device: torch.device, state: dict | None) -> Job:
    """Build everything, new or as it was. Raises: ValueError or OSError for whatever can be refused before the first batch."""
    images, judged = (CocoImages(config.place(split, "annotations"), config.place(split, "images")) for split in ("train", "val"))
    for data in (images, judged):
        data.check_files()
    truth(judged, "segm")  # which reads every mask that will be judged
    config = resolved(config, images, judged)
    if state is not None:
        check_same(config, state, len(images))
    random_seed(config.seed)
    fresh = {"pretrained": config.pretrained, "checkpoint": config.initial_checkpoint} if state is None else {}
    model = build_detector(detector_of(config), **fresh).to(device)
    model.backbone.net.vit.set_grad_checkpointing(config.grad_checkpointing)
    update = Update(create_optimizer(model, config), clip_grad=config.clip_grad, scaler=GradScaler(device.type, enabled=config.amp == "float16"))
    wrapped = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None) if world_size() > 1 else model
    job = Job(config, model, wrapped, update, device, JitteredImages(images, config), judged, rows=[])
    if state is not None:
        restore(job, state)
    return job


def resolved(config: DetectTrainConfig, images: CocoImages, judged: CocoImages) -> DetectTrainConfig:
    """With the data's number of classes. Raises: ValueError for other categories in the two files, or too many for the model."""
    if images.categories != judged.categories:
        raise ValueError(f"{images.path} and {judged.path} have other categories")
    count = len(images.categories.ids)
    if config.num_classes not in (0, count):
        raise ValueError(f"num_classes is {config.num_classes}, the data has {count} categories")
    return replace(config, num_classes=count)


def detector_of(config: DetectTrainConfig) -> DetectorConfig:
    return DetectorConfig(**{item.name: getattr(config, item.name) for item in fields(DetectorConfig)})


def check_same(config: DetectTrainConfig, state: dict, images: int) -> None:
    """Raises: ValueError for a setting, or data, that the run did not begin with."""
    now = plain(config)
    changed = [name for name in now if name not in FREE and state["config"].get(name) != now[name]]
    if changed:
        name = changed[0]
        raise ValueError(f"{config.output} holds a run with {name} {state['config'].get(name)!r}, not {now[name]!r}: give another --output")
    if state["images"] != images:
        raise ValueError(f"the run began with {state['images']} images, now there are {images}: give another --output")
    if state["world_size"] != world_size():
        raise ValueError(f"the run began with {state['world_size']} processes, now there are {world_size()}: the batches would be others")


def restore(job: Job, state: dict) -> None:
    job.model.load_state_dict(state["model"])
    job.update.optimizer.load_state_dict(state["optimizer"])
    if state["scaler"]:
        job.update.scaler.load_state_dict(state["scaler"])
    job.rows, job.iteration, job.skipped = state["rows"], state["iteration"], state["skipped"]


def iteration_bar(job: Job) -> tqdm:
    """Iterations done, iterations per second, time left; silent where stderr is no terminal, and in all processes but the first."""
    shown = None if is_primary() else True
    return tqdm(desc="training", total=job.config.iterations, initial=job.iteration, unit=" iterations", file=sys.stderr, disable=shown)


def train(job: Job, bar: tqdm) -> Iterator[None]:
    """Stops whenever it is time to write down what there is. Weights are written before they are judged, which may fail."""
    config, meter = job.config, Meter(job.device)
    yield from judged_when_due(job)  # a kill may have come before it
    batches = iter(train_batches(job.images, config, job.iteration))
    while job.iteration < config.iterations:
        job.model.train()
        set_progress(job.model, (job.iteration + rank() / world_size()) / config.iterations)
        meter.add(*step(job, *next(batches)))
        job.iteration += 1
        bar.update()
        if job.iteration % config.checkpoint_interval == 0 or job.iteration == config.iterations:
            job.rows.append({"iteration": job.iteration} | meter.row() | dict.fromkeys(FIGURES) | {"judged": False})
            meter = Meter(job.device)
            yield
            yield from judged_when_due(job)


def step(job: Job, images: tuple[Tensor, ...], targets: tuple[dict, ...]) -> tuple[dict[str, Tensor], float, int]:
    """One update. Returns: the losses (none where the update was left out), the rate, and objects that lost their area. Raises: TrainingDiverged."""
    config = job.config
    random_seed(int(np.random.SeedSequence((config.seed, job.iteration, rank())).generate_state(1)[0]))
    lr = set_rate(job.update.optimizer, config, job.iteration)
    dropped = sum(int(target["dropped"]) for target in targets)
    on_device = [{name: value.to(job.device) for name, value in target.items() if name != "dropped"} for target in targets]
    with torch.autocast(job.device.type, job.autocast_dtype, enabled=job.autocast_dtype is not None):
        losses = job.wrapped([image.to(job.device) for image in images], on_device)
    total = sum(losses.values())
    job.update.backward(total)
    moved = job.update.step()
    job.skipped = 0 if moved else job.skipped + 1
    if job.skipped >= config.max_skipped_steps:
        raise TrainingDiverged(total.item(), f"in iteration {job.iteration + 1}, the last of {job.skipped} in a row without a finite gradient")
    return {name: loss.detach() for name, loss in losses.items()} if moved else {}, lr, dropped


class Meter:
    """Means of the losses since the last row, of the updates that were made."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.start = device, time.perf_counter()
        self.sums, self.steps, self.updates, self.lr, self.dropped = dict.fromkeys(LOSSES, torch.zeros((), device=device)), 0, 0, 0.0, 0

    def add(self, losses: dict[str, Tensor], lr: float, dropped: int) -> None:
        self.sums = {name: total + losses[name] if losses else total for name, total in self.sums.items()}
        self.steps, self.updates, self.lr, self.dropped = self.steps + 1, self.updates + bool(losses), lr, self.dropped + dropped

    def row(self) -> dict:
        """Of all processes."""
        means = sum_over_ranks(torch.stack([*self.sums.values()]).double()) / max(1, self.updates) / world_size()
        dropped = int(sum_over_ranks(torch.tensor(self.dropped, device=self.device)))
        seconds = (time.perf_counter() - self.start) / self.steps
        memory = round(peak_memory_mib(self.device), 1)
        losses = dict(zip(self.sums, means.tolist(), strict=True))
        return {**losses, "lr": self.lr, "skipped": self.steps - self.updates, "dropped": dropped, "seconds": seconds, "peak_memory_mib": memory}


def judged_when_due(job: Job) -> Iterator[None]:
    """Put average precision into the last row where it is time for it, and stop to have it written."""
    due = job.iteration == job.config.iterations or (job.config.eval_interval and job.iteration % job.config.eval_interval == 0)
    if job.rows and due and not job.rows[-1]["judged"]:
        job.rows[-1] |= judge(job) | {"judged": True}
        yield


def judge(job: Job) -> dict:
    """AP of boxes and masks, the same in every process."""
    settings = {"workers": job.config.workers, "autocast_dtype": job.autocast_dtype}
    metrics = from_primary(evaluate(job.model, job.judged, job.config.image_size, job.device, **settings))
    return {figure: metrics[kind][name] for figure, (kind, name) in FIGURES.items()}


def write(job: Job, folder: Path) -> None:
    """First what a run goes on from, then what people look at. Raises: OSError for a full disk."""
    state = {
        "config": plain(job.config),
        "world_size": world_size(),
        "images": len(job.images.data),
        "model": job.model.state_dict(),
        "optimizer": job.update.optimizer.state_dict(),
        "scaler": job.update.scaler.state_dict(),
        "rows": job.rows,
        "iteration": job.iteration,
        "skipped": job.skipped,
    }
    write_state(folder, state)
    publish(job, folder)
    log.info(describe(job.rows[-1], job.config.iterations))


def publish(job: Job, folder: Path) -> None:
    """The detector and the table."""
    save_detector(job.model, detector_of(job.config), job.judged.categories, folder / LAST)
    write_rows(folder, job.rows)


def describe(row: dict, iterations: int) -> str:
    losses = ", ".join(f"{name[5:]} {value:.3f}" for name, value in row.items() if name.startswith("loss_"))
    found = [f"{kind} AP {row[f'{kind}_AP']:.1f}, AP50 {row[f'{kind}_AP50']:.1f}" for kind in ("box", "mask") if row[f"{kind}_AP"] is not None]
    left = (iterations - row["iteration"]) * row["seconds"] / 60
    return "; ".join((f"iteration {row['iteration']}/{iterations}: {losses}", *found, f"{row['seconds']:.2f} s each, {left:.0f} min left"))
