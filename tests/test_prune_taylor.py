"""Ranking by gradients: what the loss does not see goes first, and the model is left as it was."""

import copy

import pytest
import torch
from torch import nn

from tests.helpers import tiny_vit
from vit_prune.methods.l1 import L1, Taylor
from vit_prune.methods.units import head_units
from vit_prune.prune import prune, taylor_scores


def batches(count: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, 32, 32, generator=generator), torch.randint(5, (4,), generator=generator)) for _ in range(count)]


def test_taylor_cuts_first_what_the_loss_does_not_see_and_l1_does_not():
    model = tiny_vit()
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.fc1.weight[5] = 100.0
            block.mlp.fc1.bias[5] = -1e6  # GELU gives 0 and no gradient
            block.mlp.fc2.weight[:, 5] = 100.0
    assert 5 in prune(copy.deepcopy(model), L1(0, 0.0625)).blocks[0].channels
    assert 5 not in prune(model, Taylor(0, 0.0625), batches()).blocks[0].channels


def test_taylor_is_the_squared_sum_of_weight_times_gradient_added_up_over_batches():
    model = tiny_vit()
    wanted = torch.zeros(4, dtype=torch.float64)
    attn = model.blocks[0].attn
    for images, labels in batches():
        model.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        rows = [(p * p.grad).detach().double().unflatten(0, (3, 4, 8)) for p in (attn.qkv.weight, attn.qkv.bias)]
        columns = (attn.proj.weight * attn.proj.weight.grad).detach().double().unflatten(1, (4, 8))
        wanted += (rows[0].sum((0, 2, 3)) + rows[1].sum((0, 2)) + columns.sum((0, 2))) ** 2
    (scores,) = taylor_scores(model, [head_units(attn)], batches(), nn.functional.cross_entropy)
    torch.testing.assert_close(scores, wanted, rtol=1e-4, atol=0)
    kept = prune(model, Taylor(0.5, 0), batches()).blocks[0].heads
    assert list(kept) == sorted(wanted.argsort(descending=True)[:2].tolist())


def test_taylor_leaves_mode_gradients_and_frozen_weights_as_they_were():
    model = tiny_vit(proj_drop_rate=0.5).train()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    other = copy.deepcopy(model)
    with torch.no_grad():
        plans = [prune(each, Taylor(0.5, 0.5), batches()) for each in (model, other)]
    assert plans[0] == plans[1]  # dropout would draw another mask for each
    assert all(module.training for module in model.modules())
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == ["head.weight", "head.bias"]
    assert model.head.weight.grad.eq(1).all()


def test_taylor_takes_a_loss_of_ones_own():
    seen = []

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append(logits.shape)
        return logits[:, 0].sum()

    prune(tiny_vit(), Taylor(0.5, 0), batches(3), loss)
    assert seen == [(4, 5)] * 3


@pytest.mark.parametrize(
    ("how", "given", "message"),
    [
        (Taylor(), {}, r"give a loader of batches \(images, labels\)"),
        (Taylor(), {"loader": []}, "the loader gave no batch"),
        (Taylor(), {"loader": [torch.randn(2, 3, 32, 32)]}, r"must give batches \(images, labels\), got a Tensor"),
        (Taylor(), {"loader": [(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.zeros(2))]}, "float images"),
        (L1(), {"loader": []}, "L1 looks at no images"),
        (L1(), {"loss": nn.functional.cross_entropy}, "L1 looks at no images"),
        (
            Taylor(),
            {"loader": [(torch.ones(2, 3, 32, 32), torch.arange(2))], "loss": lambda logits, _: logits.sum() * float("nan")},
            "are not finite",
        ),
    ],
)
def test_a_loader_that_is_missing_wrong_or_not_asked_for_is_refused(how, given, message):
    model = tiny_vit()
    with pytest.raises(ValueError, match=message):
        prune(model, how, **given)
    assert model.blocks[0].attn.num_heads == 4
    assert not model.training


WRONG = {
    "no classifier": ({"num_classes": 0}, None, "this model has no classifier"),
    "labels beyond the classes": ({"num_classes": 3}, None, "the loader's labels go up to 4, the model has 3 classes"),
    "a loss for each image": ({}, nn.CrossEntropyLoss(reduction="none"), "must return one number with a gradient"),
    "no tensor": ({}, lambda logits, labels: 1.0, "must return one number with a gradient"),
}


@pytest.mark.parametrize(("kwargs", "loss", "sentence"), WRONG.values(), ids=WRONG)
def test_what_gives_no_ranking_is_refused_and_nothing_is_cut(kwargs, loss, sentence):
    model = tiny_vit(**kwargs)
    with pytest.raises(ValueError, match=sentence):
        prune(model, Taylor(0, 0.5), batches(), loss)
    assert not hasattr(model, "prune_plan")
