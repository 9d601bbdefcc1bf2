"""A second start goes on with the first one's points: they must be of the same sweep."""

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from vit_prune.sweep.config import SweepConfig
from vit_prune.train.recipe import load_yaml
from vit_prune.train.state import write_atomically

SETTINGS = "sweep.yaml"  # beside the points, what they were made with
SAME = ("model", "checkpoint", "data", "calibration_images", "batch_size", "runs", "threads", "device", "seed")
BY_LABEL = ("methods", "trained")


def record(config: SweepConfig) -> None:
    """Write the settings into the output folder. Raises: ValueError where it holds points of other settings."""
    folder = Path(config.output)
    path, now = folder / SETTINGS, plain(config)
    if path.exists():
        before = load_yaml(path)
        check_same(path, before, now)
        now |= {name: before[name] | now[name] for name in BY_LABEL}
    elif held := sorted(file.name for pattern in ("points.csv", "found-*.yaml") for file in folder.glob(pattern)):
        raise ValueError(f"{folder} holds {held[0]} and no {SETTINGS} that says what it was made with: give another output")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, yaml.safe_dump(now, sort_keys=False, width=150))


def plain(config: SweepConfig) -> dict:
    """All that points depend on."""
    return json.loads(json.dumps({name: getattr(config, name) for name in (*SAME, *BY_LABEL)}))


def check_same(path: Path, before: Mapping, now: Mapping) -> None:
    """Raises: ValueError that names the first setting, or the first label, that was another one."""
    changed = [name for name in SAME if before.get(name) != now[name]]
    if changed:
        name = changed[0]
        raise ValueError(f"{path.parent} holds points made with {name} {before.get(name)!r}, not {now[name]!r}: give another output")
    for name in BY_LABEL:
        for label, entries in now[name].items():
            if label in before[name] and entries_of(before[name][label]) != entries_of(entries):
                raise ValueError(f"{path.parent} holds points of another {label!r}: give it another label, or the sweep another output")


def entries_of(entries: object) -> object:
    """What is searched, at whatever shares."""
    return {key: value for key, value in entries.items() if key != "shares"} if isinstance(entries, Mapping) else entries
