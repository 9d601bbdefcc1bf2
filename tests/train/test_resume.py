"""A run that was killed and started again is the run that was not; a run that changed is told of its changes."""

import csv
import json
import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train.conftest import fill
from tests.train.killed import MOMENTS, UPDATES_PER_EPOCH
from vit_prune.train.run import run
from vit_prune.train.state import RunFolder

EPOCHS, BATCHES_PER_UPDATE = 4, 2
CLOCK = {"seconds", "images_per_second", "peak_memory_mib"}


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """The folder in which every moment's run was killed and went on."""
    root = tmp_path_factory.mktemp("killed")
    data = fill(root / "data", {"train/a": 12, "train/b": 12, "val/a": 3, "val/b": 3})
    subprocess.run([sys.executable, "-W", "ignore", "-m", "tests.train.killed", str(data), str(root / "runs")], check=True, cwd=Path(__file__).parents[2])
    return root / "runs"


def differences(one: object, other: object, where: str = "") -> list[str]:
    """Places in two nested states that are not equal bit for bit, clocks aside."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = (one.keys() | other.keys()) - CLOCK - {"config"}
        return [text for key in keys for text in differences(one.get(key), other.get(key), f"{where}/{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [text for index, pair in enumerate(zip(one, other, strict=True)) for text in differences(*pair, f"{where}/{index}")]
    equal = torch.equal(one, other) if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) else one == other
    return [] if equal else [where]


def trace(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def summary(folder: Path) -> list[dict]:
    with open(folder / "summary.csv", newline="") as file:
        return [{name: value for name, value in row.items() if name not in CLOCK} for row in csv.DictReader(file)]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_and_resumed_run_equals_the_whole_run_bit_for_bit(killed, moment):
    assert json.loads((killed / "ends.json").read_text())[moment] == [signal.SIGKILL, 0]
    whole, resumed = (RunFolder(killed / name).read() for name in ("whole", moment))
    assert {"model", "ema", "optimizer", "scaler", "rows", "layers"} < whole.keys()
    assert differences(whole, resumed) == []
    assert summary(killed / "whole") == summary(killed / moment)
    for name in ("last", "best", "epoch-0002", "epoch-0004"):
        assert differences(*(load_file(killed / run_name / name / "model.safetensors") for run_name in ("whole", moment))) == [], name
    assert not list((killed / moment).rglob("*.tmp")), "what the kill left half written"


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_steps_after_a_kill_are_those_of_the_whole_run(killed, moment):
    """Learning rates, keep ratios, the scaler's scale, and the images and targets after augmentation and mixup."""
    whole, both = (trace(killed / f"{name}.trace") for name in ("whole", moment))
    steps = UPDATES_PER_EPOCH * BATCHES_PER_UPDATE
    assert len(whole) == EPOCHS * steps
    restarts = range(0, len(whole), steps)  # the second process begins at one of the epochs
    assert any(both == whole[: len(both) - len(whole) + start] + whole[start:] for start in restarts)


def test_the_trace_would_show_a_difference(killed):
    """Each epoch and step has images of its own, and keep falls during its warm-up."""
    whole = trace(killed / "whole.trace")
    assert len({line["batch"] for line in whole}) == len(whole)
    assert [line["keep"][1] for line in whole[:: UPDATES_PER_EPOCH * BATCHES_PER_UPDATE]] == [1.0, 0.75, 0.5, 0.5]
    assert len({line["lr"][0] for line in whole}) > UPDATES_PER_EPOCH


def test_the_number_of_loader_processes_changes_nothing(killed):
    whole, workers = (RunFolder(killed / name).read() for name in ("whole", "two workers"))
    assert differences(whole, workers) == []


@pytest.fixture
def interrupted(tiny_config):
    """A run of 2 epochs, of which there were to be 3."""
    return tiny_config(epochs=2), run(tiny_config(epochs=2))["folder"]


def test_another_number_of_epochs_goes_on_and_is_told(interrupted, tiny_config, caplog):
    with caplog.at_level(logging.INFO):
        result = run(tiny_config(epochs=3, resume="auto"))
    assert result["last"]["epoch"] == 3
    assert "resumed after epoch 2 of 3: weights, optimizer, scaler, average and the rows of the summary are kept" in caplog.text
    assert "changed since the run began: epochs 2 -> 3" in caplog.text


def test_a_complete_run_says_so_and_keeps_its_results(interrupted, tiny_config, caplog):
    before = load_file(f"{interrupted[1]}/last/model.safetensors")
    with caplog.at_level(logging.INFO):
        result = run(tiny_config(epochs=2, resume="auto"))
    assert "is complete: 2 of 2 epochs" in caplog.text
    assert result["last"]["epoch"] == 2
    assert differences(load_file(f"{interrupted[1]}/last/model.safetensors"), before) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "vit_mini28"}, "cannot resume with model 'vit_mini28_bias' -> 'vit_mini28'"),
        ({"model_kwargs": {"depth": 3, "embed_dim": 16, "num_heads": 2}}, "cannot resume with model_kwargs"),
        ({"opt": "sgd"}, "cannot resume with opt 'adamw' -> 'sgd'"),
        ({"model_ema": True}, "cannot resume with model_ema False -> True"),
        ({"keep": 0.5}, "cannot resume with keep '1' -> '0.5'"),
        ({"momentum": 0.5}, "cannot resume with momentum 0.9 -> 0.5"),
    ],
    ids=["model", "depth", "optimizer", "average", "keep", "momentum"],
)
def test_a_change_that_the_state_does_not_fit_is_refused_and_nothing_is_touched(interrupted, tiny_config, changes, message):
    before = (Path(interrupted[1]) / "resume.pt").read_bytes()
    with pytest.raises(ValueError, match=message):
        run(tiny_config(epochs=3, resume="auto", **changes))
    assert (Path(interrupted[1]) / "resume.pt").read_bytes() == before


