"""A sweep, point by point: what each row holds, and what a second start runs again."""

import csv
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch

import vit_prune as vp
from tests.sweep.conftest import tiny
from vit_prune.measure.macs import macs
from vit_prune.search import load_found
from vit_prune.sweep.bench import SizeBench
from vit_prune.sweep.config import SweepConfig
from vit_prune.sweep.judge import Labelled, Photographs
from vit_prune.sweep.run import FILE, points_of, run_sweep
from vit_prune.sweep.same import SETTINGS
from vit_prune.sweep.tables import sweep_table
from vit_prune.train.data import create_dataset
from vit_prune.train.evaluation.accuracy import evaluate
from vit_prune.train.loaders import data_config, eval_loader

COLUMNS = {"name": "columns", "importance": "column_mean", "dropped": "merge"}
METHODS = {
    "columns": [COLUMNS | {"keep": "auto"}],
    "ToMe": [{"name": "tome", "r": "auto"}],
    "searched": {"search": [{"name": "tome"}, COLUMNS], "shares": [0.9]},
}


@pytest.fixture
def config(small, tmp_path) -> SweepConfig:
    """Two methods at two shares and a search, on 64 patches of the photographs; nothing is timed."""
    return SweepConfig(model="vit_mini28", img_size=(32,), shares=(0.9, 0.4), methods=METHODS, latency=False, output=str(tmp_path / "out"))


@pytest.fixture
def digits(saved, small, tmp_path) -> SweepConfig:
    """The same on the digits of 8 pixels, and two folders."""
    folders = {"dense": str(saved / "dense"), "half": str(saved / "half")}
    return SweepConfig(trained=folders, data="digits", batch_size=360, runs=11, output=str(tmp_path / "out"))


@pytest.fixture
def nothing_runs(monkeypatch):
    """From now on a row that is made is an error."""
    return lambda: monkeypatch.setattr(SizeBench, "row", lambda _self, point: pytest.fail(f"made again: {point}"))


def test_every_method_meets_every_share_or_says_why_not(config):
    rows = run_sweep(config)
    assert [(row["method"], row["target_share"]) for row in rows] == [
        ("unpruned", ""),
        ("columns", "0.9"),
        ("columns", "0.4"),
        ("ToMe", "0.9"),
        ("ToMe", "0.4"),
        ("searched", "0.9"),
    ]
    unpruned, columns, beyond, tome, _, searched = rows
    assert (float(unpruned["macs_share"]), float(unpruned["patch_cosine"])) == (1, pytest.approx(1, abs=1e-6))
    for row in (columns, tome, searched):
        assert 0.85 < float(row["macs_share"]) <= 0.9
        assert 0.5 < float(row["patch_cosine"]) < 1 - 1e-5
        assert row["prefix_cosine"]
        assert float(row["macs"]) == pytest.approx(float(row["macs_share"]) * float(unpruned["macs"]))
    assert columns["how"].startswith("columns keep 0.")
    assert tome["how"].startswith("tome r ")
    assert "at full strength it comes to 0." in beyond["note"]
    assert not beyond["macs"]
    assert {row["top1"] for row in rows} == {row["latency_share"] for row in rows} == {""}
    assert {(row["images"], row["img_size"], row["training"]) for row in rows} == {("12", "32", "off the shelf")}


def test_the_file_holds_the_rows_and_the_folder_a_recipe_for_each_half(config):
    rows, out = run_sweep(config), Path(config.output)
    with (out / FILE).open(newline="") as file:
        assert list(csv.DictReader(file)) == rows
    recipes = sorted(path.name for path in out.glob("found-*.yaml"))
    assert recipes == ["found-searched-32-0.9-other-half.yaml", "found-searched-32-0.9.yaml"]
    assert all(load_found(out / name).share <= 0.9 for name in recipes)
    assert "columns keep" in next(row for row in rows if row["method"] == "searched")["how"]


def test_a_second_start_runs_nothing_again_not_even_what_was_out_of_reach(config, nothing_runs):
    rows = run_sweep(config)
    nothing_runs()
    assert run_sweep(config) == rows


def test_a_start_with_more_shares_runs_only_these(config, monkeypatch):
    config = replace(config, methods={"columns": METHODS["columns"]}, shares=(0.9,))
    first, made = run_sweep(config), []
    row = SizeBench.row
    monkeypatch.setattr(SizeBench, "row", lambda self, point: made.append(point) or row(self, point))
    both = run_sweep(replace(config, shares=(0.9, 0.8)))
    assert [(point.method, point.share) for point in made] == [("columns", 0.8)]
    assert both[:2] == first
    assert {row["img_size"] for row in both} == {"32"}


def test_a_search_that_was_made_is_taken_from_its_file(config, monkeypatch):
    run_sweep(config)
    (Path(config.output) / FILE).unlink()
    monkeypatch.setattr("vit_prune.sweep.bench.Search", lambda *_: pytest.fail("searched again"))
    assert len(run_sweep(config)) == 6


def test_a_row_that_was_made_without_latency_gets_only_that(config, nothing_runs):
    config = replace(config, methods={"columns": METHODS["columns"]}, runs=11)
    before = run_sweep(config)
    nothing_runs()
    after = run_sweep(replace(config, latency=True))
    timed = ("latency_ms", "latency_share", "latency_low", "latency_high")
    assert [{**row, **dict.fromkeys((*timed, "noise"), "")} for row in after] == before
    assert [all(row[name] for name in timed) for row in after] == [False, True, False]
    assert after[2]["note"]
    assert float(after[1]["latency_low"]) <= float(after[1]["latency_share"]) <= float(after[1]["latency_high"])
    assert run_sweep(replace(config, latency=True)) == after


def test_what_is_cut_is_calibrated_anew_before_columns_are_chosen(config):
    mix = {"mix": [{"name": "l1", "heads": "auto", "mlp": "auto"}, COLUMNS | {"keep": "auto"}]}
    unpruned, row = run_sweep(replace(config, methods=mix, shares=(0.6,)))
    assert 0.5 < float(row["macs_share"]) <= 0.6
    assert int(float(row["parameters"])) < int(float(unpruned["parameters"]))
    assert row["how"].startswith("l1 heads 0.")
    assert "; columns keep 0." in row["how"]


def test_each_half_is_judged_by_what_it_was_not_calibrated_on():
    model = tiny(num_classes=0, img_size=32)
    judge = Photographs(model, (32, 32))
    for half, other in zip(judge.halves, judge.halves[::-1], strict=True):
        judged = [images for images, _ in half.judged]
        assert all(torch.equal(mine, theirs[:1]) for mine, theirs in zip(judged, other.calibration, strict=True))
        assert not any(torch.equal(crop, theirs[0]) for mine in half.calibration for crop in mine for theirs in judged)
        assert [len(images) for images in half.calibration] == [2] * 6
    assert judge(model, judge.halves[0])["patch_cosine"] == pytest.approx(1, abs=1e-6)


def accuracy(model, config):
    """By the trainer's own evaluation."""
    dataset = create_dataset(config.data, None, "val", batch_size=360)
    loader = eval_loader(dataset, batch_size=360, workers=0, data=data_config(model), device=torch.device("cpu"))
    return evaluate(model, loader, torch.device("cpu"))["top1"]


def test_trained_folders_are_compared_by_their_accuracy_with_the_first_of_them(digits):
    dense, half = run_sweep(digits)
    for row, name in ((dense, "dense"), (half, "half")):
        model = vp.load(digits.trained[name])
        judge = Labelled(model, digits)
        assert float(row["top1"]) == judge(model, judge.halves[0])["top1"] == accuracy(model, digits)
        assert float(row["macs"]) == macs(model).total
        assert (row["training"], row["how"], row["images"], row["target_share"]) == ("trained", digits.trained[name], "360", "")
    assert dense["top1"] != half["top1"]
    assert (float(dense["macs_share"]), dense["patch_cosine"]) == (1, "")
    assert float(half["macs_share"]) < 1
    assert float(dense["latency_share"]) == pytest.approx(1, abs=0.3)
    assert float(half["latency_share"]) > 0


def test_folders_of_several_seeds_give_their_mean_and_spread(digits, saved):
    config = replace(digits, trained={"dense": str(saved / "dense"), "both": [str(saved / "dense"), str(saved / "half")]}, latency=False)
    dense, both = run_sweep(config)
    half = run_sweep(replace(digits, latency=False, output=f"{digits.output}-2"))[1]
    tops = float(dense["top1"]), float(half["top1"])
    assert (dense["seeds"], dense["top1_std"], both["seeds"]) == ("1", "", "2")
    assert float(both["top1"]) == pytest.approx(fmean(tops))
    assert float(both["top1_std"]) == pytest.approx(stdev(tops))
    assert both["how"] == f"{saved / 'dense'} | {saved / 'half'}"


