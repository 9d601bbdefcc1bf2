"""tools/sweep.py from its command line."""

import csv
import importlib.util

import pytest
import timm
import torch
from PIL import Image

import vit_prune as vp
from tests.helpers import single_thread
from tests.sweep.conftest import tiny

SWEEP = """
model: vit_mini28
img-size: 16
shares: [0.98]
runs: 11
methods:
  ToMe: [{name: tome, r: auto}]
  random: [{name: columns, keep: auto, importance: random}]
"""


@pytest.fixture(autouse=True)
def one_thread():
    with single_thread():
        yield


@pytest.fixture
def tool(run_tool, tmp_path):
    """On a file of this text: (exit status or None, stdout)."""

    def call(text: str, *flags: object) -> tuple:
        (tmp_path / "sweep.yaml").write_text(text)
        return run_tool("sweep.py", "--config", tmp_path / "sweep.yaml", "--output", tmp_path / "out", *flags)[:2]

    return call


def rows_of(folder) -> list[dict]:
    with (folder / "points.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_sweep_prints_a_table_writes_its_points_and_draws_them(tool, tmp_path):
    torch.save(timm.create_model("vit_mini28", img_size=16, num_classes=0).state_dict(), tmp_path / "weights.pth")
    code, out = tool(SWEEP, "--checkpoint", tmp_path / "weights.pth", "--threads", 1)
    assert code is None, code
    rows = rows_of(tmp_path / "out")
    assert [row["method"] for row in rows] == ["unpruned", "ToMe", "random"]
    assert all(row["latency_share"] and row["macs_share"] for row in rows[1:])
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["unpruned", "ToMe", "random"]
    assert f"{float(rows[1]['macs_share']):.3f}" in lines[3]
    assert lines[-1] == f"drawn: {tmp_path / 'out' / 'frontier.png'}"
    assert Image.open(tmp_path / "out/frontier.png").format == "PNG"


def test_flags_go_before_the_file(tool, tmp_path):
    assert tool(SWEEP, "--shares", 0.99, 0.97, "--img-size", 8, "--latency", False)[0] is None
    rows = rows_of(tmp_path / "out")
    assert [row["target_share"] for row in rows] == ["", "0.99", "0.97", "0.99", "0.97"]
    assert {(row["img_size"], row["latency_share"]) for row in rows} == {("8", "")}


def test_trained_folders_need_no_model(tool, tmp_path):
    vp.save(tiny(img_size=8, num_classes=10), tmp_path / "dense")
    code, out = tool(f"trained: {{dense: {tmp_path / 'dense'}}}\ndata: digits\nlatency: false\n")
    assert code is None, code
    assert f"{float(rows_of(tmp_path / 'out')[0]['top1']):.2f}" in out


def test_without_matplotlib_the_table_is_printed_and_the_picture_named(tool, tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else real(name, *rest))
    code, out = tool(SWEEP, "--latency", False, "--img-size", 8, "--shares", 0.99)
    assert code is None, code
    assert out.splitlines()[-1].startswith("no picture: matplotlib is not installed")
    assert not (tmp_path / "out/frontier.png").exists()


@pytest.mark.parametrize(
    ("text", "flags", "sentence"),
    [
        (SWEEP + "treads: 2", (), "unknown key 'treads'; did you mean threads"),
        (SWEEP.replace("tome", "tomme"), (), "unknown method 'tomme'"),
        (SWEEP.replace("vit_mini28", "vit_mini82"), (), "unknown model 'vit_mini82'; did you mean vit_mini28"),
        (SWEEP, ("--checkpoint", "nowhere.pth"), "nowhere.pth"),
        (SWEEP, ("--shares", "1.5"), "between 0 and 1, got 1.5"),
        ("trained: {dense: nowhere}\ndata: digits", (), "nowhere"),
        (SWEEP + "data: cifar", (), "unknown dataset 'cifar'"),
    ],
)
def test_a_users_error_is_one_sentence_and_no_point(tool, tmp_path, text, flags, sentence):
    code, out = tool(text, *flags)
    assert code.startswith("error: ")
    assert sentence in code
    assert "\n" not in code
    assert not out
    assert not (tmp_path / "out/points.csv").exists()


def test_a_missing_file_is_one_sentence(run_tool, tmp_path):
    assert run_tool("sweep.py", "--config", tmp_path / "nothing.yaml")[0].startswith("error: [Errno 2] No such file")


def test_help_names_the_flags(run_tool):
    code, out, _ = run_tool("sweep.py", "--help")
    assert code == 0
    assert all(flag in out for flag in ("--config", "--checkpoint", "--shares", "--latency", "--output"))
    assert run_tool("sweep.py")[0] == 2
