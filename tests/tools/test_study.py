"""tools/study.py from its command line."""

import json

from tests.train.test_study import RECIPE

STUDY = "recipe: recipe.yaml\nseeds: [0]\nvariants:\n  dense: {keep: 1}\n  pruned: {keep: 0.5}\n  mass: {rule: mass, tau: 0.5}\n"


def test_a_study_prints_a_row_per_variant_and_writes_the_same_numbers(run_tool, tmp_path, monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "study.yaml").write_text(STUDY)
    code, out, _ = run_tool("study.py", "--config", tmp_path / "study.yaml", "--output", tmp_path / "out", "--processes", 1)
    assert code is None
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["dense", "pruned", "mass"]
    assert "MMACs: 10^6 multiply-accumulates per image" in lines
    written = json.loads((tmp_path / "out/study.json").read_text())
    assert written["units"]["macs"] == "multiply-accumulates per image"
    variants = written["variants"]
    assert f"{variants['pruned']['top1_mean']:.2f}" in lines[3]
    assert variants["pruned"]["macs"] < variants["dense"]["macs"]
    assert variants["mass"]["macs"] < variants["dense"]["macs"]  # of the columns that it keeps on average


def test_a_users_error_is_one_sentence(run_tool, tmp_path):
    assert run_tool("study.py", "--config", tmp_path / "nothing.yaml")[0].startswith("error: [Errno 2] No such file")
    (tmp_path / "study.yaml").write_text("recipe: nowhere.yaml\nseeds: [0]\nvariants: {a: {}}\n")
    assert "nowhere.yaml" in run_tool("study.py", "--config", tmp_path / "study.yaml")[0]
