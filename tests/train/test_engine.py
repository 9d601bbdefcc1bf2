"""One epoch and evaluation, on a linear model where the right numbers are known."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vit_prune.methods.base import Method
from vit_prune.train import build
from vit_prune.train.engine import Training, TrainingDiverged, evaluate, outputs_loss, train_one_epoch

CPU = torch.device("cpu")


def loader(images: int = 12, *, classes: int = 3, batch_size: int = 4) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(classes, (images,), generator=generator)
    return DataLoader(TensorDataset(torch.randn(images, 3, 2, 2, generator=generator), targets), batch_size=batch_size)


def linear_model(classes: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, classes))


def training(model: nn.Module, config, **overrides) -> Training:
    optimizer = build.create_optimizer(config, model)
    scheduler = build.create_scheduler(config, optimizer, updates_per_epoch=3)
    return Training(model, optimizer, scheduler, nn.CrossEntropyLoss(), CPU, config.epochs, **overrides)


@pytest.mark.parametrize("batch_size", [1, 4, 5, 12])
def test_evaluation_is_a_mean_over_images_not_over_batches(batch_size):
    model, data = linear_model(10), loader(classes=10, batch_size=batch_size)
    images, targets = data.dataset.tensors
    logits = model(images)
    top5 = (logits.topk(5).indices == targets[:, None]).any(1).float().mean()
    metrics = evaluate(model, data, CPU)
    assert metrics["loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-6)
    assert metrics["top1"] == pytest.approx(100 * (logits.argmax(1) == targets).float().mean().item())
    assert metrics["top5"] == pytest.approx(100 * top5.item())


def test_top5_of_three_classes_is_everything_instead_of_an_error():
    assert evaluate(linear_model(3), loader(), CPU)["top5"] == 100


def test_evaluation_turns_dropout_off():
    model = nn.Sequential(linear_model(), nn.Dropout(0.9))
    assert evaluate(model.train(), loader(), CPU) == evaluate(linear_model(), loader(), CPU)


@pytest.mark.parametrize("log_interval", [1, 2, 50])
def test_the_reported_loss_is_the_mean_over_all_steps_not_of_the_last_readings(tiny_config, log_interval):
    model, data = linear_model(), loader()
    expected = evaluate(model, data, CPU)["loss"]
    parts = training(model, tiny_config(opt="sgd", lr=1e-12), log_interval=log_interval)
    assert train_one_epoch(parts, data, 0)["loss"] == pytest.approx(expected, rel=1e-6)


def test_training_lowers_the_loss(tiny_config):
    model, data = linear_model(), loader()
    before = evaluate(model, data, CPU)["loss"]
    train_one_epoch(training(model, tiny_config(opt="sgd", lr=0.1)), data, 0)
    assert evaluate(model, data, CPU)["loss"] < before


@pytest.mark.parametrize("log_interval", [1, 2, 50])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_stops_with_its_own_step_however_rarely_it_is_read(tiny_config, bad, log_interval):
    data = loader()
    data.dataset.tensors[0][6] = bad  # in the second of three batches
    with pytest.raises(TrainingDiverged, match="in epoch 1, step 2"):
        train_one_epoch(training(linear_model(), tiny_config(), log_interval=log_interval), data, 0)


def test_the_learning_rate_follows_every_step_when_asked_and_every_epoch_otherwise(tiny_config):
    settings = {"epochs": 4, "warmup_epochs": 2, "warmup_lr": 0.0, "lr": 1.0, "opt": "sgd"}
    by_epoch = training(linear_model(), tiny_config(**settings))
    assert [train_one_epoch(by_epoch, loader(), epoch)["lr"] for epoch in (0, 1)] == [0.0, 0.5]
    by_step = training(linear_model(), tiny_config(**settings, sched_on_updates=True))
    assert [train_one_epoch(by_step, loader(), epoch)["lr"] for epoch in (0, 1)] == pytest.approx([2 / 6, 5 / 6])


def test_the_gradient_is_clipped_before_the_step(tiny_config):
    model = linear_model()
    before = [parameter.clone() for parameter in model.parameters()]
    config = tiny_config(opt="momentum", lr=1.0, momentum=0, weight_decay=0, clip_grad=1e-3)
    train_one_epoch(training(model, config, clip_grad=config.clip_grad), loader(4), 0)
    moved = torch.cat([(new - old).flatten() for new, old in zip(model.parameters(), before, strict=True)]).norm().item()
    assert moved == pytest.approx(1e-3, rel=1e-2)


def test_methods_hear_the_share_of_training_done_before_each_step(tiny_config):
    class Listener(Method):
        def __init__(self):
            super().__init__()
            self.heard = []

        def step(self, progress):
            self.heard.append(progress)

    model = linear_model()
    model.add_module("listener", listener := Listener())
    model.forward = lambda images: model[1](images.flatten(1))
    parts = training(model, tiny_config(epochs=2))
    for epoch in (0, 1):
        train_one_epoch(parts, loader(), epoch)
    assert listener.heard == pytest.approx([0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6])


def test_an_optimizer_built_before_the_patch_is_refused_with_the_parameter_that_it_lacks():
    import vit_prune as vp

    model = timm.create_model("vit_mini28", depth=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    vp.patch(model, vp.TokenBias())
    with pytest.raises(ValueError, match=r"does not hold blocks\.0\.attn\.prune\.token_bias\.weight, which train: build it after vp\.patch"):
        build.check_optimizer(optimizer, model)
    build.check_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


def test_the_two_outputs_of_a_distilled_model_in_training_weigh_the_same():
    model = timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, depth=1, num_classes=3)
    images, targets = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 0])
    model.set_distilled_training(True)
    outputs = model.train()(images)
    loss = outputs_loss(nn.CrossEntropyLoss(), outputs, targets)
    assert loss.item() == pytest.approx((F.cross_entropy(outputs[0], targets) + F.cross_entropy(outputs[1], targets)).item() / 2)
    assert evaluate(model, DataLoader(TensorDataset(images, targets), batch_size=4), CPU)["loss"] > 0


@pytest.mark.parametrize(
    ("settings", "loss"),
    [({"smoothing": 0.0}, "CrossEntropyLoss"), ({"smoothing": 0.1}, "LabelSmoothingCrossEntropy"), ({"mixup": 0.8}, "SoftTargetCrossEntropy")],
    ids=["plain", "smoothed", "mixup"],
)
def test_mixup_smooths_its_own_targets_so_that_the_loss_does_not_smooth_again(tiny_config, settings, loss):
    config = tiny_config(**settings)
    assert type(build.create_loss(config)).__name__ == loss
    mixup = build.create_mixup(config, 3)
    if mixup is not None:
        assert mixup.label_smoothing == config.smoothing
        images, targets = mixup(torch.randn(4, 3, 2, 2), torch.tensor([0, 1, 2, 0]))
        assert torch.allclose(targets.sum(1), torch.ones(4))
        assert images.shape == (4, 3, 2, 2)
