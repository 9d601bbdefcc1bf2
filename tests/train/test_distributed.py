"""Two processes train as one does."""

import csv
import json
import logging
import os
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from tests.train.conftest import fill
from tests.train.helpers import LAUNCHER
from vit_prune.train.run import run
from vit_prune.train.state import RunFolder

STEPS = 5


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """20 images to train on, 5 to evaluate."""
    return fill(tmp_path_factory.mktemp("ranks"), {"train/a": 10, "train/b": 10, "val/a": 3, "val/b": 2})


def torchrun(configs: list, folder: Path) -> None:
    path = folder / "configs.json"
    path.write_text(json.dumps([asdict(config) for config in configs]))
    command = [*LAUNCHER, "-m", "tests.train.ranks", str(path)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def last_row(folder: Path) -> dict:
    with open(folder / "summary.csv", newline="") as file:
        return list(csv.DictReader(file))[-1]


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = (RunFolder(folder).read()["model"] for folder in (one, other))
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_two_processes_equal_one_with_the_same_global_batch(tiny_config, data, tmp_path, caplog):
    """SGD, 5 steps, no augmentation, at a rate at which a wrong order, a sum instead of a mean or an unsynchronised gradient would show."""
    settings = {"data_dir": str(data), "no_aug": True, "opt": "sgd", "lr": 0.1, "keep": "1,.5", "weight_decay": 0.05, "clip_grad": 1.0}
    one = tiny_config(**settings, experiment="one", batch_size=4)
    two = replace(one, experiment="two", batch_size=2)
    accumulated = replace(one, experiment="accumulated", batch_size=1, grad_accum_steps=2)
    twice = replace(one, experiment="twice", epochs=2, batch_size=2)
    torchrun([two, accumulated, replace(twice, epochs=1), replace(twice, resume="auto")], tmp_path)
    folders = {config.experiment: Path(run(config)["folder"]) for config in (one, replace(one, experiment="one twice", epochs=2))}
    output = Path(one.output)
    assert RunFolder(output / "two").read()["updates_made"] == STEPS
    assert_same_weights(folders["one"], output / "two")
    assert_same_weights(folders["one"], output / "accumulated")
    assert_same_weights(folders["one twice"], output / "twice")
    assert RunFolder(output / "twice").read()["world_size"] == 2
    check_evaluation(folders["one"], output / "two")
    check_going_on_alone(replace(twice, epochs=3, batch_size=4, resume="auto"), output / "twice", caplog)


def check_evaluation(one: Path, two: Path) -> None:
    """5 images over 2 processes: none left out, none twice."""
    first, second = last_row(one), last_row(two)
    assert first["eval_images"] == second["eval_images"] == "5"
    for name in ("eval_top1", "eval_top5"):
        assert first[name] == second[name]
    for name in ("eval_loss", "train_loss"):
        assert float(first[name]) == pytest.approx(float(second[name]), abs=1e-6)


def check_going_on_alone(config, folder: Path, caplog) -> None:
    with caplog.at_level(logging.INFO):
        assert run(config)["last"]["epoch"] == 3
    assert "processes 2 -> 1 (4 images per update, as before)" in caplog.text
    assert RunFolder(folder).read()["world_size"] == 1


def test_the_processes_share_an_epoch_without_overlap_and_in_the_order_of_one(monkeypatch):
    from vit_prune.train import draws

    def sampler(rank: int, world_size: int, **kwargs) -> list:
        monkeypatch.setattr(draws, "rank", lambda: rank)
        monkeypatch.setattr(draws, "world_size", lambda: world_size)
        made = draws.EpochSampler(23, batch_size=8 // world_size, seed=3, **kwargs)
        made.set_epoch(5)
        return list(made)

    for repeats in (1, 3):
        whole = sampler(0, 1, repeats=repeats)
        parts = [sampler(rank, 2, repeats=repeats) for rank in (0, 1)]
        assert [draw for pair in zip(*parts, strict=True) for draw in pair] == whole
        assert len(whole) == 16
        assert len(set(whole)) == 16
