"""From what each setting loses alone to a state at a cost, with a cost that adds up."""

from itertools import product

import pytest

from vit_prune.search.greedy import CannotReach, descend, evenly, relaxed
from vit_prune.search.levels import Setting

LEVELS = {"keep": (1.0, 0.5), "r": (0, 10), "heads": (0, 4)}


class Additive:
    """A cost of 1 from which every block takes so much per knob: per 1 of keep, per merge, per head."""

    def __init__(self, keep: float = 0.4, r: float = 0.02, heads: float = 0.05) -> None:
        self.saves = {"keep": keep, "r": r, "heads": heads}

    def share(self, state) -> float:
        saved = sum(self.saves["keep"] * (1 - one.keep) + self.saves["r"] * one.r + self.saves["heads"] * one.heads for one in state)
        return 1 - saved


def line(values, slope, power=1.0):
    """A curve whose loss rises with the way from its first value."""
    return [(value, slope * abs(value - values[0]) ** power) for value in values]


def lost(curves, state):
    return sum(dict(curve)[getattr(state[block], knob)] for (knob, block), curve in curves.items())


KEEPS = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5]


@pytest.fixture
def curves():
    """Two blocks; the second loses three times as much."""
    lines = (("keep", KEEPS, 4), ("r", range(11), 0.01))
    return {(knob, block): line(values, slope * (1 + 2 * block), 2) for block in range(2) for knob, values, slope in lines}


@pytest.mark.parametrize("target", [0.95, 0.8, 0.63, 0.5])
def test_descent_is_at_the_target_within_a_step_and_loses_as_little_as_any_state(curves, target):
    cost = Additive()
    state = descend(cost, curves, target, {"keep": 1, "r": 1})
    assert target - 0.04 < cost.share(state) <= target
    every = (tuple(Setting(keep=keep, r=r) for keep, r in blocks) for blocks in product(product(KEEPS, range(11)), repeat=2))
    best = min(lost(curves, other) for other in every if cost.share(other) <= target)
    assert lost(curves, state) == pytest.approx(best, rel=0.1, abs=0.01)


def test_what_loses_less_is_turned_further(curves):
    first, second = descend(Additive(), curves, 0.8, {"keep": 1, "r": 1})
    assert first.keep < second.keep
    assert first.r > second.r


def test_a_jump_over_a_step_in_the_curve_is_one_move():
    curves = {("r", 0): [(0, 0.0), (1, 5.0), (2, 5.0), (3, 5.0)], ("keep", 0): line(KEEPS, 100)}
    assert descend(Additive(), curves, 0.95, {"keep": 1, "r": 1}) == (Setting(r=3),)


def test_descent_starts_from_the_weakest_value_of_each_curve_that_is_turned():
    curves = {("keep", 0): line([0.8, 0.7], 1), ("r", 0): line([2, 3], 1)}
    assert descend(Additive(), curves, 0.99, {"keep": 1, "r": 1}) == (Setting(keep=0.8, r=2),)
    assert descend(Additive(), curves, 0.99, {"keep": 1}) == (Setting(keep=0.8, r=0),)


def test_weights_shift_the_work_between_knobs_and_one_without_a_weight_rests(curves):
    merges = [sum(one.r for one in descend(Additive(), curves, 0.8, {"keep": 1, "r": weight})) for weight in (0.25, 1, 4)]
    assert merges == sorted(merges)[::-1]
    assert merges[0] > merges[2]
    assert all(one.r == 0 for one in descend(Additive(), curves, 0.8, {"keep": 1}))


def test_descent_that_cannot_reach_its_target_says_how_far_it_comes(curves):
    with pytest.raises(CannotReach, match=r"keep at full strength come to 0\.600 of the unpruned cost, not to 0\.55"):
        descend(Additive(), curves, 0.55, {"keep": 1})


def test_a_setting_that_costs_more_than_it_saves_is_no_move():
    with pytest.raises(CannotReach, match=r"come to 1\.000"):
        descend(Additive(keep=-0.1, r=0), {("keep", 0): line(KEEPS, 1), ("r", 0): line(range(3), 1)}, 0.9, {"keep": 1, "r": 1})


def test_what_is_beyond_the_target_is_given_back_where_it_wins_most():
    cost = Additive()
    curves = {("r", 0): line(range(11), 0.1), ("r", 1): line(range(11), 1.0), ("keep", 0): line(KEEPS, 0.1)}
    state, places = (Setting(keep=0.9, r=5), Setting(r=5)), {("r", 0): 5, ("r", 1): 5, ("keep", 0): 1}
    back = relaxed(cost, curves, places, state, 0.85, {"r": 1, "keep": 1})
    assert back == (Setting(keep=0.9, r=5), Setting(r=1))  # 0.24 was saved, 0.16 is enough; the second block wins ten times as much
    assert places == {("r", 0): 5, ("r", 1): 1, ("keep", 0): 1}
    assert relaxed(cost, curves, dict(places), back, 0.85, {"r": 1, "keep": 1}) == back


def test_weights_say_what_wins_most_by_being_given_back():
    curves = {("r", 0): line(range(11), 0.1), ("r", 1): line(range(11), 0.1), ("heads", 0): line(range(5), 0.3)}
    state, places = (Setting(r=4, heads=1), Setting()), {("r", 0): 4, ("heads", 0): 1, ("r", 1): 0}
    assert relaxed(Additive(), curves, dict(places), state, 0.92, {"r": 1, "heads": 1})[0] == Setting(r=4)
    assert relaxed(Additive(), curves, dict(places), state, 0.92, {"r": 1, "heads": 0.1})[0] == Setting(r=2, heads=1)


def test_even_blocks_are_alike_and_as_weak_as_the_target_lets_them_be():
    cost = Additive()
    state = evenly(cost, LEVELS, 0.8, {"keep": 1}, 2)
    assert state == (state[0],) * 2
    assert state[0] == Setting(keep=pytest.approx(0.75, abs=2e-4))
    assert cost.share(state) <= 0.8 < cost.share((Setting(keep=state[0].keep + 3e-4),) * 2)


def test_weights_of_even_blocks_say_how_far_each_knob_goes():
    far, near = (evenly(Additive(), LEVELS, 0.8, {"keep": 1, "r": weight}, 2)[0] for weight in (4, 0.25))
    assert far.r > near.r
    assert far.keep > near.keep
    assert far.r / 10 == pytest.approx(4 * (1 - far.keep) / 0.5, abs=0.06)


def test_even_blocks_reach_full_strength_of_the_lightest_knob_and_say_so_where_that_is_not_enough():
    cost = Additive(keep=0.4, r=0.02)
    assert evenly(cost, LEVELS, cost.share((Setting(keep=0.5, r=10),) * 2), {"keep": 0.25, "r": 1}, 2) == (Setting(keep=0.5, r=10),) * 2
    with pytest.raises(CannotReach, match=r"keep, alike in all blocks, do not come down to 0\.5 of the unpruned cost"):
        evenly(cost, LEVELS, 0.5, {"keep": 1}, 2)
