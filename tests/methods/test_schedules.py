import numpy as np
import pytest

import vit_prune as vp
from vit_prune.methods.schedules import parse_keep


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0.5, (0.5, 0.5, 0.5)),
        (1, (1, 1, 1)),
        ("0.5", (0.5, 0.5, 0.5)),
        ("linear:1.0:0.3", (1.0, 0.65, 0.3)),
        (vp.linear(1.0, 0.3), (1.0, 0.65, 0.3)),
        ("cosine:1.0:0.5", (1.0, 0.75, 0.5)),
        (vp.cosine(1.0, 0.5), (1.0, 0.75, 0.5)),
        ("step:1.0:0.5:2", (1.0, 1.0, 0.5)),
        (vp.step(1.0, 0.5, 1), (1.0, 0.5, 0.5)),
        ("1,.9,.7", (1, 0.9, 0.7)),
        ([1, 0.9, 0.7], (1, 0.9, 0.7)),
        ((1, 0.9, 0.7), (1, 0.9, 0.7)),
        (vp.constant(0.25), (0.25, 0.25, 0.25)),
        (np.float32(0.5), (0.5, 0.5, 0.5)),
        (["1", ".5", ".25"], (1, 0.5, 0.25)),
        (vp.linear(1, 1 / 3), (1, 2 / 3, 1 / 3)),
    ],
)
def test_one_grammar_for_python_yaml_and_flags(given, expected):
    schedule = parse_keep(given)
    assert schedule.ratios(3) == pytest.approx(expected)
    assert parse_keep(str(schedule)) == schedule


def test_cosine_differs_from_linear_inside():
    assert vp.cosine(1, 0.2).ratios(5)[1] == pytest.approx(1 - 0.8 * (1 - 2**-0.5) / 2)


def test_one_block_takes_the_start():
    assert vp.linear(0.8, 0.2).ratios(1) == (0.8,)
    assert str(parse_keep([0.5])) == "0.5,"


@pytest.mark.parametrize("given", [0, 1.5, -0.5, float("nan"), True, "0", "linear:1:0", "1,0,.5", [0.5, 2], "step:1.0:1.1:3", "cosine:1.2:.5"])
def test_ratios_outside_the_interval_are_refused(given):
    with pytest.raises(ValueError, match=r"keep must be in \(0, 1\], got"):
        parse_keep(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("liner:1:0.5", "unknown keep schedule 'liner'.*did you mean linear"),
        ("linear:1", "linear takes linear:START:END, got 'linear:1'"),
        ("step:1:.5", "step takes step:START:END:BLOCK"),
        ("step:1:.5:2.5", "takes a block number, got 2.5"),
        ("step:1:.5:nan", "takes a block number, got nan"),
        ("half", "got 'half'"),
        ("1,,.5", "got '1,,.5'"),
        ("", "got ''"),
        ([], r"got \[\]"),
        (None, "got None"),
        ({"a": 1}, "got {'a': 1}"),
    ],
)
def test_what_is_not_a_schedule_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        parse_keep(given)


def test_a_list_of_another_length_than_the_model_is_refused():
    with pytest.raises(ValueError, match=r"keep lists 3 ratios, the model has 12 blocks"):
        parse_keep("1,.9,.7").ratios(12)
    with pytest.raises(ValueError, match=r"keep steps at block 13, the model has 12 blocks"):
        vp.step(1.0, 0.5, 13).ratios(12)
