import json
from dataclasses import FrozenInstanceError

import pytest

from vit_prune.measure.latency import PairedLatency, paired_latency, sign_test_rank
from vit_prune.measure.report import latency_table


class FakeDevice:
    """Calls return at once and leave work behind; only `synchronize` moves the clock, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pending = 0.0
        self.calls = []

    def model(self, name: str, seconds: float, first: float | None = None):
        def call() -> None:
            self.pending += first if first is not None and name not in self.calls else seconds
            self.calls.append(name)

        return call

    def synchronize(self) -> None:
        self.now += self.pending
        self.pending = 0.0


def timed(device: FakeDevice, candidates: dict, **kwargs) -> PairedLatency:
    return paired_latency(candidates, synchronize=device.synchronize, clock=lambda: device.now, **kwargs)


def test_work_that_is_still_running_is_waited_for():
    """Without synchronize every call takes no time at all."""
    device = FakeDevice()
    latency = timed(device, {"dense": device.model("dense", 0.002), "pruned": device.model("pruned", 0.001)}, runs=5, warmup=0)
    assert latency.medians_ms == pytest.approx({"dense": 2.0, "pruned": 1.0})
    assert latency.ratio("dense", "pruned").median == pytest.approx(2.0)


def test_work_left_by_others_is_not_billed_to_the_first_call():
    device = FakeDevice()
    device.pending = 10.0
    assert timed(device, {"a": device.model("a", 0.001)}, runs=1, warmup=0).times_ms["a"] == pytest.approx((1.0,))


def test_a_first_call_that_takes_a_second_is_warm_up():
    device = FakeDevice()
    latency = timed(device, {"a": device.model("a", 0.001, first=1.0), "b": device.model("b", 0.001)}, runs=4, warmup=1)
    assert latency.times_ms["a"] == pytest.approx((1.0,) * 4)
    cold = timed(device := FakeDevice(), {"a": device.model("a", 0.001, first=1.0)}, runs=2, warmup=0)
    assert cold.times_ms["a"] == pytest.approx((1000.0, 1.0))


def test_candidates_take_turns_in_every_round():
    device = FakeDevice()
    timed(device, {name: device.model(name, 0.001) for name in "AB"}, runs=2, warmup=1)
    assert device.calls == ["A", "B"] * 3


def test_the_ratio_is_of_pairs_so_that_drift_cancels():
    drifting = PairedLatency({"a": (2.0, 4.0, 20.0, 40.0), "b": (1.0, 2.0, 10.0, 20.0)})
    ratio = drifting.ratio("a", "b")
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.0)


def test_interval_is_the_sign_tests():
    """Tables of the sign test: n = 20 gives the 6th and 15th value, 95.86 %; below 6 values nothing reaches 95 %."""
    assert [sign_test_rank(n, 0.95) for n in (5, 6, 20, 100)] == [0, 1, 6, 40]
    ratio = PairedLatency({"a": tuple(map(float, range(20, 0, -1))), "b": (1.0,) * 20}).ratio("a", "b")
    assert (ratio.median, ratio.low, ratio.high) == (10.5, 6.0, 15.0)
    assert ratio.coverage == pytest.approx(0.9586, abs=1e-4)
    few = PairedLatency({"a": (1.0, 3.0, 2.0), "b": (1.0,) * 3}).ratio("a", "b")
    assert (few.low, few.high, few.coverage) == (1.0, 3.0, 0.75)


@pytest.mark.parametrize("wrong", [{"runs": 0}, {"warmup": -1}, {"candidates": {}}])
def test_nothing_to_time_is_refused(wrong):
    arguments = {"candidates": {"a": lambda: None}, "runs": 1, "warmup": 0, **wrong}
    with pytest.raises(ValueError, match="need a candidate, runs >= 1 and warmup >= 0"):
        paired_latency(arguments.pop("candidates"), **arguments)


def test_any_callable_on_the_real_clock_and_a_frozen_json_able_result():
    latency = paired_latency({"a": lambda: sum(range(1000)), "b": list}, runs=3, warmup=1)
    data = json.loads(json.dumps(latency.to_dict()))
    assert len(data["times_ms"]["a"]) == 3
    assert data["speedups"]["a"]["median"] == 1.0
    assert min(latency.times_ms["a"]) > 0
    with pytest.raises(FrozenInstanceError):
        latency.times_ms = {}


def test_latency_table_shows_speedup_against_the_first():
    table = latency_table(PairedLatency({"dense": (4.0, 4.0), "pruned": (2.0, 2.0)})).splitlines()
    assert table[0].split() == ["candidate", "median", "ms", "speedup", "interval", "coverage"]
    assert table[3].split() == ["pruned", "2.000", "2.000x", "2.000", "to", "2.000", "50.0%"]
