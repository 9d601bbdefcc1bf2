"""The loss of a batch: of its labels, and of a teacher's outputs (distillation, arXiv 1503.02531 and 2012.12877)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from timm.task.distillation import DistillationTeacher
from torch import Tensor, nn


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
