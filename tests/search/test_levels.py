"""What a search may set, and how strong."""

import pytest
import torch

import vit_prune as vp
from vit_prune.prune import prune
from vit_prune.search.levels import Setting, finer, knobs_of, levels_of, neighbours, orders_of, plan_from, rounded, uniform


def test_each_method_has_its_knobs_and_l1_those_that_are_not_0():
    assert knobs_of([vp.ToMe(), vp.Columns(importance="column_mean"), vp.L1(0.5, 0.5)]) == ("r", "keep", "heads", "channels")
    assert knobs_of([vp.L1(heads=0, mlp=0.5)]) == ("channels",)
    assert knobs_of([vp.L1(heads=0.5, mlp=0), vp.TokenBias()]) == ("heads",)


@pytest.mark.parametrize(
    ("methods", "error", "sentence"),
    [
        ([], ValueError, "nothing to search: give ToMe"),
        ([vp.TokenBias()], ValueError, "nothing to search: give ToMe"),
        ([vp.ToMe(4), vp.ToMe(8)], ValueError, "a method is given twice"),
        ([vp.L1(0.5, 0.5), vp.L1(0, 0.5)], ValueError, "a method is given twice"),
        (["tome"], TypeError, "methods must be configs such as .* got 'tome'"),
    ],
)
def test_methods_without_a_knob_or_with_one_twice_are_refused(methods, error, sentence):
    with pytest.raises(error, match=sentence):
        knobs_of(methods)


def test_levels_rise_from_nothing_and_leave_half_of_the_heads_and_whole_groups_of_channels(tiny):
    levels = levels_of(tiny(), ("keep", "r", "heads", "channels"), 64)
    assert levels == {"keep": (1.0, 0.75, 0.5, 0.3), "r": (0, 2, 4), "heads": (0, 1, 2), "channels": (0, 16, 32, 48, 64, 80, 96)}
    assert levels_of(tiny(), ("r",), 10) == {"r": (0, 1)}  # no level twice


def test_levels_are_of_the_block_that_has_least(tiny):
    model = tiny()
    plan = vp.prune(model, vp.L1(0.5, 0.5))
    assert len(plan.blocks[0].heads) == 2
    assert levels_of(model, ("heads", "channels"), 64) == {"heads": (0, 1), "channels": (0, 8, 16, 24, 32, 40, 48)}


def test_a_finer_curve_has_some_two_dozen_values_in_order_and_losses_that_rise():
    assert finer("r", (0, 2, 5), (0, 1, 4)) == [(0, 0), (1, 0.5), (2, 1), (3, 2), (4, 3), (5, 4)]
    assert finer("channels", (0, 16, 32), (0, 4, 2)) == [(0, 0), (8, 2), (16, 4), (24, 4), (32, 4)]  # less lost by more cut is chance
    curve = finer("keep", (1.0, 0.75, 0.5), (0, 1, 3))
    values, losses = zip(*curve, strict=True)
    assert (len(curve), values[0], values[-1]) == (25, 1.0, 0.5)
    assert len(finer("r", (0, 480, 960), (0, 1, 3))) == 25
    assert list(values) == sorted(values, reverse=True)
    assert dict(curve)[0.75] == pytest.approx(1)
    assert list(losses) == sorted(losses)


def test_a_finer_curve_of_values_between_levels_ends_where_they_end():
    assert [value for value, _ in finer("keep", (0.7235, 0.7), (0, 1))] == [0.7235, 0.7117, 0.7]


@pytest.mark.parametrize(
    ("knob", "levels", "value", "expected"),
    [
        ("keep", (1.0, 0.3), 0.5, [0.395, 0.605]),
        ("keep", (1.0, 0.3), 1.0, [0.895]),
        ("keep", (1.0, 0.3), 0.3, [0.405]),
        ("keep", (1.0, 0.3), 0.35, [0.3, 0.455]),
        ("r", (0, 2, 4), 4, [3]),
        ("r", (0,), 0, []),
        ("heads", (0, 1, 2), 1, [0, 2]),
        ("channels", (0, 48, 96), 48, [32, 56]),
    ],
)
def test_neighbours_differ_and_stay_inside_of_the_levels(knob, levels, value, expected):
    assert neighbours(knob, levels, value) == pytest.approx(expected)


def test_knobs_take_whole_numbers_and_whole_groups():
    assert [rounded("keep", 0.123456), rounded("r", 2.6), rounded("heads", 1.2), rounded("channels", 31.9)] == [0.1235, 3, 1, 24]


def test_uniform_turns_each_knob_through_its_range_and_no_further():
    levels = {"keep": (1.0, 0.5), "r": (0, 10)}
    assert uniform(levels, {"keep": 0.5, "r": 0.2}, 2) == (Setting(keep=0.75, r=2),) * 2
    assert uniform(levels, {"r": 3.0}, 1) == (Setting(r=10),)


def test_orders_begin_with_the_weakest(tiny):
    model = tiny()
    with torch.no_grad():
        model.blocks[1].attn.proj.weight.unflatten(1, (4, -1))[:, 2] = 0
        model.blocks[1].attn.qkv.weight.unflatten(0, (3, 4, -1))[:, 2] = 0
        model.blocks[2].mlp.fc2.weight[:, 77] = 0
        model.blocks[2].mlp.fc1.weight[77] = 0
    orders = orders_of(model, ("heads", "channels"))
    assert (orders[1].heads[0], orders[2].channels[0]) == (2, 77)
    assert sorted(orders[0].heads.tolist()) == [0, 1, 2, 3]
    assert not len(orders_of(model, ("heads",))[0].channels)


def test_a_plan_removes_the_weakest_of_each_block_and_nothing_where_nothing_is_set(tiny):
    model = tiny()
    orders = orders_of(model, ("heads", "channels"))
    assert plan_from(model, (Setting(keep=0.5, r=3),) * 3, orders) is None
    plan = plan_from(model, (Setting(), Setting(heads=1), Setting(channels=16)), orders)
    assert [len(block.heads) for block in plan.blocks] == [4, 3, 4]
    assert [len(block.channels) for block in plan.blocks] == [128, 128, 112]
    assert orders[1].heads[0].item() not in plan.blocks[1].heads
    assert not set(orders[2].channels[:16].tolist()) & set(plan.blocks[2].channels)
    assert plan_from(model, (Setting(heads=1),) * 3, orders) == prune(tiny(), vp.L1(0.25, 0))


def test_a_plan_of_a_model_that_was_cut_before_is_in_the_numbering_of_the_original(tiny):
    model = tiny()
    prune(model, vp.L1(0.25, 0.5))
    plan = plan_from(model, (Setting(heads=1, channels=8),) * 3, orders_of(model, ("heads", "channels")))
    assert [(block.num_heads, len(block.heads), block.num_channels, len(block.channels)) for block in plan.blocks] == [(4, 2, 128, 56)] * 3
    assert prune(tiny(), plan) == prune(model, plan) == plan
