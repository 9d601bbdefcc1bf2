"""How one call is timed on a device: from an idle device to an idle device, with the call between."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

MS_PER_SECOND = 1_000


class Clock(Protocol):
    """Times one call. Whoever measures warms up; a clock bills what it is given."""

    def time_ms(self, call: Callable[[], object]) -> float:
        """Milliseconds of the call and of all the work that it leaves on the device, and of no work that was there before."""


class Event(Protocol):
    """A stamp that the device sets when it comes to it, such as torch.cuda.Event(enable_timing=True)."""

    def record(self) -> None: ...

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds."""


def nothing() -> None:
    """The synchronisation of a device whose calls return when their work is done."""


@dataclass(frozen=True)
class HostClock:
    """The host's own clock. `now` is in seconds; `synchronize` waits until the device has finished."""

    synchronize: Callable[[], object] = nothing
    now: Callable[[], float] = time.perf_counter

    def time_ms(self, call: Callable[[], object]) -> float:
        self.synchronize()
        start = self.now()
        call()
        self.synchronize()
        return (self.now() - start) * MS_PER_SECOND


@dataclass(frozen=True)
class EventClock:
    """Stamps of the device, which leave out the way of the synchronisation to the host and back. They are read when the last is set."""

    synchronize: Callable[[], object]
    new_event: Callable[[], Event]

    def time_ms(self, call: Callable[[], object]) -> float:
        start, end = self.new_event(), self.new_event()
        self.synchronize()
        start.record()
        call()
        end.record()
        self.synchronize()
        return start.elapsed_time(end)


def clock_for(device: torch.device) -> Clock:
    """CUDA events on the current stream of a CUDA device, perf_counter elsewhere."""
    if device.type != "cuda":
        return HostClock()
    use(device)  # events are recorded on the current device
    return EventClock(lambda: torch.cuda.synchronize(device), lambda: torch.cuda.Event(enable_timing=True))


def use(device: torch.device) -> None:
    """Make a CUDA device the current one; "cuda" without a number is the current one already, and PyTorch refuses it here."""
    if device.index is not None:
        torch.cuda.set_device(device)
