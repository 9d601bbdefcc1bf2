import json
from dataclasses import FrozenInstanceError

import pytest

from tests.measure.fake import FakeDevice
from vit_prune.measure.latency import PairedLatency, paired_latency, sign_test_rank


def timed(device: FakeDevice, candidates: dict, **kwargs) -> PairedLatency:
    return paired_latency(candidates, clock=device.host_clock(), **kwargs)


def test_each_candidate_is_billed_its_own_work():
    device = FakeDevice()
    latency = timed(device, {"dense": device.model("dense", 0.002), "pruned": device.model("pruned", 0.001)}, runs=5, warmup=0)
    assert latency.medians_ms == pytest.approx({"dense": 2.0, "pruned": 1.0})
    assert latency.ratio("dense", "pruned").median == pytest.approx(2.0)
    assert device.synchronised == [count for call in range(10) for count in (call, call + 1)]


def test_a_first_call_that_takes_a_second_is_warm_up():
    device = FakeDevice()
    latency = timed(device, {"a": device.model("a", 0.001, first=1.0), "b": device.model("b", 0.001)}, runs=4, warmup=1)
    assert latency.times_ms["a"] == pytest.approx((1.0,) * 4)
    cold = timed(device := FakeDevice(), {"a": device.model("a", 0.001, first=1.0)}, runs=2, warmup=0)
    assert cold.times_ms["a"] == pytest.approx((1000.0, 1.0))


def test_a_slow_first_call_that_is_not_warm_up_does_not_fool_the_median():
    device = FakeDevice()
    latency = timed(device, {"a": device.model("a", 0.001, first=1.0), "b": device.model("b", 0.001)}, runs=9, warmup=0)
    assert latency.ratio("a", "b").median == pytest.approx(1.0)
    assert "too noisy" in latency.noise("a", "b")


def test_candidates_take_turns_and_each_begins_its_share_of_the_rounds():
    """None runs straight after itself, but where the beginner changes."""
    device = FakeDevice()
    timed(device, {name: device.model(name, 0.001) for name in "AB"}, runs=4, warmup=1)
    assert "".join(device.calls) == "AB" + "ABAB" + "BABA"
    device = FakeDevice()
    timed(device, {name: device.model(name, 0.001) for name in "ABC"}, runs=3, warmup=0)
    assert "".join(device.calls) == "ABC" + "BCA" + "CAB"


def test_what_happens_between_the_rounds_is_not_timed():
    device = FakeDevice()
    latency = timed(device, {"a": device.model("a", 0.001)}, runs=3, warmup=2, after_round=lambda: device.queue.append(1.0))
    assert latency.times_ms["a"] == pytest.approx((1.0,) * 3)
    assert device.now == pytest.approx(4.005)  # all rounds but the last were followed by one that waited for it


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


def test_summary_of_known_times():
    summary = PairedLatency({"a": tuple(map(float, range(11)))}).summary("a")
    assert (summary.mean_ms, summary.median_ms, summary.p10_ms, summary.p90_ms) == (5.0, 5.0, 1.0, 9.0)
    assert summary.std_ms == pytest.approx(11**0.5)
    assert summary.throughput(8) == 1600.0  # 8 images in 5 ms
    assert PairedLatency({"a": (3.0,)}).summary("a").std_ms is None


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        ((2.0,) * 20, (1.0,) * 20, None),
        ((2.0,) * 5, (1.0,) * 5, "5 runs are too few to tell"),
        ((2.0, 1.8) * 10, (1.0,) * 20, "the speedup of b lies between 1.800 and 2.000"),
        ((2.0, 4.0) * 10, (1.0, 2.0) * 10, "p10 and p90 of a are 2 and 4 ms"),
    ],
    ids=["still", "few runs", "wide interval", "drift that cancels in the ratios"],
)
def test_a_noisy_machine_is_told(a, b, verdict):
    found = PairedLatency({"a": a, "b": b}).noise("a", "b")
    assert found is verdict is None or verdict in found


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
