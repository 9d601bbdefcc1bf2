"""One epoch and evaluation, on a linear model where the right numbers are known."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vit_prune.methods.base import Method
from vit_prune.train import build
from vit_prune.train.engine import Training, TrainingDiverged, train_one_epoch
from vit_prune.train.evaluation.accuracy import evaluate
from vit_prune.train.losses import Loss, create_loss

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
    update = build.create_update(config, optimizer, CPU)
    updates = 3 // overrides.get("accumulate", 1) or 1
    return Training(model, model, optimizer, scheduler, Loss(nn.CrossEntropyLoss()), CPU, config.epochs, update, updates, **overrides)


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


def test_the_losses_of_the_methods_are_part_of_the_training_loss_and_progress_is_told(tiny_config):
    def losses(**weights) -> tuple[float, nn.Module]:
        torch.manual_seed(0)
        model = timm.create_model("vit_mini28_budget", depth=2, embed_dim=16, num_heads=2, img_size=8, num_classes=3, s_max=0.5, sigma_max=0.0, **weights)
        images = torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        data = DataLoader(TensorDataset(images, torch.zeros(12, dtype=torch.long)), batch_size=4)
        return train_one_epoch(training(model, tiny_config(opt="sgd", lr=1e-12)), data, 0)["loss"], model

    without, _ = losses(alpha_base=0.0, alpha_max=0.0, beta_max=0.0)
    budget, model = losses(beta_max=0.0)
    v = 0.95 - 0.5
    assert budget - without == pytest.approx(0.05 * v**2, rel=1e-3)
    assert model.blocks[1].attn.prune.budgetformer.done == pytest.approx(2 / 3)
    entropy, _ = losses(alpha_base=0.0, alpha_max=0.0, beta_max=0.3)
    assert entropy - without == pytest.approx(0.3 * (-1 - 1 / 3 + 1 / 3) / 3 * 0.6931, rel=1e-2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_batch_is_skipped_and_counted_instead_of_breaking_the_weights(tiny_config, bad):
    model, data = linear_model(), loader()
    data.dataset.tensors[0][6] = bad  # in the second of three batches
    result = train_one_epoch(training(model, tiny_config(lr=1e-3)), data, 0)
    assert result["skipped"] == 1
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert 0 < result["loss"] < 10


def test_the_weights_after_a_skipped_batch_are_those_of_training_without_it(tiny_config):
    config, kept = tiny_config(opt="adamw", lr=1e-2), [0, 1, 2, 3, 8, 9, 10, 11]
    bad, good, data = linear_model(), linear_model(), loader()
    data.dataset.tensors[0][6] = float("nan")
    without = DataLoader(torch.utils.data.Subset(data.dataset, kept), batch_size=4)
    train_one_epoch(training(bad, config), data, 0)
    train_one_epoch(training(good, config), without, 0)
    assert all(torch.equal(one, two) for one, two in zip(bad.parameters(), good.parameters(), strict=True))


def test_too_many_bad_batches_in_a_row_stop_the_run_with_the_step_and_good_ones_between_do_not(tiny_config):
    data = loader(24)
    data.dataset.tensors[0][[4, 12, 16]] = float("nan")  # batches 2, 4 and 5 of six
    assert train_one_epoch(training(linear_model(), tiny_config(), max_skipped_steps=3), data, 0)["skipped"] == 3
    with pytest.raises(TrainingDiverged, match="in epoch 1, step 5, the last of 2 in a row without a finite gradient"):
        train_one_epoch(training(linear_model(), tiny_config(), max_skipped_steps=2), data, 0)


def test_skipped_updates_in_a_row_are_counted_over_the_end_of_an_epoch(tiny_config):
    data = loader(4)
    data.dataset.tensors[0][0] = float("nan")
    parts = training(linear_model(), tiny_config(epochs=2), max_skipped_steps=2)
    train_one_epoch(parts, data, 0)
    with pytest.raises(TrainingDiverged, match="in epoch 2, step 1"):
        train_one_epoch(parts, data, 1)


def test_a_loss_scaled_too_high_is_skipped_and_the_scale_comes_down(tiny_config):
    parts = training(linear_model(), tiny_config(amp=True, amp_dtype="float16", lr=1e-3), autocast_dtype=torch.float16)
    parts.update.scaler.scale(torch.zeros(()))  # makes the scale a tensor
    parts.update.scaler.update(new_scale=2.0**40)
    before = [parameter.clone() for parameter in parts.model.parameters()]
    result = train_one_epoch(parts, loader(4), 0)
    assert (result["skipped"], parts.update.scaler.get_scale()) == (1, 2.0**39)
    assert all(torch.equal(one, two) for one, two in zip(before, parts.model.parameters(), strict=True))


def test_accumulated_batches_give_the_step_of_one_large_batch(tiny_config):
    config = tiny_config(opt="momentum", lr=0.1, epochs=1)
    one, several = linear_model(), linear_model()
    train_one_epoch(training(one, config), DataLoader(loader(8).dataset, batch_size=8), 0)
    train_one_epoch(training(several, config, accumulate=4), DataLoader(loader(8).dataset, batch_size=2), 0)
    for first, second in zip(one.parameters(), several.parameters(), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-7)


def test_the_last_update_of_an_epoch_is_a_mean_over_the_batches_that_are_left(tiny_config):
    parts = training(linear_model(), tiny_config(opt="momentum", lr=1e-9), accumulate=2)
    gradients = []
    parts.optimizer.register_step_pre_hook(lambda *_: gradients.append(parts.model[1].bias.grad.clone()))
    data, model = loader(12), linear_model()  # three batches: an update of two and one of one
    train_one_epoch(parts, data, 0)
    images, targets = (tensor[8:] for tensor in data.dataset.tensors)
    F.cross_entropy(model(images), targets).backward()
    assert len(gradients) == 2
    torch.testing.assert_close(gradients[1], model[1].bias.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("given", [0, 1, 2])
def test_a_stream_that_ends_early_is_an_error_instead_of_an_update_of_less(tiny_config, given):
    class Stream:
        dataset, batch_size = range(12), 4

        def __len__(self):
            return 3

        def __iter__(self):
            return iter(list(loader(12))[:given])

    with pytest.raises(ValueError, match="the data set ended before its epoch did"):
        train_one_epoch(training(linear_model(), tiny_config(), accumulate=3), Stream(), 0)


def test_the_average_moves_after_each_update_that_was_made(tiny_config):
    from timm.utils import ModelEmaV3

    model, data = linear_model(), loader()
    data.dataset.tensors[0][6] = float("nan")
    average = ModelEmaV3(model, decay=0.5)
    seen = []
    average.update = lambda model, step: seen.append(step)
    train_one_epoch(training(model, tiny_config(), ema=average), data, 0)
    assert seen == [1, 2]


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
    train_one_epoch(training(model, config), loader(4), 0)
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


def test_no_two_batches_of_all_processes_draw_the_same_random_columns(tiny_config, monkeypatch):
    """The share of training that is done is the key of the draws: each batch of each process has its own, in order."""
    from vit_prune.train import engine

    heard = []
    monkeypatch.setattr(engine, "set_progress", lambda _, progress: heard.append(progress))
    monkeypatch.setattr(engine, "world_size", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr(engine, "rank", lambda rank=rank: rank)
        train_one_epoch(training(linear_model(), tiny_config(), accumulate=3), loader(12), 0)
    assert sorted(heard) == pytest.approx([place / 6 for place in range(6)])
    assert heard == pytest.approx([0, 2 / 6, 4 / 6, 1 / 6, 3 / 6, 5 / 6])


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
    loss = Loss(nn.CrossEntropyLoss())(outputs, targets, images)
    assert loss.item() == pytest.approx((F.cross_entropy(outputs[0], targets) + F.cross_entropy(outputs[1], targets)).item() / 2)
    assert evaluate(model, DataLoader(TensorDataset(images, targets), batch_size=4), CPU)["loss"] > 0


@pytest.mark.parametrize(
    ("settings", "loss"),
    [({"smoothing": 0.0}, "CrossEntropyLoss"), ({"smoothing": 0.1}, "LabelSmoothingCrossEntropy"), ({"mixup": 0.8}, "SoftTargetCrossEntropy")],
    ids=["plain", "smoothed", "mixup"],
)
def test_mixup_smooths_its_own_targets_so_that_the_loss_does_not_smooth_again(tiny_config, settings, loss):
    config = tiny_config(**settings)
    assert type(create_loss(config, linear_model(), CPU).labels).__name__ == loss
    mixup = build.create_mixup(config, 3)
    if mixup is not None:
        assert mixup.label_smoothing == config.smoothing
        images, targets = mixup(torch.randn(4, 3, 2, 2), torch.tensor([0, 1, 2, 0]))
        assert torch.allclose(targets.sum(1), torch.ones(4))
        assert images.shape == (4, 3, 2, 2)
