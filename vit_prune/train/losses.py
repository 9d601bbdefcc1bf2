"""The loss of a batch: of its labels, and of a teacher's outputs (distillation, arXiv 1503.02531 and 2012.12877)."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.task.distillation import DistillationTeacher
from torch import Tensor, nn

from vit_prune import checkpoint
from vit_prune.train.build import build_model
from vit_prune.train.config import TrainConfig
from vit_prune.train.labels import check_classes, label_names
from vit_prune.train.loaders import data_config

log = logging.getLogger(__name__)


@dataclass
class Loss:
    """loss(outputs, targets, images). outputs [B, classes], or one such tensor for each head of a distilled model in training.

    Args:
        labels: criterion(outputs, targets).
        teacher: a second loss, on the same images; of the last head where there are several.
    """

    labels: nn.Module
    teacher: "Distillation | None" = None
    labels_weight: float = 1.0

    def __call__(self, outputs: Tensor | tuple[Tensor, ...], targets: Tensor, images: Tensor) -> Tensor:
        heads = outputs if isinstance(outputs, tuple) else (outputs,)
        if self.teacher is None:
            return sum(self.labels(head, targets) for head in heads) / len(heads)
        return self.labels_weight * self.labels(heads[0], targets) + self.teacher(heads[-1], images)


class Distillation(nn.Module):
    """weight x the loss of a student's logits [B, classes] against those of a teacher.

    soft: T^2 KL(teacher || student) of softmax(logits / T), the mean over images; hard: cross-entropy with the teacher's first class.
    """

    def __init__(self, teacher: nn.Module, student: nn.Module, *, kind: str, temperature: float, weight: float, device: torch.device) -> None:
        super().__init__()
        self.teacher = DistillationTeacher(teacher, device=device).requires_grad_(False).to(device)
        self.kind, self.temperature, self.weight = kind, temperature, weight
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(student.pretrained_cfg[name], device=device).view(1, -1, 1, 1), persistent=False)

    def forward(self, logits: Tensor, images: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(self.teacher.normalize_input(images, self.mean, self.std))
        if self.kind == "hard":
            return self.weight * F.cross_entropy(logits, wanted.argmax(1))
        T = self.temperature
        student, teacher = F.log_softmax(logits.float() / T, dim=1), F.log_softmax(wanted.float() / T, dim=1)
        return self.weight * T * T * F.kl_div(student, teacher, log_target=True, reduction="batchmean")


def create_loss(config: TrainConfig, model: nn.Module, device: torch.device) -> Loss:
    """The training loss: mixup smooths its targets itself. Raises: ValueError, OSError for a teacher that is not to be had."""
    if config.mixup or config.cutmix:
        labels = SoftTargetCrossEntropy()
    else:
        labels = LabelSmoothingCrossEntropy(config.smoothing) if config.smoothing else nn.CrossEntropyLoss()
    if config.teacher is None:
        return Loss(labels)
    if hasattr(model, "set_distilled_training"):
        model.set_distilled_training(True)
    teacher = load_teacher(config, model)
    distillation = Distillation(teacher, model, kind=config.distillation, temperature=config.kd_temperature, weight=config.distill_loss_weight, device=device)
    return Loss(labels, distillation, config.task_loss_weight)


def load_teacher(config: TrainConfig, student: nn.Module) -> nn.Module:
    """Raises: ValueError for a teacher of other classes or another image size; OSError."""
    if Path(config.teacher).is_dir():
        teacher = checkpoint.load(config.teacher)
    elif config.teacher_checkpoint is None:
        teacher = build_model(config.teacher, pretrained=True)  # with the head that it was trained with
    else:
        teacher = build_model(config.teacher, num_classes=student.num_classes)
        log.info(checkpoint.load_weights(teacher, config.teacher_checkpoint, purpose="evaluate"))
    if teacher.num_classes != student.num_classes:
        raise ValueError(f"the teacher {config.teacher} has {teacher.num_classes} classes, the model has {student.num_classes}")
    if label_names(teacher) and label_names(student):
        check_classes(config.teacher, teacher, label_names(student), label_names(teacher))
    sizes = [data_config(model)["input_size"] for model in (teacher, student)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the teacher {config.teacher} takes images of {sizes[0][1]} x {sizes[0][2]}, the model of {sizes[1][1]} x {sizes[1][2]}")
    return teacher
