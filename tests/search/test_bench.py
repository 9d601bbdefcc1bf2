"""What a setting loses on the bench is what the model that is really patched and cut loses."""

import copy

import pytest
import torch
import torch.nn.functional as F

import vit_prune as vp
from vit_prune.methods.stack import prune_stacks
from vit_prune.search.bench import Bench
from vit_prune.search.found import configured
from vit_prune.search.levels import Setting, orders_of, plan_from

METHODS = [vp.ToMe(), vp.Columns(importance="column_mean", dropped="merge")]
MIXED = (Setting(keep=0.5, r=3), Setting(keep=1.0, r=0, heads=1), Setting(keep=0.3, r=5, channels=64))


def bench_of(model, batches, fidelity="features"):
    batches = [batch if isinstance(batch, tuple) else (batch, None) for batch in batches]
    return Bench(model, METHODS, batches, orders_of(model, ("heads", "channels")), fidelity)


@pytest.mark.parametrize("fidelity", ["features", "logits", "labels"])
def test_nothing_set_loses_nothing_also_after_much_was_set(calibrated, labelled, fidelity):
    bench = bench_of(calibrated, labelled, fidelity)
    assert bench.loss(bench.dense) == pytest.approx(0, abs=1e-6)
    assert abs(bench.loss(MIXED)) > 1e-3
    assert bench.loss(bench.dense) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("state", [(Setting(),) * 3, MIXED], ids=["dense", "mixed"])
def test_what_a_change_loses_is_what_the_whole_state_loses_from_the_start(calibrated, images, state):
    bench = bench_of(calibrated, images)
    changes = [(0, Setting(keep=0.3)), (1, Setting(r=4, channels=96)), (2, Setting(heads=2)), (0, Setting(heads=2, r=6)), (2, Setting())]
    done = []
    losses = bench.single_losses(state, changes, lambda: done.append(1))
    whole = [bench.loss((*state[:block], setting, *state[block + 1 :])) for block, setting in changes]
    assert losses == pytest.approx(whole, abs=1e-6)
    assert len(done) == len(changes) * len(images)
    assert len(set(losses)) == len(changes)


def test_columns_and_merges_on_the_bench_are_those_of_the_patched_model(calibrated, images):
    bench = bench_of(calibrated, images)
    state = (Setting(keep=0.5, r=3), Setting(keep=0.7), Setting(keep=0.3, r=5))
    bench.set(state)
    with torch.no_grad(), vp.patched(copy.deepcopy(calibrated), list(configured(METHODS, state))) as model:
        assert torch.equal(bench.forward(images[0]), model.forward_features(images[0]))


def test_heads_and_channels_masked_on_the_bench_are_those_that_are_cut(calibrated, images):
    bench = bench_of(calibrated, images)
    state = (Setting(heads=2), Setting(channels=48), Setting(heads=1, channels=96))
    bench.set(state)
    model = copy.deepcopy(calibrated)
    del model.calibration
    vp.prune(model, plan_from(calibrated, state, bench.orders))
    with torch.no_grad():
        assert torch.allclose(bench.forward(images[0]), model.forward_features(images[0]), atol=1e-5)
        assert not torch.allclose(calibrated.forward_features(images[0]), model.forward_features(images[0]), atol=1e-2)


def test_a_loss_of_features_is_a_cosine_of_the_patches_alone(calibrated, images):
    bench = bench_of(calibrated, images)
    bench.set(MIXED)
    with torch.no_grad():
        cosines = torch.cat([F.cosine_similarity(bench.forward(batch)[:, 1:], calibrated.forward_features(batch)[:, 1:], dim=-1) for batch in images])
    assert bench.loss(MIXED) == pytest.approx(1 - cosines.mean().item(), abs=1e-6)


def test_a_loss_by_logits_is_the_divergence_of_each_image_and_by_labels_the_cross_entropy_that_is_added(calibrated, labelled):
    by_logits, by_labels = bench_of(calibrated, labelled, "logits"), bench_of(calibrated, labelled, "labels")
    images, labels = (torch.cat(parts) for parts in zip(*labelled, strict=True))
    by_logits.set(MIXED)
    with torch.no_grad():
        before, after = calibrated(images), by_logits.model(images)
    before, after = before.log_softmax(-1), after.log_softmax(-1)
    assert by_logits.loss(MIXED) == pytest.approx((before.exp() * (before - after)).sum(-1).mean().item(), abs=1e-5)
    assert by_labels.loss(MIXED) == pytest.approx((F.nll_loss(after, labels) - F.nll_loss(before, labels)).item(), abs=1e-5)


@pytest.mark.parametrize("fidelity", ["features", "logits", "labels"])
def test_every_image_counts_alike_whatever_its_batch(calibrated, labelled, fidelity):
    images, labels = (torch.cat(parts) for parts in zip(*labelled, strict=True))
    uneven = bench_of(calibrated, [(images[:1], labels[:1]), (images[1:], labels[1:])], fidelity)
    whole = bench_of(calibrated, [(images, labels)], fidelity)
    assert uneven.loss(MIXED) == pytest.approx(whole.loss(MIXED), abs=1e-6)
    change = [(1, Setting(keep=0.3, heads=2))]
    assert uneven.single_losses(MIXED, change, int) == pytest.approx(whole.single_losses(MIXED, change, int), abs=1e-6)


def test_the_given_model_is_not_changed_not_even_its_mode(calibrated, images):
    calibrated.train()
    calibrated.blocks[0].attn.eval()
    before = {name: value.clone() for name, value in calibrated.state_dict().items()}
    modes = [module.training for module in calibrated.modules()]
    bench_of(calibrated, images).loss(MIXED)
    assert not prune_stacks(calibrated)
    assert all(torch.equal(value, before[name]) for name, value in calibrated.state_dict().items())
    assert [module.training for module in calibrated.modules()] == modes
    assert all(parameter.requires_grad for parameter in calibrated.parameters())
