"""Losses of labels and of teachers."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from vit_prune import checkpoint
from vit_prune.train import losses
from vit_prune.train.losses import Distillation, Loss, create_loss
from vit_prune.train.run import run

CPU = torch.device("cpu")


class Fixed(nn.Module):
    """A teacher that answers the same logits, and remembers its images."""

    pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}  # noqa: RUF012

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, images):
        self.images = images
        return self.logits


@pytest.fixture
def student():
    model = nn.Identity()
    model.pretrained_cfg = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    return model


def distillation(student, wanted, **settings):
    return Distillation(Fixed(wanted), student, **{"kind": "soft", "temperature": 1.0, "weight": 1.0, "device": CPU, **settings})


def test_soft_distillation_is_the_mean_divergence_times_the_squared_temperature(student):
    wanted, logits, T = torch.randn(4, 3), torch.randn(4, 3, requires_grad=True), 2.0
    p, q = (wanted / T).softmax(1), (logits / T).softmax(1)
    expected = 0.3 * T * T * (p * (p.log() - q.log())).sum(1).mean()
    loss = distillation(student, wanted, temperature=T, weight=0.3)(logits, torch.zeros(4, 3, 2, 2))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    assert logits.grad.abs().sum() > 0


def test_hard_distillation_is_the_cross_entropy_with_the_teachers_first_class(student):
    wanted, logits = torch.tensor([[0.0, 5.0, 1.0]]), torch.randn(1, 3)
    loss = distillation(student, wanted, kind="hard", weight=2.0)(logits, torch.zeros(1, 3, 2, 2))
    assert loss.item() == pytest.approx(2 * F.cross_entropy(logits, torch.tensor([1])).item())


def test_the_teacher_sees_the_images_in_its_own_normalisation_and_learns_nothing(student):
    teacher = distillation(student, torch.zeros(1, 3))
    teacher(torch.randn(1, 3, requires_grad=True), torch.full((1, 3, 2, 2), 0.75)).backward()
    torch.testing.assert_close(teacher.teacher.model.images, torch.ones(1, 3, 2, 2))
    assert teacher.teacher.model.logits.grad is None


def test_the_labels_train_the_first_head_and_the_teacher_the_last(student):
    heads, targets = (torch.randn(2, 3), torch.randn(2, 3)), torch.tensor([0, 1])
    loss = Loss(nn.CrossEntropyLoss(), distillation(student, torch.zeros(2, 3), weight=0.0), 1.0)
    assert loss(heads, targets, torch.zeros(2, 3, 2, 2)).item() == pytest.approx(F.cross_entropy(heads[0], targets).item())


def test_a_run_distils_from_a_saved_model_and_from_a_file_of_weights(tiny_config, tmp_path):
    teacher = timm.create_model("vit_mini28", img_size=8, depth=1, embed_dim=16, num_heads=2, num_classes=2)
    checkpoint.save(teacher, tmp_path / "teacher")
    result = run(tiny_config(teacher=str(tmp_path / "teacher"), kd_temperature=3.0, epochs=2))
    assert result["last"]["epoch"] == 2
    torch.save(timm.create_model("vit_mini28", num_classes=2).state_dict(), tmp_path / "teacher.pth")
    loss = create_loss(tiny_config(teacher="vit_mini28", teacher_checkpoint=str(tmp_path / "teacher.pth")), timm.create_model("vit_mini28", num_classes=2), CPU)
    assert loss.teacher.teacher.model.num_classes == 2


def test_a_teacher_of_other_classes_is_refused_before_the_first_batch(tiny_config, tmp_path):
    checkpoint.save(timm.create_model("vit_mini28", img_size=8, num_classes=7), tmp_path / "teacher")
    with pytest.raises(ValueError, match="teacher has 7 classes, the model has 2"):
        run(tiny_config(teacher=str(tmp_path / "teacher")))


def test_a_pretrained_teacher_keeps_the_head_that_it_was_trained_with(tiny_config, monkeypatch):
    asked = []
    monkeypatch.setattr(losses, "build_model", lambda name, **kwargs: asked.append(kwargs) or timm.create_model(name, num_classes=1000))
    with pytest.raises(ValueError, match="the teacher vit_mini28 has 1000 classes, the model has 2"):
        create_loss(tiny_config(teacher="vit_mini28"), timm.create_model("vit_mini28", num_classes=2), CPU)
    assert asked == [{"pretrained": True}]


def test_a_teacher_of_another_image_size_is_refused_before_the_first_batch(tiny_config, tmp_path):
    checkpoint.save(timm.create_model("vit_mini28", num_classes=2), tmp_path / "teacher")
    with pytest.raises(ValueError, match="takes images of 28 x 28, the model of 8 x 8"):
        run(tiny_config(teacher=str(tmp_path / "teacher")))


def test_the_distilled_models_second_head_is_switched_on_by_a_teacher_and_evaluated_as_one(tiny_config):
    model = timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, depth=1, num_classes=2)
    create_loss(tiny_config(), model, CPU)
    assert isinstance(model.train()(torch.zeros(1, 3, 32, 32)), torch.Tensor)
    model.set_distilled_training(True)
    assert len(model.train()(torch.zeros(1, 3, 32, 32))) == 2
    assert model.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 2)
