"""Auxiliary losses: collected once, with their gradients, and kept nowhere."""

import copy

import pytest
import torch
from timm.layers import set_reentrant_ckpt
from torch import nn
from torch.utils._pytree import tree_leaves

import vit_prune as vp
from tests.helpers import gates_of, tiny_vit


def gated(**fields) -> nn.Module:
    return vp.patch(tiny_vit(), vp.BudgetFormer(**fields))


def test_losses_are_collected_and_nothing_is_left_on_the_modules():
    model, images = gated(s_max=0.5).train(), torch.randn(3, 3, 32, 32)
    with vp.losses(model) as aux:
        model(images)
    assert sorted(aux) == ["budget", "entropy"]
    assert len(aux.heard) == 2  # blocks
    assert aux.total().item() == pytest.approx(sum(loss.item() for loss in aux.values()))
    aux.total().backward()
    assert all(gate.f2.bias.grad.abs() > 0 for gate in gates_of(model))
    for module in model.modules():
        assert not [leaf for leaf in tree_leaves({**vars(module), "_parameters": 0, "_buffers": 0}) if isinstance(leaf, torch.Tensor)]
    with vp.losses(tiny_vit()) as aux:
        pass
    assert (dict(aux), aux.total()) == ({}, 0.0)


def test_a_collector_inside_another_is_refused_and_the_first_stays_whole():
    model = gated().train()
    with vp.losses(model) as aux:
        with pytest.raises(ValueError, match=r"being collected already"), vp.losses(model):
            pass
        model(torch.randn(1, 3, 32, 32))
    assert len(aux.heard) == 2


@pytest.mark.parametrize("backward_inside", [False, True])
def test_losses_survive_checkpointing_and_are_not_heard_twice(backward_inside):
    images, grads = torch.randn(3, 3, 32, 32), []
    for checkpointing in (False, True):
        model = gated(s_max=0.5).train()
        model.set_grad_checkpointing(checkpointing)
        torch.manual_seed(0)
        with vp.losses(model) as aux:
            loss = model(images).square().mean() + model(images.flip(0)).mean() + aux.total()
            if backward_inside:
                loss.backward()
        assert len(aux.heard) == 4
        if not backward_inside:
            loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(recomputed, plain)


def test_losses_that_reentrant_checkpointing_would_cut_off_are_refused():
    model = gated().train()
    model.set_grad_checkpointing(True)
    set_reentrant_ckpt(True)
    try:
        with pytest.raises(RuntimeError, match=r"would have no gradient"), vp.losses(model):
            model(torch.randn(1, 3, 32, 32))
    finally:
        set_reentrant_ckpt(False)
    with torch.no_grad(), vp.losses(model) as aux:  # asked for without gradients
        model(torch.randn(1, 3, 32, 32))
    assert len(aux.heard) == 2


def test_a_look_without_a_graph_beside_the_training_counts_for_nothing():
    model, images = gated(s_max=0.5, sigma_max=0.0).train(), torch.randn(2, 3, 32, 32)
    with vp.losses(model) as aux:
        model(images)
        with torch.no_grad():
            model(images.flip(0))
    with vp.losses(model) as alone:
        model(images)
    assert len(aux.heard) == 2
    assert aux.total().item() == pytest.approx(alone.total().item())
    aux.total().backward()


def test_the_losses_are_those_of_the_moment_in_which_they_were_collected():
    model = gated(s_max=0.5).train()
    vp.set_progress(model, 0.0)
    with vp.losses(model) as aux:
        model(torch.randn(1, 3, 32, 32))
    before = aux["entropy"].item()
    vp.set_progress(model, 1.0)
    assert aux["entropy"].item() == before < 0


def test_a_copy_made_meanwhile_is_nobodys_to_listen_to():
    model = gated().train()
    with vp.losses(model) as aux:
        other = copy.deepcopy(model)
        other(torch.randn(1, 3, 32, 32))
    assert len(aux.heard) == 0
    with vp.losses(other) as aux:
        other(torch.randn(1, 3, 32, 32))
    assert len(aux.heard) == 2


def test_an_exception_in_the_block_ends_the_collecting():
    model = gated().train()
    with pytest.raises(KeyError), vp.losses(model):
        raise KeyError
    with vp.losses(model):
        model(torch.randn(1, 3, 32, 32))
