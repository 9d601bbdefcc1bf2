"""Dials are turned until the MACs of the real model are at a share, and no further."""

import pytest
import torch

import vit_prune as vp
from tests.helpers import tiny_vit
from vit_prune.measure.macs import macs
from vit_prune.methods.stack import prune_stacks
from vit_prune.sweep.strength import OutOfReach, pruned, strength_for, turned

SIZE = (32, 32)
TOME, COLUMNS = {"name": "tome", "r": "auto"}, {"name": "columns", "keep": "auto", "importance": "column_mean", "dropped": "merge"}
MLP, BOTH = {"name": "l1", "mlp": "auto"}, {"name": "l1", "heads": "auto", "mlp": "auto"}
CASES = {
    "r": ([TOME], 0.8, 0.03),
    "keep": ([COLUMNS], 0.8, 0.01),
    "mlp": ([MLP], 0.8, 0.05),
    "heads and mlp": ([BOTH], 0.6, 0.1),
    "r and keep": ([TOME, COLUMNS], 0.7, 0.03),
    "r and little keep": ([TOME, COLUMNS | {"weight": 0.25}], 0.7, 0.03),
    "l1 and keep": ([MLP, COLUMNS], 0.6, 0.05),
    "a fixed r and keep": ([{"name": "tome", "r": 4}, COLUMNS], 0.8, 0.01),
}


@pytest.fixture(scope="module")
def model():
    """3 blocks of 4 heads and 128 channels on 64 patches."""
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return vp.calibrate(tiny_vit(patch_size=4, depth=3), [images])


@pytest.mark.parametrize(("entries", "share", "step"), CASES.values(), ids=CASES)
def test_macs_are_at_the_share_or_one_step_below(model, entries, share, step):
    dials = strength_for(model, entries, share, SIZE)
    reached = macs(pruned(model, entries, dials, [torch.zeros(1, 3, 32, 32)]), SIZE).total / macs(model, SIZE).total
    assert share - step < reached <= share


def test_only_dials_on_auto_are_turned(model):
    entries = [{"name": "tome", "r": 4}, COLUMNS, {"name": "l1", "heads": 0.25, "mlp": "auto"}]
    assert [list(turned(entry, 0.5, model, 64)) for entry in entries] == [[], ["keep"], ["mlp"]]


def test_a_weight_turns_one_that_much_further(model):
    assert turned(TOME | {"weight": 2}, 0.25, model, 64) == turned(TOME, 0.5, model, 64)
    assert turned(TOME | {"weight": 9}, 0.9, model, 64) == turned(TOME, 1.0, model, 64)
    merges, keeps = zip(*[(dials[0]["r"], dials[1]["keep"]) for dials in (mixed(model, 0.25), mixed(model, 1), mixed(model, 4))], strict=True)
    assert merges[0] > merges[1] > merges[2]
    assert keeps[0] > keeps[1] > keeps[2]


def mixed(model, weight):
    return strength_for(model, [TOME, COLUMNS | {"weight": weight}], 0.75, SIZE)


def test_no_strength_does_nothing_and_full_strength_leaves_something(model):
    assert turned(TOME, 0, model, 64) == {"r": 0}
    assert turned(COLUMNS, 0, model, 64) == {"keep": 1.0}
    assert turned(BOTH, 0, model, 64) == {"heads": 0.0, "mlp": 0.0}
    assert turned(COLUMNS, 1, model, 64)["keep"] > 0
    strongest = pruned(model, [BOTH], [turned(BOTH, 1, model, 64)])
    assert [(block.attn.num_heads, block.mlp.fc2.in_features) for block in strongest.blocks] == [(1, 16)] * 3


def test_what_is_cut_is_counted_in_whole_heads_and_groups(model):
    assert turned(BOTH, 0.5, model, 64) == {"heads": 0.25, "mlp": 56 / 128}  # 1.8 heads, 57.6 channels


@pytest.mark.parametrize(("entry", "share"), [(TOME, 0.3), (COLUMNS, 0.4), ({"name": "l1", "heads": "auto"}, 0.5)])
def test_a_share_that_is_out_of_reach_says_how_far_it_comes(model, entry, share):
    with pytest.raises(OutOfReach, match=r"at full strength it comes to 0\.\d{3} of the MACs"):
        strength_for(model, [entry], share, SIZE)


def test_the_given_model_is_left_as_it_is_and_what_is_cut_is_calibrated_anew(model):
    held, before = model.calibration, {name: value.clone() for name, value in model.state_dict().items()}
    entries = [BOTH, COLUMNS]
    images = [torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))]
    changed = pruned(model, entries, strength_for(model, entries, 0.6, SIZE), images)
    assert model.calibration is held
    assert not prune_stacks(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert changed.calibration[0].q_mean.shape[0] == changed.blocks[0].attn.num_heads < 4
    assert prune_stacks(changed)


def test_a_cut_that_is_too_weak_to_remove_anything_leaves_its_share_to_the_others(model):
    heads = {"name": "l1", "heads": "auto"}
    tome, cut = strength_for(model, [TOME, heads], 0.95, SIZE)
    assert cut == {"heads": 0.0}
    assert tome == strength_for(model, [TOME], 0.95, SIZE)[0]
    [cut] = strength_for(model, [heads | {"mlp": 0.25}], 0.9, SIZE)
    assert cut == {"heads": 0.0}
