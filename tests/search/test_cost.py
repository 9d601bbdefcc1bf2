"""What a state costs is what the patched and cut model costs."""

import copy
import random
from types import SimpleNamespace

import pytest
import torch

import vit_prune as vp
from vit_prune.measure.macs import macs
from vit_prune.search import cost as module
from vit_prune.search.bench import Bench
from vit_prune.search.cost import LatencyCost, MacsCost, not_negative
from vit_prune.search.found import configured
from vit_prune.search.levels import Setting, orders_of, plan_from

SIZE = (32, 32)
COLUMNS = [
    vp.Columns(importance="column_mean", dropped="merge"),
    vp.Columns(importance="column_mean", sampling="systematic", dropped="merge"),
    vp.Columns(importance="random"),
    vp.Columns(importance="class_attention"),
]


def benched(model, methods, images, knobs=()):
    """A bench and what its states cost."""
    bench = Bench(model, methods, [(batch, None) for batch in images], orders_of(model, knobs), "features")
    return bench, MacsCost(bench, SIZE)


def random_states(count, **ranges):
    """Three blocks each."""
    draw = random.Random(0)
    return [tuple(Setting(**{knob: draw.choice(values) for knob, values in ranges.items()}) for _ in range(3)) for _ in range(count)]


def really(model, methods, images, state, orders):
    """The share of MACs of the model that is cut and patched."""
    changed = copy.deepcopy(model)
    plan = plan_from(model, state, orders)
    if plan is not None:
        del changed.calibration
        vp.prune(changed, plan)
        vp.calibrate(changed, images)
    configs = configured(methods, state)
    return macs(vp.patch(changed, configs) if configs else changed).total / macs(model).total


@pytest.mark.parametrize("columns", COLUMNS, ids=lambda one: f"{one.importance} {one.sampling}")
def test_the_share_of_a_state_of_columns_and_merges_is_exact(calibrated, images, columns):
    methods = [vp.ToMe(), columns]
    bench, cost = benched(calibrated, methods, images)
    assert cost.share(bench.dense) == 1
    for state in random_states(8, keep=(1.0, 0.97, 0.5, 0.31), r=(0, 1, 3, 20)):
        assert cost.share(state) == really(calibrated, methods, images, state, bench.orders), state


def test_merges_alone_are_exact_too_and_are_seen_by_later_blocks(calibrated, images):
    bench, cost = benched(calibrated, [vp.ToMe()], images)
    for state in random_states(6, r=(0, 1, 8, 40)):
        assert cost.share(state) == really(calibrated, [vp.ToMe()], images, state, bench.orders), state
    first, second, third = cost.blocks((Setting(r=8), Setting(), Setting()))
    assert second == third < cost.blocks(bench.dense)[1]
    assert first < cost.blocks(bench.dense)[0]


def test_heads_and_channels_are_exact_where_nothing_is_selected(calibrated, images):
    bench, cost = benched(calibrated, [], images, ("heads", "channels"))
    for state in random_states(6, heads=(0, 1, 2), channels=(0, 8, 64)):
        assert cost.share(state) == pytest.approx(really(calibrated, [], images, state, bench.orders), rel=1e-12), state


def test_all_knobs_together_are_within_a_hundredth(calibrated, images):
    methods = [vp.ToMe(), COLUMNS[0]]
    bench, cost = benched(calibrated, methods, images, ("heads", "channels"))
    for state in random_states(8, keep=(1.0, 0.5), r=(0, 3), heads=(0, 1, 2), channels=(0, 8, 64)):
        assert cost.share(state) == pytest.approx(really(calibrated, methods, images, state, bench.orders), rel=0.01), state


def test_a_cost_does_not_depend_on_what_was_asked_before(calibrated, images):
    bench, cost = benched(calibrated, [vp.ToMe(), COLUMNS[0]], images)
    states = random_states(6, keep=(1.0, 0.5), r=(0, 3))
    forth, back = [cost.share(state) for state in states], [benched(calibrated, [vp.ToMe(), COLUMNS[0]], images)[1].share(state) for state in states[::-1]]
    assert forth == back[::-1]
    bench.set(states[0])
    assert [cost.share(state) for state in states] == forth


def test_least_squares_solve_a_known_system():
    rows = torch.rand(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    truth = torch.tensor([2.0, 0.0, 0.5, 3.0], dtype=torch.float64)
    assert torch.allclose(not_negative(rows, rows @ truth), truth, atol=1e-9)


def test_least_squares_give_no_negative_and_leave_out_what_is_not_there():
    rows = torch.rand(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows[:, 2] = 0
    solution = not_negative(rows, rows @ torch.tensor([2.0, -0.3, 9.0, 3.0], dtype=torch.float64))
    assert solution.min() >= 0
    assert (solution[1], solution[2]) == (0, 0)
    assert solution[[0, 3]].min() > 1


def test_least_squares_weigh_relative_errors():
    rows = torch.ones(3, 1, dtype=torch.float64)
    solution = not_negative(rows, torch.tensor([1.0, 1.0, 100.0], dtype=torch.float64))
    assert solution.item() < 2  # the mean would be 34


def clock_of(monkeypatch, ms_per_token=0.01, outside_ms=1.0, depth=3, ratio=0.8):
    """Every block takes so long per token, whatever is set in it; each call is made once."""

    def timed(calls, **_):
        for call in calls.values():
            call()
        tokens = {name: int(name.split()[0]) for name in calls if name[0].isdigit()} | {"block": 65}
        medians = {name: ms_per_token * count for name, count in tokens.items()} | {"dense": outside_ms + depth * 65 * ms_per_token}
        return SimpleNamespace(medians_ms=medians, ratio=lambda *names: SimpleNamespace(median=ratio, names=names))

    monkeypatch.setattr(module, "paired_latency", timed)


def fit_by_macs(cost: LatencyCost) -> None:
    """In the place of LatencyCost._fit: time is as the MACs of the blocks are."""
    cost.rates = torch.tensor([1.0, 1.0, 1.0, 0, 0, 0, 0], dtype=torch.float64)
    cost.outside, cost.whole = 0.0, sum(cost.blocks(cost.bench.dense))


@pytest.mark.parametrize("methods", [[vp.ToMe(), COLUMNS[0]], [vp.ToMe()], [COLUMNS[2]]], ids=["both", "ToMe", "columns"])
def test_time_is_a_block_times_the_depth_and_what_is_around_the_blocks(calibrated, images, monkeypatch, methods):
    clock_of(monkeypatch)
    bench = Bench(calibrated, methods, [(images[0], None)], orders_of(calibrated, ()), "features")
    cost = LatencyCost(bench, SIZE, calibrated)
    assert (cost.whole, cost.outside) == (pytest.approx(2.95), pytest.approx(1.0))
    assert cost.share(bench.dense) == pytest.approx(1, abs=1e-6)
    assert cost.blocks(bench.dense) == pytest.approx([0.65] * 3)
    if isinstance(methods[0], vp.ToMe):
        assert cost.blocks((Setting(r=2), Setting(), Setting())) == pytest.approx([0.65, 0.63, 0.63], rel=0.01)


def test_a_model_is_timed_beside_the_unpruned_one_and_stays_as_it_is(calibrated, images, monkeypatch):
    clock_of(monkeypatch, ratio=0.77)
    bench = Bench(calibrated, [COLUMNS[0]], [(images[0], None)], orders_of(calibrated, ()), "features")
    cost = LatencyCost(bench, SIZE, calibrated)
    found = vp.patch(copy.deepcopy(calibrated), vp.Columns(keep=0.5, importance="column_mean"))
    before = list(found.state_dict())
    assert cost.measure(found) == 0.77
    assert list(found.state_dict()) == before


def test_a_model_that_is_only_cut_is_timed_too(tiny, calibrated, images, monkeypatch):
    clock_of(monkeypatch)
    cut = tiny()
    vp.prune(cut, vp.L1(0.5, 0))
    bench = Bench(calibrated, [], [(images[0], None)], orders_of(calibrated, ("heads",)), "features")
    assert LatencyCost(bench, SIZE, calibrated).measure(cut) == 0.8
