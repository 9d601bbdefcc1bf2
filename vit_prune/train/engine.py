"""One epoch of training.  images [B, 3, height, width], targets [B] classes, or [B, classes] after mixup."""

import math
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice

import torch
from timm.data import Mixup
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from vit_prune.methods.base import set_progress
from vit_prune.methods.losses import losses
from vit_prune.train.distributed import rank, sum_over_ranks, world_size
from vit_prune.train.losses import Loss
from vit_prune.train.progress import progress_bar
from vit_prune.train.update import Update


class TrainingDiverged(RuntimeError):
    """The loss is no number any more; nothing of that epoch is saved."""

    def __init__(self, loss: float, where: str) -> None:
        super().__init__(loss, where)  # from which it is built again in another process

    def __str__(self) -> str:
        return "training diverged: the loss is {} {}; try a lower --lr, or --clip-grad 1".format(*self.args)


@dataclass
class Training:
    """What one run trains with."""

    model: nn.Module
    wrapped: nn.Module  # the model inside DDP and torch.compile, or the model itself
    optimizer: Optimizer
    scheduler: Scheduler
    loss: Loss
    device: torch.device
    epochs: int
    update: Update
    updates_per_epoch: int
    mixup: Mixup | None = None
    ema: ModelEmaV3 | None = None
    accumulate: int = 1  # batches per update
    autocast_dtype: torch.dtype | None = None
    max_skipped_steps: int = 20
    log_interval: int = 50
    updates_made: int = 0
    skipped_in_a_row: int = 0

    def autocast(self) -> object:
        return nullcontext() if self.autocast_dtype is None else torch.autocast(self.device.type, self.autocast_dtype)


def train_one_epoch(training: Training, loader: DataLoader, epoch: int) -> dict[str, float]:
    """Returns: {"loss": mean over updates and processes, "lr": of the last update, "skipped": updates without a finite gradient,
    "images_per_second": of all processes}.

    Raises: TrainingDiverged where too many updates in a row had to be left out.
    """
    training.model.train()
    batches, meter, start = len(loader), Meter(training, epoch), time.perf_counter()
    updates = training.updates_per_epoch
    with progress_bar(f"epoch {epoch + 1}/{training.epochs}", loader) as bar:
        for number, group in enumerate(groups(loader, batches, training.accumulate)):
            done = epoch * updates + number
            meter.add(*train_step(training, group, done))
            lr = max(parameters["lr"] for parameters in training.optimizer.param_groups)
            training.scheduler.step_update(done + 1)
            bar.update(meter.images - bar.n)
            if (number + 1) % training.log_interval == 0:
                bar.set_postfix(loss=f"{meter.mean():.3f}")
    training.scheduler.step(epoch + 1)
    speed = meter.images / (time.perf_counter() - start)
    return {"loss": meter.mean_over_ranks(), "lr": lr, "skipped": meter.skipped, "images_per_second": speed}


def groups(loader: Iterable, batches: int, size: int) -> Iterable[tuple[Iterable, int]]:
    """(the batches of one update, how many they are), without holding more than one at a time. The last update of an epoch may have fewer."""
    stream = islice(loader, batches)
    for start in range(0, batches, size):
        here = min(size, batches - start)
        yield islice(stream, here), here


def train_step(training: Training, group: tuple[Iterable, int], number: int) -> tuple[float, bool, int]:
    """One update of the weights from the batches of a group. Returns: (loss, whether the weights moved, images of this process).

    Raises: ValueError for a loader that ends early: the processes would sum gradients of unlike batches.
    """
    batches, count = group
    total, images_seen, index = torch.zeros((), device=training.device), 0, -1
    for index, (images, targets) in enumerate(batches):
        set_progress(training.model, share_done(training, number + index / count))
        with synchronised(training.wrapped, index == count - 1):
            loss = forward_loss(training, images, targets) / count
            training.update.backward(loss)
        total += loss.detach()
        images_seen += len(images)
    if index < count - 1:
        raise ValueError("the data set ended before its epoch did: it holds fewer images than it says (a stream's _info.json or dataset_info)")
    moved = training.update.step()
    training.updates_made += moved
    if moved and training.ema is not None:
        training.ema.update(training.model, step=training.updates_made)
    return total.item(), moved, images_seen


def share_done(training: Training, updates: float) -> float:
    """Of the whole training, in [0, 1]. The processes follow each other within a batch, so that each draws random columns of its own."""
    place = rank() / (world_size() * training.accumulate)
    return min(1.0, (updates + place) / (training.epochs * training.updates_per_epoch))


def forward_loss(training: Training, images: Tensor, targets: Tensor) -> Tensor:
    images, targets = images.to(training.device, non_blocking=True), targets.to(training.device, non_blocking=True)
    if training.mixup is not None:
        images, targets = training.mixup(images, targets)
    with training.autocast(), losses(training.wrapped) as aux:
        loss = training.loss(training.wrapped(images), targets, images)
    return loss + aux.total()


def synchronised(wrapped: nn.Module, last: bool) -> object:
    """Gradients are summed over the processes once per update, at its last batch."""
    inner = getattr(wrapped, "_orig_mod", wrapped)
    return inner.no_sync() if isinstance(inner, DistributedDataParallel) and not last else nullcontext()


class Meter:
    """What an epoch came to so far. Updates that were left out do not count in the loss."""

    def __init__(self, training: Training, epoch: int) -> None:
        self.training, self.epoch = training, epoch
        self.updates, self.total, self.skipped, self.images = 0, 0.0, 0, 0

    def add(self, loss: float, moved: bool, images: int) -> None:
        """Raises: TrainingDiverged where this is one skipped update in a row too many."""
        self.images += images * world_size()
        if moved:
            self.total += loss
            self.updates += 1
            self.training.skipped_in_a_row = 0
            return
        self.skipped += 1
        self.training.skipped_in_a_row += 1
        if self.training.skipped_in_a_row >= self.training.max_skipped_steps:
            step = self.updates + self.skipped
            where = f"in epoch {self.epoch + 1}, step {step}, the last of {self.training.skipped_in_a_row} in a row without a finite gradient"
            raise TrainingDiverged(loss, where)

    def mean(self) -> float:
        return self.total / self.updates if self.updates else math.nan

    def mean_over_ranks(self) -> float:
        total, updates = sum_over_ranks(torch.tensor([self.total, self.updates], dtype=torch.float64, device=self.training.device)).tolist()
        return total / updates if updates else math.nan