def test_methods_on_a_data_set_are_calibrated_on_images_from_all_over_its_training_split(digits):
    dropping = {"columns": [{"name": "columns", "keep": "auto", "importance": "column_mean"}]}
    config = replace(digits, trained={}, model="vit_mini28", methods=dropping, shares=(0.85,), img_size=(8,), latency=False)
    unpruned, columns = run_sweep(config)
    assert float(unpruned["top1"]) != float(columns["top1"])
    assert float(columns["macs_share"]) <= 0.85
    [half] = Labelled(tiny(img_size=8), replace(config, calibration_images=50, batch_size=20)).halves
    assert [len(images) for images, _ in half.calibration] == [20, 20, 10]
    labels = create_dataset("digits", None, "train").targets
    assert torch.cat([labels for _, labels in half.calibration]).tolist() == [labels[index * len(labels) // 50] for index in range(50)]


def test_a_model_is_built_at_each_size_with_its_head_only_for_labels(config, digits, small):
    small.clear()
    points = points_of(replace(config, img_size=(32, 40), methods={"columns": METHODS["columns"]}, shares=(0.9,)))
    assert [(point.method, point.img_size) for point in points] == [("unpruned", 32), ("columns", 32), ("unpruned", 40), ("columns", 40)]
    assert {point.img_size for point in points_of(replace(config, img_size=()))} == {28}
    assert small == [("vit_mini28", False, {"num_classes": 0})]
    small.clear()
    run_sweep(replace(digits, trained={}, model="vit_mini28", checkpoint="", methods={"ToMe": METHODS["ToMe"]}, shares=(0.99,), img_size=(8,), latency=False))
    assert small == [("vit_mini28", True, {"img_size": 8})]


def test_the_table_leaves_out_what_no_row_has(config):
    text = sweep_table(run_sweep(replace(config, methods={"ToMe": METHODS["ToMe"]}, shares=(0.9,))))
    head, _, unpruned, tome = text.splitlines()
    assert head.split()[:8] == ["method", "px", "target", "M", "MACs", "MACs", "M", "params"]
    assert "top-1" not in head
    assert "time" not in head
    assert unpruned.split()[:2] == ["unpruned", "32"]
    assert unpruned.split()[3] == "1.000"
    assert tome.split()[:3] == ["ToMe", "32", "0.9"]


OTHERS = {
    "another method": ({"methods": {"ToMe": [{"name": "tome", "r": "auto", "proportional": False}]}}, "holds points of another 'ToMe'"),
    "another seed": ({"seed": 3}, "made with seed 0, not 3"),
    "another model": ({"model": "vit_tiny_patch16_224"}, "made with model 'vit_mini28', not 'vit_tiny_patch16_224'"),
    "another checkpoint": ({"checkpoint": "FILE"}, "made with checkpoint None, not 'FILE'"),
}


@pytest.mark.parametrize(("changes", "sentence"), OTHERS.values(), ids=OTHERS)
def test_points_of_other_settings_are_never_taken_for_these(config, changes, sentence):
    config = replace(config, methods={"ToMe": METHODS["ToMe"]}, shares=(0.9,))
    run_sweep(config)
    with pytest.raises(ValueError, match=sentence):
        run_sweep(replace(config, **changes))
    more = {"methods": config.methods | {"columns": METHODS["columns"]}}
    assert [row["method"] for row in run_sweep(replace(config, **more))] == ["unpruned", "ToMe", "columns"]
    assert len(run_sweep(config)) == 3  # what was there before is known still


def test_points_of_nobody_knows_what_are_refused(config):
    run_sweep(config)
    (Path(config.output) / SETTINGS).unlink()
    with pytest.raises(ValueError, match=r"holds found-searched-32-0.9-other-half.yaml and no sweep.yaml"):
        run_sweep(config)


def test_a_file_without_its_columns_is_refused(config):
    Path(config.output).mkdir()
    (Path(config.output) / FILE).write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="has no column method"):
        run_sweep(config)


def test_a_search_that_cannot_reach_a_share_is_a_row_and_the_sweep_goes_on(config):
    methods = {"searched": {"search": [{"name": "tome"}], "shares": [0.3]}, "columns": METHODS["columns"]}
    rows = run_sweep(replace(config, methods=methods, shares=(0.9,)))
    assert [row["method"] for row in rows] == ["unpruned", "searched", "columns"]
    assert "at full strength" in rows[1]["note"] or "do not come down" in rows[1]["note"]


def test_a_folder_is_judged_by_its_own_preprocessing(digits, saved, tmp_path):
    model = vp.load(saved / "dense")
    model.pretrained_cfg["mean"], model.pretrained_cfg["std"] = (0.2,) * 3, (0.1,) * 3
    vp.save(model, tmp_path / "other")
    rows = run_sweep(replace(digits, latency=False, trained={"dense": str(saved / "dense"), "other": str(tmp_path / "other")}))
    assert float(rows[1]["top1"]) == accuracy(vp.load(tmp_path / "other"), digits) != float(rows[0]["top1"])


def test_folders_that_are_missing_or_of_other_classes_are_told_before_the_first_point(digits, saved, tmp_path):
    vp.save(tiny(img_size=8, num_classes=5), tmp_path / "five")
    for folder, error, sentence in ((tmp_path / "five", ValueError, "has 5 classes, the data has 10"), (tmp_path / "none", OSError, "none")):
        with pytest.raises(error, match=sentence):
            run_sweep(replace(digits, latency=False, trained={"dense": str(saved / "dense"), "other": str(folder)}))
        assert not Path(digits.output).exists()


def test_memory_that_was_not_asked_for_before_is_measured_by_a_later_start(config, monkeypatch):
    config = replace(config, methods={"columns": METHODS["columns"]}, shares=(0.9,), latency=True)
    run_sweep(config)
    monkeypatch.setattr(SizeBench, "latency", lambda _self, _model: {"latency_share": 0.5, "peak_mib": 7})
    assert [row["peak_mib"] for row in run_sweep(replace(config, memory=True))] == ["", "7"]
