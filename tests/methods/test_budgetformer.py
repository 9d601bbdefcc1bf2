"""Gated heads: the formulas by hand, the schedules, the losses, and what is refused."""

import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from timm.utils import ModelEmaV3
from torch import nn

import vit_prune as vp
from tests.helpers import gates_of, tiny_vit
from vit_prune.methods.base import HeadGate, Host
from vit_prune.methods.budgetformer import UNTRAINED, WHOLE, BudgetFormerMethod
from vit_prune.methods.stack import prune_stacks

HOST = Host(name="blocks.0.attn", index=0, depth=1, dim=2, num_heads=2, head_dim=1, num_prefix_tokens=0)


def built(**fields) -> BudgetFormerMethod:
    """A gate on two channels and two heads, f = 2 relu(x_0) - relu(x_1) + .5 and g = x."""
    method = vp.BudgetFormer(**fields).build(HOST).eval()
    with torch.no_grad():
        if fields.get("budget") is None:
            method.f1.weight.copy_(torch.eye(2))
            method.f2.weight.copy_(torch.tensor([[2.0, -1.0]]))
            method.f2.bias.fill_(0.5)
        method.g.weight.copy_(torch.eye(2))
    return method


def gated(**fields) -> nn.Module:
    return vp.patch(tiny_vit(), vp.BudgetFormer(**fields))


def test_budget_relevance_and_weights_are_those_computed_by_hand():
    method = built(tau_min=0.5, tau_max=2.0, gamma=math.log(3))
    method.step(1.0)  # tau = .5 + 1.5 / 3 = 1
    x = torch.tensor([[[1.0, -3.0], [3.0, 1.0]]])  # mean (2, -1)
    gate = method.gate(x, mask=None, sizes=None)
    s = 1 / (1 + math.exp(-4.5))  # f = 2 * 2 - 0 + .5
    p = 1 / (1 + math.exp(-3.0))  # softmax of (2, -1)
    assert gate.budget.item() == pytest.approx(s, abs=1e-6)
    assert gate.relevance[0].tolist() == pytest.approx([p, 1 - p], abs=1e-6)
    assert gate.weight[0].tolist() == pytest.approx([2 * s * p, 2 * s * (1 - p)], abs=1e-6)
    assert [group.heads.tolist() for group in gate.groups] == [[[0]]]  # k = floor(1.978)


def test_padding_and_the_sizes_of_merged_tokens_count_in_the_mean():
    method = built()
    method.step(1.0)
    tokens = torch.tensor([[[1.0, -3.0], [3.0, 1.0], [9.0, 9.0]]])
    alone = method.gate(tokens[:, :2], mask=None, sizes=None)
    for mask in (torch.tensor([True, True, False]).view(1, 1, 1, 3), torch.tensor([0.0, 0.0, -math.inf]).view(1, 1, 1, 3)):
        torch.testing.assert_close(method.gate(tokens, mask=mask, sizes=None).weight, alone.weight)
    whole = method.gate(torch.cat([tokens[:, :1], tokens[:, 1:2].expand(-1, 3, -1)], 1), mask=None, sizes=None)
    torch.testing.assert_close(method.gate(tokens, mask=None, sizes=torch.tensor([[1.0, 3.0, 0.0]])).weight, whole.weight)
    assert method.gate(tokens, mask=torch.zeros(1, 1, 1, 3, dtype=torch.bool), sizes=None).weight.isfinite().all()


def test_a_head_runs_for_each_whole_one_that_the_budget_pays_for():
    host = replace(HOST, num_heads=4)
    method = vp.BudgetFormer().build(host).eval()
    assert method._count(torch.tensor([0.01, 0.25, 0.49, 0.5, 0.75, 0.999, 1.0])).tolist() == [1, 1, 1, 2, 3, 3, 4]
    assert [vp.BudgetFormer(budget=s).build(host).fixed_heads for s in (0.1, 0.25, 0.5, 0.75, 1)] == [1, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("done", "tau", "sigma", "beta"), [(0.0, 2.0, 0.5, -0.05), (0.5, 0.1 + 1.9 * math.exp(-2.5), 0.25, 0.0), (1.0, 0.1 + 1.9 * math.exp(-5), 0, 0.05)]
)
def test_the_schedules_are_exact_at_the_start_the_middle_and_the_end(done, tau, sigma, beta):
    config, method = vp.BudgetFormer(), vp.BudgetFormer().build(HOST)
    method.step(done)
    assert method.done == done
    assert (config.temperature(done), config.noise_scale(done), config.entropy_weight(done)) == pytest.approx((tau, sigma, beta), abs=1e-12)
    in_graph = method.progress / WHOLE
    tensors = (config.temperature(in_graph), config.noise_scale(in_graph), config.entropy_weight(in_graph))
    assert [value.item() for value in tensors] == pytest.approx([tau, sigma, beta], abs=1e-7)


