"""tools/analyze.py from its command line."""

import json

import pytest
import timm
from PIL import Image

import vit_prune as vp
from tests.helpers import randomise_gates
from tests.train.helpers import write_image
from vit_prune.train.state import as_csv


@pytest.fixture
def analyze(run_tool):
    """(exit status or None, stdout)."""
    return lambda *flags: run_tool("analyze.py", *flags)[:2]


@pytest.fixture
def files(tmp_path):
    """A checkpoint of a model built for 16 pixels, a picture, and half a picture."""
    vp.save(timm.create_model("vit_mini28_bias", img_size=16, depth=2, keep=0.5), tmp_path / "model")
    Image.radial_gradient("L").save(tmp_path / "image.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "image.png").read_bytes()[:2000])
    return tmp_path


@pytest.mark.filterwarnings("ignore:the token bias is all zero")
def test_kept_columns_are_drawn_at_the_size_that_the_model_was_built_for(analyze, files):
    code, out = analyze("kept", "--checkpoint", files / "model", "--images", files / "image.png", "--output", files / "kept.png")
    assert code is None
    assert "kept.png" in out
    assert Image.open(files / "kept.png").width > 100


@pytest.mark.filterwarnings("ignore:the token bias is all zero")
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("kept", "--checkpoint", "model", "--images", "half.png"), "half.png"),
        (("kept", "--checkpoint", "nowhere", "--images", "image.png"), "nowhere does not exist"),
        (("kept", "--checkpoint", "model", "--images", "image.png", "--keep", "2"), "keep must be in"),
        (("noop", "--depth", "0"), "depth must be at least 1, got 0"),
        (("fidelity", "--model", "resnet18", "--checkpoint", "x.pth"), "resnet18 cannot be built"),
        (("fidelity", "--model", "deit_smal_patch16_224", "--checkpoint", "x.pth"), "did you mean deit_small_patch16_224"),
        (("fidelity", "--model", "deit_tiny_patch16_224", "--checkpoint", "x.pth", "--crops", "0"), "crops must be at least 1"),
        (("fidelity", "--model", "deit_tiny_patch16_224", "--checkpoint", "x.pth"), "x.pth"),
    ],
)
def test_a_users_error_is_one_sentence(analyze, files, monkeypatch, flags, sentence):
    monkeypatch.chdir(files)
    code, _ = analyze(*flags)
    assert sentence in code


def test_the_noop_table_has_a_row_per_model(analyze, monkeypatch):
    from vit_prune.analysis import noop

    monkeypatch.setattr(noop, "CASES", noop.CASES[-2:])
    code, out = analyze("noop", "--depth", 1)
    assert code is None
    assert [line.split()[1] for line in out.splitlines()[2:]] == ["test_vit3", "test_vit4"]


def test_merged_patches_are_drawn(analyze, files):
    vp.save(timm.create_model("vit_mini28"), files / "dense")
    flags = ("merged", "--model", "vit_mini28", "--checkpoint", files / "dense" / "model.safetensors", "--images", files / "image.png")
    code, out = analyze(*flags, "--r", "4", "--output", files / "merged.png")
    assert code is None
    assert "merged.png" in out
    assert Image.open(files / "merged.png").width > 100
    assert "r must be a number of merges" in str(analyze(*flags, "--r", "fast")[0])


TINY = {"depth": 2, "embed_dim": 16, "num_heads": 2, "img_size": 8}
ON_DIGITS = ("--dataset", "digits", "--workers", "0", "--device", "cpu")


@pytest.fixture
def run_folder(tmp_path):
    """What tools/train.py leaves of a training of two epochs, without having trained."""
    run = tmp_path / "run"
    run.mkdir()
    vp.save(randomise_gates(timm.create_model("vit_mini28_budget", **TINY)), run / "best")
    vp.save(timm.create_model("vit_mini28", **TINY), tmp_path / "dense")
    (run / "summary.csv").write_text(as_csv([{"epoch": epoch, "eval_top1": 40.0 + epoch} for epoch in (1, 2)]))
    layers = [{"epoch": epoch, "block": block, "heads": 1.5, "budget": 0.7, "budget_std": 0.1, "entropy": 0.6} for epoch in (1, 2) for block in (0, 1)]
    (run / "layers.csv").write_text(as_csv(layers))
    (tmp_path / "dense" / "summary.csv").write_text(as_csv([{"epoch": 1, "eval_top1": 40.0}]))
    (tmp_path / "dense" / "layers.csv").write_text(as_csv([{"epoch": 1, "block": 0, "budget": None}]))
    write_image(tmp_path / "noise.png")
    return run