def test_a_run_of_an_earlier_version_goes_on_though_a_field_is_newer_than_it(interrupted, tiny_config, caplog):
    path = Path(interrupted[1]) / "resume.pt"
    state = torch.load(path, weights_only=True)
    del state["config"]["momentum"]
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"cannot resume with momentum 0\.9 -> 0\.5"):
        run(tiny_config(epochs=3, resume="auto", momentum=0.5))
    with caplog.at_level(logging.INFO):
        run(tiny_config(epochs=3, resume="auto"))
    assert "momentum" not in caplog.text


def test_another_world_size_is_told_with_what_it_does_to_the_batch(interrupted, tiny_config, caplog):
    path = Path(interrupted[1]) / "resume.pt"
    state = torch.load(path, weights_only=True)
    state |= {"world_size": 2, "config": {**state["config"], "batch_size": 2}}
    torch.save(state, path)
    with caplog.at_level(logging.INFO):
        run(tiny_config(epochs=3, resume="auto"))
    assert "processes 2 -> 1 (4 images per update, as before)" in caplog.text


def test_a_broken_resume_file_is_named_with_the_way_out(interrupted, tiny_config):
    path = Path(interrupted[1]) / "resume.pt"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"resume\.pt is not whole .* --initial-checkpoint .*last"):
        run(tiny_config(epochs=3, resume="auto"))


def test_a_folder_that_is_no_run_is_named(tiny_config, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no run to resume in .*nowhere"):
        run(tiny_config(experiment=None, resume=str(tmp_path / "nowhere")))


def test_without_resume_the_results_of_an_earlier_run_are_refused_with_the_flag_to_give(interrupted):
    with pytest.raises(FileExistsError, match="go on with --resume"):
        run(interrupted[0])


def test_a_complete_run_with_other_settings_is_refused_instead_of_passed_off_as_theirs(interrupted, tiny_config):
    before = {path: path.read_bytes() for path in Path(interrupted[1]).rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"the run is complete, with other settings: .*lr None -> 0.5.* Give the new one another --experiment"):
        run(tiny_config(epochs=2, resume="auto", lr=0.5))
    assert {path: path.read_bytes() for path in before} == before


def test_an_explicit_folder_must_be_a_run_also_where_the_recipe_is_given(tiny_config, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no run to resume in .*empty: it has no recipe\.yaml"):
        run(tiny_config(experiment=None, resume=str(tmp_path / "empty")))
    assert not list((tmp_path / "empty").iterdir())


def test_another_peak_rate_takes_effect_and_is_told(interrupted, tiny_config, caplog):
    with caplog.at_level(logging.INFO):
        row = run(tiny_config(epochs=3, resume="auto", lr_base=0.5, sched="constant"))["last"]
    assert row["lr"] == pytest.approx(0.5 * 4 / 1024)
    assert "peak learning rate 3.90625e-06 -> 0.00195312" in caplog.text


def test_two_processes_do_not_train_in_one_folder(interrupted, tiny_config):
    hold = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
    other = subprocess.Popen([sys.executable, "-c", hold, f"{interrupted[1]}/.lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError, match=r"another process trains in .*run: wait for its end, or write into another folder"):
            run(tiny_config(epochs=3, resume="auto"))
    assert run(tiny_config(epochs=3, resume="auto"))["last"]["epoch"] == 3


def test_other_classes_of_the_same_number_are_refused(interrupted, tiny_config, image_folder):
    data = image_folder({"train/a": 4, "train/c": 4, "val/a": 2, "val/c": 2})
    with pytest.raises(ValueError, match="the classes of the run are not the data's: only in the checkpoint b; only in the data c"):
        run(tiny_config(epochs=3, resume="auto", data_dir=str(data)))


def test_another_number_of_images_is_told(interrupted, tiny_config, image_folder, caplog):
    data = image_folder({"train/a": 6, "train/b": 4, "val/a": 2, "val/b": 2})
    with caplog.at_level(logging.INFO):
        run(tiny_config(epochs=3, resume="auto", data_dir=str(data)))
    assert "images 8 -> 10" in caplog.text


def test_the_weights_that_a_run_started_from_may_be_gone_when_it_is_resumed(tiny_config, tmp_path):
    source = run(tiny_config(experiment="source"))["folder"]
    start = Path(source).rename(tmp_path / "start")
    settings = {"initial_checkpoint": str(start / "last"), "epochs": 1}
    run(tiny_config(**settings))
    start.rename(tmp_path / "gone")
    assert run(tiny_config(**settings | {"epochs": 2}, resume="auto"))["last"]["epoch"] == 2


def test_all_columns_said_or_unsaid_are_the_same_run(interrupted, tiny_config):
    assert run(tiny_config(epochs=3, keep="1", resume="auto"))["last"]["epoch"] == 3