def test_noise_is_drawn_in_training_alone_and_falls_to_nothing():
    torch.manual_seed(0)
    method, x = vp.BudgetFormer().build(HOST), torch.randn(2048, 3, 2)
    nn.init.zeros_(method.g.weight)
    method.step(0.0)
    z = method.gate(x, mask=None, sizes=None).relevance.log() * 2.0  # tau = 2
    spread = (z[:, 0] - z[:, 1]).std().item() / math.sqrt(2)
    assert spread == pytest.approx(0.5, rel=0.05)
    method.step(1.0)
    assert method.gate(x, mask=None, sizes=None).relevance.unique().tolist() == [0.5]
    method.eval().step(0.0)
    assert method.gate(x, mask=None, sizes=None).relevance.unique().tolist() == [0.5]


def test_the_budget_loss_is_flat_inside_its_interval_and_capped_outside():
    method = built(s_min=0.2, s_max=0.6)
    s = torch.tensor([0.2, 0.4, 0.6, 0.1, 0.61, 0.9], requires_grad=True)
    loss = method.losses(HeadGate(s[:, None], None, s, torch.full((6, 2), 0.5)))["budget"] * len(s)
    (slope,) = torch.autograd.grad(loss, s)
    assert slope[:3].tolist() == [0, 0, 0]
    v = [0.1, 0.01, 0.3]
    assert loss.item() == pytest.approx(0.05 * v[0] ** 2 + (0.001 + v[1]) * v[1] ** 2 + 0.05 * v[2] ** 2, rel=1e-4)
    assert slope[3:].tolist() == pytest.approx([-2 * 0.05 * v[0], 2 * 0.001 * v[1] + 3 * v[1] ** 2, 2 * 0.05 * v[2]], rel=1e-4)


@pytest.mark.parametrize(("entropy", "rises"), [("explore", (True, False)), ("literal", (False, True))])
def test_entropy_rises_early_and_falls_late_by_default_and_the_reverse_by_the_literal_formula(entropy, rises):
    torch.manual_seed(0)
    x = torch.randn(32, 3, 2)
    for done, rise in zip((0.2, 0.8), rises, strict=True):
        method = vp.BudgetFormer(entropy=entropy, beta_max=1.0, tau_min=1.0, tau_max=1.0).build(HOST).eval()
        nn.init.normal_(method.g.weight, std=2.0)
        method.step(done)
        optimizer = torch.optim.SGD(method.g.parameters(), lr=1.0)

        def spread(method=method) -> float:
            return torch.special.entr(method.gate(x, mask=None, sizes=None).relevance).sum(-1).mean().item()

        before = spread()
        for _ in range(20):
            optimizer.zero_grad()
            method.losses(method.gate(x, mask=None, sizes=None))["entropy"].backward()
            optimizer.step()
        assert (spread() > before + 0.01) if rise else (spread() < before - 0.01)


def test_a_model_that_was_never_trained_with_gates_is_evaluated_as_it_was():
    images, plain = torch.randn(2, 3, 32, 32), tiny_vit()
    assert torch.equal(gated()(images), plain(images))


def test_fine_tuning_starts_near_the_function_that_the_model_was():
    images, plain = torch.randn(8, 3, 32, 32), tiny_vit()
    with torch.no_grad():
        noisy, quiet = (gated(sigma_max=sigma).train()(images) for sigma in (0.5, 0.0))
        scale = plain(images).norm()
        assert (quiet - plain(images)).norm() < 0.05 * scale  # s = .95
        assert (noisy - plain(images)).norm() < 0.3 * scale


def test_progress_is_saved_loaded_copied_and_averaged_whole(tmp_path):
    model = vp.patch(timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=48, img_size=32), vp.BudgetFormer())
    ema = ModelEmaV3(model, decay=0.5)
    vp.set_progress(model, 0.25)
    ema.update(model)
    vp.save(model, tmp_path / "model")
    for other in (vp.load(tmp_path / "model"), copy.deepcopy(model), ema.module):
        assert [gate.done for gate in gates_of(other)] == [0.25, 0.25]
    vp.set_progress(model, 0.5)
    assert gates_of(ema.module)[0].done == 0.25


