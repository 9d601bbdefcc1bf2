"""A codecarbon that meters 2 Wh and 3 g, whatever runs."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

READING = SimpleNamespace(energy_consumed=0.002, emissions=0.003, codecarbon_version="9.9")


def fake_codecarbon(monkeypatch: pytest.MonkeyPatch) -> list:
    """Put the fake in the package's place. Returns: the trackers, as they are made, each with its settings and what was called."""
    made = []

    class OfflineEmissionsTracker:
        def __init__(self, **settings):
            self.settings, self.calls, self._conf = settings, [], {"hardware": ["RAM()", "CPU(Cpu Load)", "GPU (idle)"]}
            made.append(self)

        def start(self):
            self.calls.append("start")

        def stop(self):
            self.calls.append("stop")
            self.final_emissions_data = READING

    package, inner = ModuleType("codecarbon"), ModuleType("codecarbon.input")
    package.OfflineEmissionsTracker = OfflineEmissionsTracker
    inner.DataSource = lambda: SimpleNamespace(get_global_energy_mix_data=lambda: {"FRA": {}, "USA": {}})
    monkeypatch.setitem(sys.modules, "codecarbon", package)
    monkeypatch.setitem(sys.modules, "codecarbon.input", inner)
    return made
