import pytest
import torch
from torch.cuda._utils import _get_device_index

from tests.measure.fake import FakeDevice
from vit_prune.measure.clock import EventClock, HostClock, clock_for

CLOCKS = {"host": FakeDevice.host_clock, "events": FakeDevice.event_clock}


@pytest.fixture(params=CLOCKS)
def timed(request):
    """A fake device and its clock: the host's, or stamps of the device."""
    device = FakeDevice()
    return device, CLOCKS[request.param](device)


def test_work_that_is_still_running_is_waited_for(timed):
    """Without the synchronisation after it a call takes no time at all."""
    device, clock = timed
    assert clock.time_ms(device.model("a", 0.002)) == pytest.approx(2.0)


def test_work_left_by_others_is_not_billed_to_the_call(timed):
    """Without the synchronisation before it a call pays for what was queued."""
    device, clock = timed
    device.queue.append(10.0)
    assert clock.time_ms(device.model("a", 0.001)) == pytest.approx(1.0)


def test_the_device_is_idle_before_and_after_each_call(timed):
    device, clock = timed
    clock.time_ms(device.model("a", 0.001))
    assert device.synchronised == [0, 1]


def test_events_leave_out_how_long_the_host_waits():
    class SlowToAnswer(FakeDevice):
        def synchronize(self):
            super().synchronize()
            self.now += 0.5

    device = SlowToAnswer()
    assert device.event_clock().time_ms(device.model("a", 0.001)) == pytest.approx(1.0)
    assert device.host_clock().time_ms(device.model("a", 0.001)) == pytest.approx(501.0)


def test_the_cpu_has_the_hosts_clock():
    clock = clock_for(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    assert clock.time_ms(lambda: sum(range(10_000))) > 0


@pytest.mark.gpu
def test_cuda_events_see_work_that_the_host_does_not_wait_for():
    device = torch.device("cuda")
    clock = clock_for(device)
    assert isinstance(clock, EventClock)
    x = torch.randn(4096, 4096, device=device)
    clock.time_ms(lambda: x @ x)
    assert clock.time_ms(lambda: [x @ x for _ in range(20)]) > 5 * clock.time_ms(lambda: x @ x)


def test_cuda_without_a_number_is_the_current_device(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(_get_device_index(device)))  # raises as PyTorch's does
    for name in ("cuda", "cuda:1"):
        assert isinstance(clock_for(torch.device(name)), EventClock)
    assert chosen == [1]
