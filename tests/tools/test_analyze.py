"""tools/analyze.py from its command line."""

import pytest
import timm
from PIL import Image

import vit_prune as vp


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