@pytest.mark.parametrize("budget", [None, 0.5])
def test_random_selection_draws_its_heads_in_training_and_keeps_to_them_in_evaluation(budget):
    torch.manual_seed(0)
    model, images = gated(selection="random", budget=budget, initial_budget=0.55), torch.randn(16, 3, 32, 32)
    vp.set_progress(model, 1.0)
    seen = []
    handle = prune_stacks(model)[0].register_forward_hook(lambda _stack, _args, kept: seen.append(kept.gate))
    torch.testing.assert_close(model(images), model(images))
    model.train()(images)
    handle.remove()
    first, again, training = seen
    assert torch.equal(first.weight, again.weight)
    torch.testing.assert_close(torch.cat([model.eval()(image[None]) for image in images]), model(images))
    assert first.groups[0].heads.unique(dim=0).shape[0] > 2  # images differ
    assert (training.weight > 0).sum(-1).tolist() == [2] * 16
    assert training.weight.sum(-1).tolist() == pytest.approx((4 * training.budget).tolist())
    assert "g.weight" not in gates_of(model)[0].state_dict()
    with vp.losses(model) as aux:
        model(images).sum().backward()
    assert sorted(aux) == ([] if budget else ["budget"])


def test_a_fixed_budget_learns_no_f():
    method = vp.BudgetFormer(budget=0.5).build(HOST)
    assert sorted(name for name, _ in method.named_parameters()) == ["g.bias", "g.weight"]
    assert method.gate(torch.randn(2, 3, 2), mask=None, sizes=None).budget.tolist() == [0.5, 0.5]


def test_a_relevance_that_underflows_has_a_finite_gradient():
    method = built(tau_min=0.1)
    method.train().step(1.0)
    nn.init.constant_(method.g.bias, 0.0)
    with torch.no_grad():
        method.g.bias[0] = 50.0
    method.losses(method.gate(torch.randn(3, 4, 2), mask=None, sizes=None))["entropy"].backward()
    assert method.gate(torch.randn(3, 4, 2), mask=None, sizes=None).relevance[:, 1].tolist() == [0, 0, 0]
    assert method.g.weight.grad.isfinite().all()


@pytest.mark.parametrize("progress", [-0.5, 1.5, math.nan, "half"])
def test_a_progress_outside_the_training_is_refused_and_changes_nothing(progress):
    model = gated()
    with pytest.raises(ValueError, match=r"progress must be in \[0, 1\]"):
        vp.set_progress(model, progress)
    assert gates_of(model)[0].progress.item() == UNTRAINED


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"s_min": 0.6, "s_max": 0.5}, r"0 <= s_min <= s_max <= 1, got s_min=0.6, s_max=0.5"),
        ({"s_max": 1.5}, r"s_max=1.5"),
        ({"tau_min": 0}, r"tau_min must be > 0, got 0"),
        ({"sigma_max": -1}, r"sigma_max must be >= 0, got -1"),
        ({"gamma": math.nan}, r"gamma must be a finite number, got nan"),
        ({"alpha_max": True}, r"alpha_max must be a finite number, got True"),
        ({"initial_budget": 1}, r"initial_budget must be in \(0, 1\), got 1"),
        ({"budget": 0}, r"budget must be in \(0, 1\], or None to learn it, got 0"),
        ({"entropy": "paper"}, r"entropy must be explore or literal, got 'paper'"),
        ({"heads": 0}, r"heads must be a number of heads >= 1, or one per block \(6,4,2,...\), got 0"),
        ({"heads": ()}, r"heads must be a number of heads >= 1"),
        ({"heads": 2.5}, r"got 2.5"),
        ({"seed": 1.5}, r"seed must be a whole number, got 1.5"),
        ({"selection": "best"}, r"selection must be relevance or random, got 'best'"),
    ],
)
def test_wrong_values_are_refused_at_birth(fields, message):
    with pytest.raises(ValueError, match=message):
        vp.BudgetFormer(**fields)


def test_values_become_plain_numbers():
    config = vp.BudgetFormer(heads="2", budget=np.float32(0.5), s_max=np.float64(0.5))
    assert json.loads(json.dumps(config.to_dict()))["budget"] == 0.5
    assert config.heads == 2


@pytest.mark.parametrize(
    ("heads", "message"), [(5, r"1\.\.4, one per block, or None, got 5"), (0, r"got 0"), ([1], r"lists 1 numbers, the model has 2 blocks"), (1.5, r"got 1.5")]
)
def test_numbers_of_heads_that_do_not_fit_are_refused_and_change_nothing(heads, message):
    with pytest.raises(ValueError, match=message):
        gated(heads=heads)
    model = gated(heads=2)
    with pytest.raises(ValueError, match=message):
        vp.set_heads(model, heads)
    assert [gate.heads for gate in gates_of(model)] == [2, 2]
    vp.set_heads(model, [1, 3])
    assert [gate.heads for gate in gates_of(model)] == [1, 3]
    with pytest.raises(ValueError, match=r"no gates in this model"):
        vp.set_heads(tiny_vit(), 1)


def test_inputs_that_are_not_finite_give_outputs_that_are_not_finite_rather_than_an_error_about_shapes():
    model = gated()
    vp.set_progress(model, 1.0)
    images = torch.zeros(2, 3, 32, 32)
    images[1] = math.nan
    logits = model(images)
    assert logits[0].isfinite().all()
    assert logits[1].isnan().all()
