"""Energy and CO2, with a made-up codecarbon, and with the real one where it is installed."""

import importlib
import sys
import time

import pytest
import torch

from tests.measure.fake_energy import fake_codecarbon
from vit_prune.measure import energy
from vit_prune.measure.energy import check_country, metered

CPU = torch.device("cpu")
METER = "codecarbon 9.9, process: RAM(), CPU(Cpu Load)"


@pytest.fixture
def trackers(monkeypatch):
    return fake_codecarbon(monkeypatch)


def test_watt_hours_and_grams_are_of_the_block_and_known_at_its_end(trackers):
    with metered("FRA", CPU) as used:
        assert trackers[0].calls == ["start"]
        assert used["energy_wh"] is None
    assert used == {"energy_wh": 2, "co2_g": 3, "energy_meter": METER}  # of kWh and kg; the idle GPU is not in it
    assert trackers[0].calls == ["start", "stop"]
    settings = {"save_to_file": False, "log_level": "critical", "tracking_mode": "process", "allow_multiple_runs": True}
    assert trackers[0].settings == {"country_iso_code": "FRA", "gpu_ids": [], **settings}


def test_every_visible_gpu_counts_on_cuda_and_none_on_the_cpu(trackers):
    with metered("FRA", torch.device("cuda")) as used:
        pass
    assert "gpu_ids" not in trackers[0].settings
    assert used["energy_meter"] == f"{METER}, GPU (idle)"


def test_without_a_country_nothing_is_metered(trackers):
    with metered(None, CPU) as used:
        pass
    assert used == {"energy_wh": None, "co2_g": None, "energy_meter": None}
    assert trackers == []


def test_the_meter_stops_when_the_work_fails(trackers):
    with pytest.raises(KeyError), metered("FRA", CPU):
        raise KeyError
    assert trackers[0].calls == ["start", "stop"]


def test_a_meter_that_failed_in_silence_is_an_error_not_a_zero(trackers, monkeypatch):
    monkeypatch.setattr(sys.modules["codecarbon"].OfflineEmissionsTracker, "stop", lambda self: None)
    with pytest.raises(ValueError, match="codecarbon gave no reading"), metered("FRA", CPU):
        pass


@pytest.mark.parametrize("code", ["XXX", "fra", "France", ""])
def test_an_unknown_country_is_an_error_not_the_worlds_average(trackers, code):
    with pytest.raises(ValueError, match=f"three letters of ISO 3166-1 as in FRA, got '{code}'"):
        check_country(code)
    check_country("USA")
    check_country(None)


def test_a_missing_package_is_one_sentence_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "codecarbon", None)
    with pytest.raises(ValueError, match=r"energy needs the package codecarbon .*: pip install 'vit_prune\[energy\]'"):
        check_country("FRA")
    check_country(None)
    importlib.reload(energy)  # the module itself does without


def test_the_real_package_meters_and_knows_its_countries(tmp_path, monkeypatch, capsys):
    pytest.importorskip("codecarbon")
    monkeypatch.chdir(tmp_path)
    check_country("FRA")
    with pytest.raises(ValueError, match="got 'XXX'"):
        check_country("XXX")
    readings = []
    for country in ("FRA", "POL"):
        with metered(country, CPU) as used:
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                pass
        readings.append(used)
    for used in readings:
        assert 0 < used["energy_wh"] < 1000 * 0.5 / 3600 * 5  # at most 1,000 W for 0.5 s, with room for a busy machine
        assert used["energy_meter"].startswith("codecarbon ")
        assert "CPU" in used["energy_meter"]
    french, polish = (used["co2_g"] / used["energy_wh"] for used in readings)
    assert 0 < french < polish < 2  # g per Wh
    assert list(tmp_path.iterdir()) == []  # no emissions.csv
    assert "codecarbon" not in "".join(capsys.readouterr())
