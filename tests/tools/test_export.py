"""tools/export.py from its command line."""

import pytest
import timm
import torch

import vit_prune as vp
from tests.helpers import randomise_bias, single_thread, tiny_named
from vit_prune.export import onnx_session

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.filterwarnings("ignore:the token bias is all zero")


@pytest.fixture
def export(run_tool):
    """(exit status or None, stdout)."""
    with single_thread():
        yield lambda *flags: run_tool("export.py", *flags)[:2]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of vp.save, a file of weights, and half a file."""
    root = tmp_path_factory.mktemp("export")
    vp.save(randomise_bias(tiny_named("deit_ti_bias", depth=1, keep=0.5)), root / "model")
    torch.save(timm.create_model("vit_mini28_bias", num_classes=7).state_dict(), root / "weights.pth")
    (root / "half.safetensors").write_bytes((root / "model" / "model.safetensors").read_bytes()[:500])
    return root


def test_a_checkpoint_becomes_an_onnx_file_at_another_keep(export, files, tmp_path):
    path = tmp_path / "model.onnx"
    code, out = export("--checkpoint", files / "model", "--keep", "0.25", "--output", path)
    assert code is None, code
    assert f"{path}: ONNX, opset 20, " in out
    assert "largest difference to torch: batch 1, 32 x 32: " in out
    assert "next: onnxruntime.InferenceSession(" in out
    images = torch.randn(2, 3, 32, 32)
    expected = vp.load(files / "model", keep=0.25).eval()(images).detach()
    torch.testing.assert_close(torch.from_numpy(onnx_session(path).run(None, {"images": images.numpy()})[0]), expected, rtol=0, atol=1e-5)


def test_a_file_of_weights_becomes_a_program(export, files, tmp_path):
    path = tmp_path / "model.pt2"
    flags = ("--model", "vit_mini28_bias", "--num-classes", 7, "--checkpoint", files / "weights.pth", "--format", "torch-export", "--no-fuse")
    code, out = export(*flags, "--output", path)
    assert code is None, code
    assert f"{path}: torch.export, " in out
    assert torch.export.load(path).module()(torch.randn(1, 3, 28, 28)).shape == (1, 7)


@pytest.mark.slow
def test_a_dense_model_of_any_size_says_that_its_weights_are_random(export, tmp_path):
    flags = ("--model", "test_vit", "--img-size", 64, 96, "--dynamic-size", "--output", tmp_path / "model.onnx")
    code, out = export(*flags)
    assert code is None, code
    assert "the weights are random" in out
    assert "batch 3, 64 x 96: " in out
    assert "batch 1, 96 x 80: " in out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "give --checkpoint FOLDER of vp.save, --model NAME"),
        (("--model", "deit_smal_patch16_224"), "did you mean deit_small_patch16_224"),
        (("--model", "resnet18", "--keep", "0.5"), "no Columns in this model"),
        (("--model", "vit_mini28", "--dynamic-size", "--img-size", "1", "2", "3"), "one side, or height and width, got 3"),
        (("--checkpoint", "half.safetensors"), "half.safetensors is not a whole safetensors file"),
        (("--checkpoint", "nowhere"), "nowhere does not exist"),
        (("--checkpoint", "model", "--keep", "2"), "keep must be in (0, 1], got 2"),
        (("--checkpoint", "model", "--dynamic-size"), "built with dynamic_img_size=True"),
        (("--checkpoint", "model", "--img-size", "48"), "does not take images of 48 x 48"),
        (("--checkpoint", "model", "--tolerance", "0"), "tolerance must be > 0"),
        pytest.param(("--checkpoint", "model", "--tolerance", "1e-12"), "give a larger tolerance", marks=pytest.mark.slow),
        (("--model", "vit_mini28_bias", "--checkpoint", "weights.pth"), "head has 7 classes in the file, 10 in the model"),
    ],
)
def test_a_users_error_is_one_sentence_and_no_file(export, files, tmp_path, monkeypatch, flags, sentence):
    monkeypatch.chdir(files)
    code, _ = export(*flags, "--output", tmp_path / "model.onnx")
    assert sentence in str(code)
    assert list(tmp_path.iterdir()) == []
