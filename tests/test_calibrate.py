import copy

import pytest
import torch
from torch import nn

import vit_prune as vp
from tests.helpers import tiny_vit
from tests.patch.test_masks import naflex, patches


def batches():
    torch.manual_seed(4)
    return [torch.randn(size, 3, 32, 32) for size in (3, 1, 4)]


@torch.no_grad()
def test_q_mean_is_the_mean_of_the_normed_queries_whatever_the_batches():
    model = tiny_vit(qk_norm=True)
    seen = []
    model.blocks[1].attn.q_norm.register_forward_hook(lambda _m, _a, q: seen.append(q))
    model(torch.cat(batches()))
    vp.calibrate(model, batches(), rank=4)
    torch.testing.assert_close(model.calibration[1].q_mean, seen[0].mean((0, 2)), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_directions_are_those_of_the_largest_second_moment():
    model, inputs = tiny_vit(), []
    model.blocks[0].attn.register_forward_pre_hook(lambda _m, args: inputs.append(args[0]))
    model(torch.cat(batches()))
    x = inputs[0].flatten(0, 1).double()
    vp.calibrate(model, batches(), rank=4)
    directions = model.calibration[0].directions.double()
    assert directions.shape == (32, 4)
    torch.testing.assert_close(directions.T @ directions, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-5)
    captured = (x @ directions).pow(2).sum() / x.pow(2).sum()
    best = torch.linalg.svdvals(x)[:4].pow(2).sum() / x.pow(2).sum()
    assert captured == pytest.approx(best.item(), abs=1e-5)


def test_labels_are_ignored_and_the_mode_is_kept():
    plain, labelled = tiny_vit().train(), tiny_vit()
    vp.calibrate(plain, batches(), rank=4)
    vp.calibrate(labelled, [(images, torch.zeros(len(images))) for images in batches()], rank=4)
    assert torch.equal(plain.calibration[0].q_mean, labelled.calibration[0].q_mean)
    assert plain.training
    assert not labelled.training
    assert not plain.blocks[0].attn._forward_pre_hooks


def test_calibration_is_copied_in_by_patch_and_left_by_unpatch():
    model = vp.calibrate(tiny_vit(), batches(), rank=4)
    vp.patch(model, vp.Columns(keep=0.5, importance="column_mean", dropped="merge"))
    buffers = dict(model.named_buffers())
    assert torch.equal(buffers["blocks.1.attn.prune.columns.q_mean"], model.calibration[1].q_mean)
    assert buffers["blocks.1.attn.prune.columns.directions"].shape == (32, 4)
    other = copy.deepcopy(model)
    buffers["blocks.1.attn.prune.columns.q_mean"].zero_()
    assert model.calibration[1].q_mean.any()
    vp.unpatch(other)
    assert other.calibration[1].q_mean.any()
    vp.patch(other, vp.Columns(keep=0.5, importance="column_mean", dropped="merge", merge_rank=2))
    assert other.blocks[0].attn.prune.columns.directions.shape == (32, 2)


@torch.no_grad()
def test_padding_does_not_enter_the_means():
    model, batch = vp.unpatch(naflex("bias")), patches((6, 7), (3, 4))
    alone = [{name: value[row : row + 1, :count] for name, value in batch.items()} for row, count in ((0, 42), (1, 12))]
    results = [vp.calibrate(model, loader, rank=4).calibration[1].q_mean for loader in ([batch], alone)]
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


def test_each_module_keeps_its_own_mode():
    model = tiny_vit().train()
    model.blocks[0].eval()
    vp.calibrate(model, batches(), rank=4)
    assert [model.training, model.blocks[0].training, model.blocks[1].training] == [True, False, True]


def test_a_calibration_of_another_depth_is_refused():
    model = vp.calibrate(tiny_vit(), batches(), rank=4)
    model.blocks = model.blocks[:1]
    with pytest.raises(ValueError, match=r"the calibration is of 2 blocks, the model has 1"):
        vp.patch(model, vp.Columns(keep=0.5, importance="column_mean"))


@pytest.mark.parametrize(
    ("loader", "rank", "message"),
    [
        ([], 4, "the loader gave no batch"),
        ([torch.zeros(3, 32, 32)], 4, r"float images \[B, C, H, W\], got torch.float32 \(3, 32, 32\)"),
        ([torch.zeros(1, 3, 32, 32, dtype=torch.uint8)], 4, r"float images .* got torch.uint8"),
        ([torch.full((1, 3, 32, 32), float("nan"))], 4, r"the input of block 0 is not finite"),
        ([torch.zeros(1, 3, 32, 32)], 0, r"rank must be in 1..32, got 0"),
        ([torch.zeros(1, 3, 32, 32)], 33, r"rank must be in 1..32, got 33"),
    ],
)
def test_what_cannot_be_calibrated_on_is_refused(loader, rank, message):
    model = tiny_vit()
    with pytest.raises(ValueError, match=message):
        vp.calibrate(model, loader, rank=rank)
    assert not hasattr(model, "calibration")
    assert not model.blocks[0].attn._forward_pre_hooks


def test_unsupported_and_patched_models_are_refused():
    with pytest.raises(TypeError, match=r"Sequential cannot be patched"):
        vp.calibrate(nn.Sequential(), batches())
    with pytest.raises(ValueError, match=r"patched already"):
        vp.calibrate(vp.patch(tiny_vit(), vp.TokenBias()), batches())
