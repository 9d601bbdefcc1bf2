"""Energy and CO2 of a stretch of work, metered by codecarbon (extra `energy`), which is imported only where they are asked for.

It reads counters where there are some that it may read (RAPL, NVML), and estimates where not: the CPU from its load and a table of chips, memory always.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

ENERGY = ("energy_wh", "co2_g")
MODE = "process"  # an estimate from the load counts this process and its children; counters are the whole chip's in any mode
ENERGY_UNITS = {
    "energy_wh": "watt-hours of CPU, memory and GPU, for the whole evaluation of a row; an estimate where energy_meter says so",
    "co2_g": "grams of CO2 equivalents, energy_wh at the mean intensity of the country's electricity",
    "energy_meter": "what metered it: Cpu Load and Constant are estimates of the CPU's power, Intel Rapl reads a counter; RAM is estimated from its use",
}


def check_country(code: str | None) -> None:
    """Raises: ValueError where codecarbon is not installed, or has no such country: it would take the world's average in silence."""
    if code is None:
        return
    codecarbon()
    from codecarbon.input import DataSource

    if code not in DataSource().get_global_energy_mix_data():
        raise ValueError(f"energy must be a country that codecarbon knows, by the three letters of ISO 3166-1 as in FRA, got {code!r}")


def codecarbon() -> ModuleType:
    """The package, silent. Raises: ValueError where it is not installed."""
    try:
        import codecarbon
    except ModuleNotFoundError as error:
        raise ValueError(f"energy needs the package codecarbon ({error}): pip install 'vit_prune[energy]'") from None
    logging.getLogger("codecarbon").setLevel(logging.CRITICAL)  # it speaks before it reads its own log_level
    return codecarbon


@contextmanager
def metered(country: str | None, device: torch.device) -> Iterator[dict]:
    """Meter what runs inside; without a country nothing is metered.

    Args: device: that the work runs on, and ends on before the block does. Of CUDA all GPUs count that CUDA_VISIBLE_DEVICES leaves, of the CPU none.
    Returns: {"energy_wh", "co2_g", "energy_meter": what metered it}, None until the block ends, and without a country.
    Raises: ValueError where codecarbon gives no reading.
    """
    used = dict.fromkeys((*ENERGY, "energy_meter"))
    if country is None:
        yield used
        return
    tracker = new_tracker(country, device)
    tracker.start()
    try:
        yield used
    finally:
        tracker.stop()
    used.update(reading(tracker, device))


def new_tracker(country: str, device: torch.device) -> object:
    gpus = {} if device.type == "cuda" else {"gpu_ids": []}
    settings = {"save_to_file": False, "log_level": "critical", "tracking_mode": MODE, "allow_multiple_runs": True}
    return codecarbon().OfflineEmissionsTracker(country_iso_code=country, **settings, **gpus)


def reading(tracker: object, device: torch.device) -> dict:
    """Of a tracker that was stopped. codecarbon swallows its own errors: no reading is what they leave."""
    data = getattr(tracker, "final_emissions_data", None)
    if data is None:
        raise ValueError("codecarbon gave no reading of the energy: leave out --energy, or see what its own command `codecarbon monitor` says here")
    found = getattr(tracker, "_conf", {}).get("hardware") or ()  # no public name tells
    hardware = [name for name in found if device.type == "cuda" or not name.startswith("GPU")]  # it lists also those that it was told to leave out
    meter = f"codecarbon {data.codecarbon_version}, {MODE}" + (f": {', '.join(hardware)}" if hardware else "")
    return {"energy_wh": 1000 * data.energy_consumed, "co2_g": 1000 * data.emissions, "energy_meter": meter}
