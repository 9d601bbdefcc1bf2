"""A device on which calls return at once and leave work behind; only `synchronize` moves the clock, in seconds."""

from collections.abc import Callable

from vit_prune.measure.clock import MS_PER_SECOND, EventClock, HostClock


class FakeDevice:
    def __init__(self) -> None:
        self.now = 0.0
        self.queue = []  # seconds of work, and events that wait for their turn
        self.calls = []
        self.synchronised = []  # the number of calls before each synchronisation

    def model(self, name: str, seconds: float, first: float | None = None) -> Callable[[], None]:
        def call() -> None:
            self.queue.append(first if first is not None and name not in self.calls else seconds)
            self.calls.append(name)

        return call

    def synchronize(self) -> None:
        self.synchronised.append(len(self.calls))
        for entry in self.queue:
            if isinstance(entry, FakeEvent):
                entry.seconds = self.now
            else:
                self.now += entry
        self.queue = []

    def host_clock(self) -> HostClock:
        return HostClock(self.synchronize, lambda: self.now)

    def event_clock(self) -> EventClock:
        return EventClock(self.synchronize, lambda: FakeEvent(self))


class FakeEvent:
    """Stamped when the device comes to it; read before, it is an error, as on CUDA."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.seconds = device, None

    def record(self) -> None:
        self.device.queue.append(self)

    def elapsed_time(self, end: "FakeEvent") -> float:
        if self.seconds is None or end.seconds is None:
            raise RuntimeError("the event was not recorded yet")
        return (end.seconds - self.seconds) * MS_PER_SECOND