@pytest.fixture
def gates(analyze):
    return lambda *flags: analyze("gates", *flags)


def test_gates_of_a_run_are_tabulated_and_drawn(gates, run_folder, tmp_path):
    out = tmp_path / "new" / "gates"
    code, text = gates("--run", run_folder, *ON_DIGITS, "--image", tmp_path / "noise.png", "--output", out)
    assert code is None, code
    names = {"blocks.png", "classes.png", "difficulty.png", "budget_over_epochs.png", "entropy_over_epochs.png", "heads.png", "gates.json"}
    assert {path.name for path in out.iterdir()} == names
    report = json.loads((out / "gates.json").read_text(), parse_constant=pytest.fail)  # no NaN
    assert report["overall"]["inputs"] == 360
    assert [row["block"] for row in report["by_block"]] == [0, 1]
    assert len(report["by_class"]) == 20
    assert [row["group"] for row in report["by_difficulty"]] == ["easy", "medium", "hard", "right", "wrong"]
    assert [row["accuracy"] for row in report["over_epochs"]] == [41, 42]
    assert report["settings"]["checkpoint"] == str(run_folder / "best")
    assert report["environment"]["dtypes"] == ["float32"]
    assert f"{report['by_block'][1]['budget']:.3f} ± " in text
    assert f"{report['overall']['accuracy']:.2f}" in text


def test_gates_agree_with_the_evaluation(gates, run_tool, run_folder, tmp_path):
    gates("--checkpoint", run_folder / "best", *ON_DIGITS, "--output", tmp_path / "out")
    run_tool("evaluate.py", "--checkpoint", run_folder / "best", *ON_DIGITS, "--json", tmp_path / "evaluated.json")
    ours = json.loads((tmp_path / "out" / "gates.json").read_text())["overall"]
    row = json.loads((tmp_path / "evaluated.json").read_text())["results"][0]
    assert (ours["accuracy"], ours["macs"], ours["macs_spread"]) == (pytest.approx(row["top1"]), row["macs"], row["macs_spread"])
    assert (ours["loss"], ours["heads"]) == (pytest.approx(row["loss"]), pytest.approx(row["heads"]))


def test_few_images_are_spread_over_the_classes_and_broken_ones_left_out(gates, tmp_path):
    data = tmp_path / "data"
    images = [write_image(data / "val" / name / f"{number}.png") for name in "ab" for number in range(4)]
    vp.save(randomise_gates(timm.create_model("vit_mini28_budget", **TINY, num_classes=2)), tmp_path / "two")
    images[0].write_bytes(images[0].read_bytes()[:60])
    flags = ("--checkpoint", tmp_path / "two", "--data-dir", data, "--workers", "0", "--device", "cpu", "--images", "4", "--output", tmp_path / "out")
    code, text = gates(*flags, "--skip-broken")
    assert code is None, code
    report = json.loads((tmp_path / "out" / "gates.json").read_text())
    assert [row["inputs"] for row in report["by_class"]] == [1, 1, 2, 2]  # of a and of b, in two blocks
    assert report["broken_images"] == 1
    assert "left out: 1 image that could not be read" in text
    assert "cannot read the image" in gates(*flags)[0]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "give --checkpoint"),
        (("--checkpoint", "dense"), "the model has no gates"),
        (("--checkpoint", "nowhere"), "nowhere does not exist"),
        (("--run", "nowhere"), "no folder nowhere"),
        (("--run", "dense"), "the model of dense has no gates"),
        (("--checkpoint", "run/best", "--run", "run/best"), "no file run/best/summary.csv"),
        (("--run", "run", "--block", "0"), "give --image too"),
        (("--run", "run", "--image", "noise.png", "--block", "2"), "from 0 to 1, got 2"),
        (("--run", "run", "--image", "missing.png"), "cannot read the image missing.png"),
        (("--run", "run", "--images", "0"), "images must be a whole number >= 1, got 0"),
        (("--run", "run", "--batch-size", "0"), "batch_size must be > 0"),
        (("--run", "run", "--output", "noise.png"), "noise.png is a file"),
        (("--run", "run", "--data-dir", "run"), "takes no data_dir"),
        (("--run", "run", "--device", "gpu"), "device must be cpu"),
    ],
)
def test_a_users_error_about_gates_is_one_sentence(gates, run_folder, tmp_path, monkeypatch, flags, sentence):
    monkeypatch.chdir(tmp_path)
    code, _ = gates("--dataset", "digits", "--workers", "0", *flags)
    assert sentence in code
    assert not (tmp_path / "gates").exists()
