"""tools/analyze.py gates-text from its command line."""

import json
import statistics
from pathlib import Path

import pytest
import timm
from PIL import Image

from tests.helpers import single_thread
from tests.text.helpers import rows, save_encoder, write_csv, write_jsonl
from vit_prune import checkpoint
from vit_prune.text import job as job_module
from vit_prune.text.data.rows import Rows
from vit_prune.text.data.tokenizer import FILE

pytest.importorskip("tokenizers")
SENTENCES = rows(9, start=1)
PICTURES = {"blocks.png", "classes.png", "difficulty.png"}
OVER_EPOCHS = {"budget_over_epochs.png", "entropy_over_epochs.png"}


@pytest.fixture(autouse=True)
def one_thread():
    with single_thread():
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of models, by name, and texts.jsonl."""
    root = tmp_path_factory.mktemp("models")
    save_encoder(root / "budget", "text_mini_budget", initial_budget=0.5)
    save_encoder(root / "mass", "text_mini_budget", initial_budget=0.5, rule="mass", tau=0.5)
    save_encoder(root / "dense")
    save_encoder(root / "stars", "text_mini_budget", labels=("animals", "plants", "stars"))
    save_encoder(root / "bare", "text_mini_budget")
    (root / "bare" / FILE).unlink()
    save_encoder(root / "digits", "text_mini_budget", num_classes=10, labels=tuple("0123456789"))
    checkpoint.save(timm.create_model("vit_mini28_budget", depth=1, embed_dim=16, num_heads=2), root / "images")
    write_jsonl(root / "texts.jsonl", [*SENTENCES, {"text": "oak", "label": -1}])
    return root


@pytest.fixture
def gates(run_tool, models, tmp_path):
    """gates("budget", flags...) -> (exit status or None, stdout); what is written goes to tmp_path / "out"."""

    def call(name: str, *flags: object) -> tuple[int | str | None, str]:
        data = () if "--dataset-dir" in flags or "--test-file" in flags else ("--test-file", models / "texts.jsonl")
        return run_tool("analyze.py", "gates-text", "--checkpoint", models / name, *data, "--device", "cpu", "--output", tmp_path / "out", *flags)[:2]

    return call


def written(folder: Path) -> dict:
    return json.loads((folder / "gates.json").read_text(), parse_constant=pytest.fail)  # no NaN


def test_gates_of_texts_are_those_of_the_evaluation(gates, run_tool, models, tmp_path):
    code, out = gates("budget", "--batch-size", "4")
    assert code is None, code
    run_tool("evaluate_text.py", "--checkpoint", models / "budget", "--test-file", models / "texts.jsonl", "--device", "cpu", "--json", tmp_path / "x.json")
    report, row = written(tmp_path / "out"), json.loads((tmp_path / "x.json").read_text())["results"][0]
    ours = report["overall"]
    assert row["macs_spread"] > 0
    for name in ("macs", "macs_spread", "dense_macs", "macs_all_projected", "saved", "tokens"):
        assert ours[name] == row[name]
        assert report["units"][name].replace("image", "") == report["units"][name]
    for name in ("loss", "budget", "heads"):
        assert ours[name] == pytest.approx(row[name], rel=1e-5)
    assert (ours["accuracy"], ours["inputs"]) == (pytest.approx(row["top1"]), 27)
    assert [block["heads"] for block in report["by_block"]] == pytest.approx(row["heads_per_block"])
    assert statistics.fmean(block["budget"] for block in report["by_block"]) == pytest.approx(row["budget"], rel=1e-5)
    assert {path.name for path in (tmp_path / "out").iterdir()} == PICTURES | {"gates.json"}
    assert "27 texts of " in out
    assert "1 with the label -1 left out; CPU, float32, threads 1, batch size 4" in out


def test_a_run_of_the_trainer_gives_its_epochs_and_the_maps_of_a_text(run_tool, models, tmp_path):
    tiny = ["--model", "text_mini_budget", "--model-kwargs", "depth=2", "embed_dim=16", "num_heads=2", "--vocab-size", "60", "--max-length", "16"]
    files = ["--train-file", models / "texts.jsonl", "--test-file", models / "texts.jsonl"]
    how = ["--epochs", "2", "--batch-size", "12", "--device", "cpu", "--output", tmp_path, "--experiment", "run"]
    assert run_tool("train_text.py", *tiny, *files, *how)[0] is None
    flags = ["--run", tmp_path / "run", *files[2:], "--text", "the cat, the oak", "--block", "0", "--texts", "5", "--device", "cpu"]
    code, out, _ = run_tool("analyze.py", "gates-text", *flags, "--output", tmp_path / "new" / "gates")
    assert code is None, code
    report = written(tmp_path / "new" / "gates")
    assert {path.name for path in (tmp_path / "new" / "gates").iterdir()} == PICTURES | OVER_EPOCHS | {"gates.json", "heads.png"}
    assert [row["epoch"] for row in report["over_epochs"]] == [1, 2]
    assert len(report["over_epochs"][0]["entropy_per_block"]) == 2
    assert (report["overall"]["inputs"], report["texts"], report["skipped"]) == (5, 5, 1)
    assert report["settings"]["checkpoint"] == str(tmp_path / "run" / "best")
    assert report["settings"]["text"] == ["the cat, the oak"]
    assert "heads.png" in out


def test_pairs_are_read_and_drawn_as_pairs(gates, models, tmp_path):
    path = write_csv(tmp_path / "x.csv", [[row["label"], row["text"], "oak"] for row in SENTENCES])
    flags = ["--test-file", path, "--text-columns", "2", "3", "--label-column", "1"]
    tokens, widths = [], []
    for more in (["--text", "cat"], [*flags, "--text", "cat", "oak"]):
        code, _ = gates("budget", *more)
        assert code is None, code
        tokens.append(written(tmp_path / "out")["overall"]["tokens"])
        with Image.open(tmp_path / "out" / "heads.png") as picture:
            widths.append(picture.width)
    assert tokens[0] < tokens[1]
    assert widths[0] < widths[1]
    assert "--text takes as many texts as --text-columns names columns, 2, got 1" in gates("budget", *flags, "--text", "cat")[0]


def test_costs_without_a_closed_form_are_unknown(gates, tmp_path):
    code, out = gates("mass")
    assert code is None, code
    assert written(tmp_path / "out")["overall"]["macs"] is None
    assert "unknown" in out


def test_a_hugging_face_folder_is_read_at_the_split_that_is_named(gates, monkeypatch, tmp_path):
    def read_folder(path, split, *_, **__):
        return Rows(f"{path} ({split})", [(row["text"],) for row in SENTENCES], [row["label"] for row in SENTENCES])

    monkeypatch.setattr(job_module, "read_folder", read_folder)
    code, out = gates("budget", "--dataset-dir", "d", "--test-split", "validation")
    assert code is None, code
    assert "27 texts of d (validation); CPU" in out


@pytest.mark.parametrize(
    ("name", "flags", "sentence"),
    [
        ("dense", (), "the model has no gates"),
        ("images", (), "images is a VisionTransformer, which takes no texts: tools/analyze.py gates analyses models of images"),
        ("bare", (), "bare has no tokenizer.json beside it"),
        ("bare", ("--text", "cat"), "bare has no tokenizer.json beside it"),
        ("nowhere", (), "nowhere does not exist"),
        ("stars", (), "stars are not the data's: only in the checkpoint stars; only in the data tools"),
        ("budget", ("--label-column", "lable"), "unknown column 'lable'; did you mean label?"),
        ("budget", ("--text-columns", "label"), "text_columns and label_column must be different columns"),
        ("budget", ("--dataset-dir", "d", "--test-file", "x.csv"), "give the texts: --test-file, or --dataset-dir, not both"),
        ("budget", ("--test-split", "test"), "test_split goes with --dataset-dir"),
        ("budget", ("--test-file", "x.txt"), "x.txt must end in .csv or .jsonl"),
        ("budget", ("--text", "cat", "dog"), "--text takes as many texts as --text-columns names columns, 1, got 2"),
        ("budget", ("--block", "0"), "give --text too"),
        ("budget", ("--text", "cat", "--block", "2"), "from 0 to 1, got 2"),
        ("budget", ("--texts", "0"), "texts must be a whole number >= 1, got 0"),
        ("budget", ("--batch-size", "0"), "batch_size must be > 0"),
        ("budget", ("--run", "nowhere"), "no folder nowhere"),
        ("budget", ("--device", "gpu"), "device must be cpu"),
    ],
)
def test_a_users_error_is_one_sentence_and_nothing_is_written(gates, tmp_path, name, flags, sentence):
    code, out = gates(name, *flags)
    assert str(code).startswith("error: ")
    assert sentence in code
    assert ("\n" in code, out) == (False, "")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_or_a_run_and_texts_are_needed(run_tool, models):
    assert "or --run, a folder of tools/train_text.py" in run_tool("analyze.py", "gates-text")[0]
    assert run_tool("analyze.py", "gates-text", "--checkpoint", models / "budget")[0] == "error: give the texts: --test-file, or --dataset-dir"


def test_the_command_for_images_refuses_a_text_encoder(run_tool, models, tmp_path):
    flags = ("--dataset", "digits", "--workers", "0", "--device", "cpu", "--output", tmp_path / "out")
    code = run_tool("analyze.py", "gates", "--checkpoint", models / "digits", *flags)[0]
    assert "digits is a TextTransformer, which takes no images: tools/analyze.py gates-text analyses text encoders" in code
