"""Training a detector: the schedule, what a kill costs (nothing), and two processes."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from tests.detection.conftest import SMALL
from tests.train.helpers import LAUNCHER
from vit_prune.detection.build import build_backbone, build_detector
from vit_prune.detection.checkpoint import load_detector
from vit_prune.detection.data.coco import CocoImages
from vit_prune.detection.evaluate import detect, evaluate
from vit_prune.detection.metrics import coco_metrics
from vit_prune.detection.train import run as run_module
from vit_prune.detection.train.config import DetectTrainConfig
from vit_prune.detection.train.data import JitteredImages, Order
from vit_prune.detection.train.optimizer import create_optimizer, rate
from vit_prune.detection.train.run import run
from vit_prune.detection.train.state import METRICS, read_state
from vit_prune.methods.stack import columns_methods
from vit_prune.train.engine import TrainingDiverged
from vit_prune.train.recipe import load_recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(coco, tmp_path) -> DetectTrainConfig:
    """Six iterations of two images, with all that is random."""
    small = asdict(SMALL) | {"num_classes": 0, "drop_path": 0.2, "keep": "1,.5", "score_thresh": 0.05}
    settings = {"iterations": 6, "batch_size": 2, "workers": 0, "checkpoint_interval": 2, "warmup_iterations": 3, "lr": 1e-3, "clip_grad": 1.0}
    return DetectTrainConfig(**small, **settings, data_dir=str(coco), output=str(tmp_path / "run"), device="cpu")


def rows(folder):
    with open(Path(folder) / METRICS, newline="") as file:
        return [{name: value for name, value in row.items() if name not in ("seconds", "peak_memory_mib")} for row in csv.DictReader(file)]


def start(configs, tmp_path, *words, ranks=None):
    path = tmp_path / "configs.json"
    path.write_text(json.dumps([asdict(one) for one in configs]))
    launcher = [sys.executable] if ranks is None else LAUNCHER
    command = [*launcher, "-m", "tests.detection.ranks", str(path), *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False)


def assert_same(one, other, tolerance=0.0):
    first, second = (read_state(Path(folder)) for folder in (one, other))
    assert first["iteration"] == second["iteration"]
    for part in ("model",):
        for name in first[part]:
            torch.testing.assert_close(first[part][name], second[part][name], rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("changes", [{}, {"amp": "float16", "workers": 2}], ids=["float32", "float16, two workers"])
def test_a_run_that_is_killed_and_started_again_is_the_whole_run(config, tmp_path, changes):
    config = replace(config, **changes)
    whole, killed = replace(config, output=str(tmp_path / "whole")), replace(config, output=str(tmp_path / "killed"))
    run(whole)
    for iteration in (1, 3):  # before anything is written, and between two times of writing
        assert start([killed], tmp_path, iteration).returncode == -signal.SIGKILL
    assert read_state(Path(killed.output))["iteration"] == 2
    run(killed)
    assert_same(whole.output, killed.output)
    assert rows(whole.output) == rows(killed.output)
    first, second = (read_state(Path(one.output))["optimizer"]["state"] for one in (whole, killed))
    assert all(torch.equal(first[key][name], second[key][name]) for key in first for name in first[key])


def test_a_folder_that_another_process_trains_in_is_left_alone(config):
    Path(config.output).mkdir()
    hold = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
    other = subprocess.Popen([sys.executable, "-c", hold, f"{config.output}/.lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError, match=r"another process trains in .*run: wait for its end, or write into another folder"):
            run(config)
    assert run(replace(config, iterations=2))["iteration"] == 2


def test_a_complete_run_stays_as_it_is(config):
    row = run(config)
    before = (Path(config.output) / METRICS).read_bytes()
    assert run(config)["iteration"] == row["iteration"] == 6
    assert (Path(config.output) / METRICS).read_bytes() == before


def test_a_run_goes_on_with_nothing_but_its_own_settings(config):
    run(replace(config, iterations=2))
    with pytest.raises(ValueError, match="holds a run with iterations 2, not 6: give another --output"):
        run(config)
    assert run(replace(config, iterations=2, workers=1))["iteration"] == 2


def test_the_detector_that_is_left_is_the_one_that_was_judged(config):
    row = run(config)
    model, loaded, categories = load_detector(Path(config.output) / "last")
    assert (loaded.num_classes, loaded.keep, categories.names) == (3, "1,0.5", ("circle", "square", "triangle"))
    data = CocoImages(config.place("val", "annotations"), config.place("val", "images"))
    metrics = evaluate(model, data, config.image_size, torch.device("cpu"))
    assert metrics["box"]["AP"] == row["box_AP"]
    assert metrics["mask"]["AP50"] == row["mask_AP50"]


def test_two_processes_hold_the_same_weights_which_are_no_single_ones(config, tmp_path):
    """Each sees another image (the processes compare their weights before the evaluation, see ranks.py)."""
    alone, two = (replace(config, batch_size=1, output=str(tmp_path / name)) for name in ("alone", "two"))
    run(alone)
    done = start([two], tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    first, second = (read_state(Path(one.output))["model"] for one in (alone, two))
    assert not torch.equal(first["roi_heads.box_predictor.cls_score.weight"], second["roi_heads.box_predictor.cls_score.weight"])
    assert rows(two.output)[-1]["judged"] == "True"


def test_random_columns_are_others_in_every_iteration(config, monkeypatch):
    seen = []
    original = run_module.step
    monkeypatch.setattr(run_module, "step", lambda job, *batch: seen.append(int(columns_methods(job.model)[0].training_key)) or original(job, *batch))
    run(replace(config, iterations=3, model_kwargs=config.model_kwargs | {"importance": "random"}))
    assert len(set(seen)) == 3


def test_weights_are_written_before_they_are_judged_and_a_later_start_judges(config, monkeypatch):
    with monkeypatch.context() as patches:
        patches.setattr(run_module, "judge", lambda _job: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(config)
    assert read_state(Path(config.output))["iteration"] == 6
    assert rows(config.output)[-1]["judged"] == "False"
    assert run(config)["judged"] is True
    assert rows(config.output)[-1]["box_AP"]


def test_what_a_kill_kept_from_being_published_is_published_by_the_next_start(config):
    run(config)
    shutil.rmtree(Path(config.output) / "last")
    (Path(config.output) / METRICS).unlink()
    run(config)
    assert load_detector(Path(config.output) / "last")[1].num_classes == 3
    assert len(rows(config.output)) == 3


def test_data_that_cannot_be_judged_is_told_before_the_first_batch(config, coco, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "step", lambda *_: pytest.fail("a step was made"))
    content = json.loads((coco / "annotations/instances_val2017.json").read_text())
    content["annotations"][0]["segmentation"] = "broken"
    (tmp_path / "val.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"val\.json: annotation 1: a segmentation is"):
        run(replace(config, val_annotations=str(tmp_path / "val.json")))


def test_other_data_is_not_gone_on_with(config, coco, tmp_path):
    run(replace(config, iterations=2))
    content = json.loads((coco / "annotations/instances_train2017.json").read_text())
    content["images"] = content["images"][:-1]  # which has no object
    content["annotations"] = [one for one in content["annotations"] if one["image_id"] in {image["id"] for image in content["images"]}]
    shutil.copytree(coco, tmp_path / "other")
    (tmp_path / "other/annotations/instances_train2017.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="the run began with 22 images, now there are 21"):
        run(replace(config, iterations=2, data_dir=str(tmp_path / "other")))


def test_a_process_more_or_less_is_told(config, tmp_path):
    run(replace(config, iterations=2))
    done = start([replace(config, iterations=2)], tmp_path, ranks=2)
    assert "the run began with 1 processes, now there are 2" in done.stderr


def test_the_draws_of_two_processes_are_those_of_one(config, monkeypatch):
    whole = [draw for _, draw in zip(range(48), Order(20, replace(config, batch_size=4, iterations=12), 0), strict=False)]
    parts = []
    for rank in (0, 1):
        monkeypatch.setattr("vit_prune.detection.train.data.rank", lambda rank=rank: rank)
        monkeypatch.setattr("vit_prune.detection.train.data.world_size", lambda: 2)
        parts.append(list(Order(20, replace(config, batch_size=2, iterations=12), 0)))
    for start_at in range(0, 24, 2):  # batch by batch
        mixed = {*parts[0][start_at : start_at + 2], *parts[1][start_at : start_at + 2]}
        assert mixed == set(whole[2 * start_at : 2 * start_at + 4])
    assert sorted(draw.index for draw in whole[:20]) == list(range(20))
    assert [draw.epoch for draw in whole] == [0] * 20 + [1] * 20 + [2] * 8
    assert list(Order(20, replace(config, batch_size=2, iterations=12), 5)) == parts[1][10:]


def test_images_without_objects_and_with_crowds_alone_are_left_out_unless_they_are_asked_for(coco, config):
    data = CocoImages(config.place("train", "annotations"), config.place("train", "images"))
    assert len(JitteredImages(data, config)) == 20  # two of 22 are empty
    assert len(JitteredImages(data, replace(config, skip_empty=False))) == 22


def test_the_rate_rises_and_falls_as_in_vitdet():
    config = DetectTrainConfig()
    assert rate(config, 0) == pytest.approx(0.001)
    assert rate(config, 125) == pytest.approx(0.5005)
    assert [rate(config, at) for at in (250, 163_888)] == [1, 1]
    assert [rate(config, at) for at in (163_889, 177_545, 177_546, 184_374)] == pytest.approx([0.1, 0.1, 0.01, 0.01])


def test_each_block_has_its_rate_and_norms_and_positions_do_not_decay(config):
    model = build_detector(replace(SMALL, num_classes=3))
    optimizer = create_optimizer(model, replace(config, layer_decay=0.5, weight_decay=0.1))
    found = {id(parameter): (group["scale"], group["weight_decay"]) for group in optimizer.param_groups for parameter in group["params"]}
    named = {name: found[id(parameter)] for name, parameter in model.named_parameters()}
    assert named["backbone.net.vit.patch_embed.proj.weight"] == (0.125, 0.1)
    assert named["backbone.net.vit.pos_embed"] == (0.125, 0.0)
    assert named["backbone.net.vit.blocks.0.attn.qkv.weight"] == (0.25, 0.1)
    assert named["backbone.net.vit.blocks.1.norm1.weight"] == (0.5, 0.0)
    assert named["backbone.net.vit.blocks.1.attn.prune.token_bias.weight"] == (0.5, 0.1)
    assert named["backbone.simfp_2.1.weight"] == (1, 0.0)
    assert named["roi_heads.box_head.0.1.bias"] == (1, 0.0)
    assert named["rpn.head.cls_logits.weight"] == (1, 0.1)
    assert len(named) == len(found)


def test_a_loss_that_is_no_number_stops_the_run(config, monkeypatch):
    monkeypatch.setattr("vit_prune.detection.roi_heads.F.cross_entropy", lambda logits, _: logits.sum() * float("nan"))
    with pytest.raises(TrainingDiverged, match="in iteration 3, the last of 3 in a row"):
        run(replace(config, max_skipped_steps=3))


def test_an_image_is_detected_in_whatever_batch_it_comes(config, val, detector):
    model = detector(score_thresh=0.3)
    alone, four = (detect(model, val, 96, torch.device("cpu"), batch_size=size) for size in (1, 4))
    assert len(alone) == len(four) > 10
    assert [one["image_id"] for one in alone] == [one["image_id"] for one in four]
    assert coco_metrics(val, alone)["box"] == pytest.approx(coco_metrics(val, four)["box"], abs=0.5)


WRONG = {
    "no data": ({"data_dir": None}, ValueError, "give data_dir, a folder in COCO's layout"),
    "another folder": ({"data_dir": "nothing"}, OSError, "instances_train2017.json"),
    "classes": ({"num_classes": 5}, ValueError, "num_classes is 5, the data has 3 categories"),
    "a window": ({"window": 0}, ValueError, "window"),
    "a schedule": ({"keep": "1,.5,.5"}, ValueError, "3"),
}


@pytest.mark.parametrize(("changes", "error", "sentence"), WRONG.values(), ids=WRONG)
def test_what_cannot_run_is_refused_before_the_first_batch(config, changes, error, sentence, monkeypatch):
    monkeypatch.setattr("vit_prune.detection.train.run.step", lambda *_: pytest.fail("a step was made"))
    with pytest.raises(error, match=sentence):
        run(replace(config, **changes))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"iterations": 0}, "iterations must be > 0, got 0"),
        ({"lr": "fast"}, "lr must be a number, got 'fast'"),
        ({"scale": (2.0, 1.0)}, "scale must be two rising numbers > 0"),
        ({"amp": "half"}, "amp must be bfloat16, float16 or none, got 'half'"),
        ({"eval_interval": 1500}, "eval_interval must be a multiple of checkpoint_interval, 1000, got 1500"),
        ({"score_thresh": 1.5}, r"score_thresh must be in \[0, 1\), got 1.5"),
        ({"device": "tpu"}, "tpu"),
        ({"clip_grad": 0.0}, "clip_grad must be > 0, or none, got 0.0"),
        ({"milestones": (163_889.0, 177_546.0)}, "rising shares of the iterations between 0 and 1"),
        ({"milestones": (0.9, 0.5)}, "rising shares"),
        ({"lr": float("nan")}, "lr must be a finite number"),
    ],
)
def test_a_wrong_setting_is_one_sentence(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        DetectTrainConfig(**changes)


@pytest.mark.parametrize("path", sorted((ROOT / "configs/detection").glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_is_read_and_its_header_names_itself_or_its_command(path):
    config = load_recipe(path, DetectTrainConfig)
    assert config.iterations > 0
    assert "tools/detect_train.py --config configs/" in path.read_text()
    with torch.device("meta"):
        build_backbone(config)


def test_a_schedule_may_be_a_list(config):
    assert replace(config, keep=(1.0, 0.5)).keep == "1,0.5"
