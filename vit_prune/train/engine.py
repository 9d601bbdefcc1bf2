"""One epoch of training, and evaluation.  images [B, 3, height, width], targets [B] classes, or [B, classes] after mixup."""

import math
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.scheduler.scheduler import Scheduler
from timm.utils import dispatch_clip_grad
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from tqdm import tqdm

from vit_prune.methods.base import set_progress

TOP_K = 5


class TrainingDiverged(RuntimeError):
    """The loss is no number any more; nothing of that epoch is saved."""

    def __init__(self, loss: float, where: str) -> None:
        super().__init__(f"training diverged: the loss is {loss} {where}; try a lower --lr, or --clip-grad 1")


@dataclass
class Training:
    """What one run trains with."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: Scheduler
    criterion: nn.Module
    device: torch.device
    epochs: int
    mixup: Mixup | None = None
    clip_grad: float | None = None
    log_interval: int = 50


def train_one_epoch(training: Training, loader: DataLoader, epoch: int) -> dict[str, float]:
    """Returns: {"loss": mean over the steps, "lr": of the last step}. Raises: TrainingDiverged, with the step."""
    training.model.train()
    losses, steps = LossMeter(epoch), len(loader)
    with progress_bar(f"epoch {epoch + 1}/{training.epochs}", loader) as bar:
        for step, (images, targets) in enumerate(loader):
            update = epoch * steps + step
            set_progress(training.model, update / (training.epochs * steps))
            losses.add(train_step(training, images, targets))
            lr = training.optimizer.param_groups[0]["lr"]
            training.scheduler.step_update(update + 1)
            bar.update(len(images))
            if (step + 1) % training.log_interval == 0:
                bar.set_postfix(loss=f"{losses.read():.3f}")
        training.scheduler.step(epoch + 1)
        return {"loss": losses.read(), "lr": lr}


def train_step(training: Training, images: Tensor, targets: Tensor) -> Tensor:
    """One update of the weights; the loss, detached and not read."""
    images, targets = images.to(training.device, non_blocking=True), targets.to(training.device, non_blocking=True)
    if training.mixup is not None:
        images, targets = training.mixup(images, targets)
    loss = outputs_loss(training.criterion, training.model(images), targets)
    training.optimizer.zero_grad()
    loss.backward()
    if training.clip_grad is not None:
        dispatch_clip_grad(training.model.parameters(), training.clip_grad)
    training.optimizer.step()
    return loss.detach()


def outputs_loss(criterion: nn.Module, outputs: Tensor | tuple[Tensor, ...], targets: Tensor) -> Tensor:
    """The loss of a model's output; the mean over the heads where a distilled model in training gives one output for each."""
    if isinstance(outputs, tuple):
        return sum(criterion(output, targets) for output in outputs) / len(outputs)
    return criterion(outputs, targets)


class LossMeter:
    """Mean loss of an epoch. The device is waited for in `read` alone."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.steps, self.total = 0, 0.0
        self.unread: list[Tensor] = []

    def add(self, loss: Tensor) -> None:
        self.unread.append(loss)

    def read(self) -> float:
        """The mean so far. Raises: TrainingDiverged where a loss is not finite."""
        for loss in torch.stack(self.unread).tolist() if self.unread else ():
            if not math.isfinite(loss):
                raise TrainingDiverged(loss, f"in epoch {self.epoch + 1}, step {self.steps + 1}")
            self.total += loss
            self.steps += 1
        self.unread.clear()
        return self.total / self.steps


@torch.inference_mode()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> dict[str, float]:
    """Mean cross-entropy, and the percentages of images whose class is the first and among the first five (or all, where there are fewer).

    Returns: {"loss", "top1", "top5"}, each a mean over images, whatever the batch size.
    """
    model.eval()
    sums, dtype = [], next(model.parameters()).dtype
    with progress_bar("evaluation", loader) as bar:
        for images, targets in loader:
            logits = model(images.to(device, dtype, non_blocking=True)).float()
            sums.append(count(logits, targets.to(device, non_blocking=True)))
            bar.update(len(images))
    loss, top1, top5, images = torch.stack(sums).cpu().double().sum(0).tolist()
    return {"loss": loss / images, "top1": 100 * top1 / images, "top5": 100 * top5 / images}


def count(logits: Tensor, targets: Tensor) -> Tensor:
    """logits [B, classes], targets [B] -> [4]: summed loss, images right at first, images right among five, images."""
    ranked = logits.topk(min(TOP_K, logits.shape[1]), dim=1).indices
    right = ranked == targets[:, None]
    loss = F.cross_entropy(logits, targets, reduction="sum")
    return torch.stack([loss, right[:, 0].sum(), right.sum(), torch.tensor(len(targets), device=loss.device)])


def progress_bar(text: str, loader: DataLoader) -> tqdm:
    """Images done, images per second, time left; silent where stderr is no terminal."""
    total = min(len(loader.dataset), len(loader) * loader.batch_size)  # the last, smaller batch may be left out
    return tqdm(desc=text, total=total, unit=" images", file=sys.stderr, disable=None, leave=False)
