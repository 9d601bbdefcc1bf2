import importlib.util
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import timm

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("flops_tool", ROOT / "tools" / "flops.py")
flops = importlib.util.module_from_spec(SPEC)
sys.modules["flops_tool"] = flops  # dataclasses look their module up
SPEC.loader.exec_module(flops)

pytestmark = pytest.mark.filterwarnings("ignore:the token bias is all zero")


def output(capsys, *models: str, **flags) -> str:
    flops.run(flops.Flags(model=models, **{"fvcore": False, **flags}))
    return capsys.readouterr().out


def test_dense_pruned_saved_and_ceiling_are_printed_and_checked(capsys, tmp_path):
    path = tmp_path / "flops.json"
    printed = output(capsys, "deit_small_patch16_224", keep="0.5", per_block=True, json=path)
    assert "counted as in closed form" in printed
    assert printed.splitlines()[-1].split()[3:] == ["4.599", "4.080", "8.159", "11.3%", "1.127x", "22.9%", "1.298x"]
    assert "blocks.11" in printed
    data = json.loads(path.read_text())["deit_small_patch16_224"]
    assert data["counted"] == {"pruned": data["macs"], "dense": 4_598_882_304}


def test_every_flag_reaches_the_model(capsys, tmp_path):
    path = tmp_path / "flops.json"
    flags = {"keep": "linear:1.0:0.3", "dropped": "merge", "importance": "column_mean", "merge_rank": 16, "query_key_free": 2, "img_size": (96, 160)}
    output(capsys, "deit_tiny_patch16_224", json=path, **flags)
    blocks = json.loads(path.read_text())["deit_tiny_patch16_224"]["blocks"]
    assert {block["num_tokens"] for block in blocks} == {61}
    assert (blocks[0]["num_columns"], blocks[-1]["num_columns"]) == (61, 1 + 18)
    assert blocks[-1]["parts"]["q"] == 0 < blocks[-3]["parts"]["q"]
    anticipated = 192 * 192 + 61 * 3 * 192
    M = blocks[5]["num_columns"]
    assert blocks[5]["parts"]["selection"] == anticipated + 61 * 192 * 16 + (61 - M) * (M - 1) * 16


@pytest.mark.skipif("deit_s_bias" not in timm.list_models(), reason="no models of ours are registered")
def test_a_model_that_comes_patched_takes_keep_and_nothing_else(capsys):
    ours, theirs = output(capsys, "deit_s_bias", "deit_small_patch16_224", keep="0.5").splitlines()[-2:]
    assert ours.split()[1:] == theirs.split()[1:]
    with pytest.raises(ValueError, match="deit_s_bias is pruned already and takes keep and heads alone; give dropped"):
        output(capsys, "deit_s_bias", keep="0.5", dropped="merge")


def test_without_fvcore_the_tool_says_so(capsys, monkeypatch):
    monkeypatch.setattr(flops.importlib.util, "find_spec", lambda name: None)
    assert "fvcore is not installed" in output(capsys, "deit_tiny_patch16_224", fvcore=True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"model": ("deit_smal_patch16_224",)}, "unknown model 'deit_smal_patch16_224'; nearest: deit_small_patch16_224"),
        ({"model": ("resnet18",), "keep": "0.5"}, "ResNet cannot be patched"),
        ({"model": ("resnet18",)}, "MACs of .*ResNet are not known"),
        ({"keep": "1.5"}, r"keep must be in \(0, 1\], got 1.5"),
        ({"keep": "lineer:1:0.3"}, "unknown keep schedule 'lineer'"),
        ({"img_size": (1, 2, 3)}, "one side, or height and width"),
        ({"img_size": (8,)}, "8 x 8 pixels cannot be cut into patches"),
        ({"dropped": "merge", "merge_rank": 193}, r"merge-rank must be in 1..192"),
    ],
)
def test_what_a_user_gets_wrong_is_one_sentence_before_any_table(capsys, flags, message):
    with pytest.raises((ValueError, TypeError), match=message):
        flops.run(flops.Flags(**{"model": ("deit_tiny_patch16_224",), **flags}))
    assert "GMACs" not in capsys.readouterr().out


def test_the_command_ends_with_a_sentence_and_a_status_not_a_traceback(monkeypatch):
    flags = ["--model", "deit_smal_patch16_224", "--img-size", "224", "224", "--query-key-free", "1"]
    monkeypatch.setattr(sys, "argv", ["flops.py", *flags])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / "flops.py"), run_name="__main__")
    assert ended.value.code.startswith("flops: unknown model 'deit_smal_patch16_224'; nearest: deit_small_patch16_224")  # text: status 1


def test_importing_the_package_loads_neither_fvcore_nor_matplotlib():
    code = "import sys, vit_prune, vit_prune.measure.macs, vit_prune.measure.report; print([m for m in ('fvcore', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr
