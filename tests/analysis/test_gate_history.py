"""Gates over the epochs of a run, and the pictures of rows made by hand."""

import pytest
from PIL import Image

from vit_prune.analysis.gates.history import over_epochs
from vit_prune.analysis.gates.pictures import NAMED_CLASSES, draw_blocks, draw_classes
from vit_prune.analysis.gates.report import draw
from vit_prune.analysis.gates.tables import epoch_table
from vit_prune.train.state import as_csv


def layer(epoch, block, budget, entropy):
    return {"epoch": epoch, "block": block, "heads": 4 * budget, "budget": budget, "budget_std": 0.1, "entropy": entropy}


@pytest.fixture
def run(tmp_path):
    """Two epochs of two blocks, and a third epoch that the summary does not know of."""
    (tmp_path / "summary.csv").write_text(as_csv([{"epoch": 1, "eval_top1": 50.0}, {"epoch": 2, "eval_top1": 75.5}]))
    (tmp_path / "layers.csv").write_text(
        as_csv([layer(1, 0, 0.9, 1.4), layer(1, 1, 0.7, 1.2), layer(2, 0, 0.5, 1.3), layer(2, 1, 0.4, 0.3), layer(3, 0, 0.1, 0.1)])
    )
    return tmp_path


def test_epochs_have_the_mean_over_the_blocks_beside_the_accuracy(run):
    first, second = over_epochs(run)
    assert (first["epoch"], first["accuracy"], second["accuracy"]) == (1, 50.0, 75.5)
    assert first["budget"] == pytest.approx(0.8)
    assert second["heads"] == pytest.approx(1.8)
    assert second["entropy"] == pytest.approx(0.8)
    assert second["entropy_per_block"] == [1.3, 0.3]
    assert second["budget_per_block"] == [0.5, 0.4]
    assert second["blocks"] == [0, 1]
    assert epoch_table([first, second]).splitlines()[-1].split() == ["2", "75.50", "0.450", "1.80", "0.800"]


@pytest.mark.parametrize(
    ("summary", "layers", "error", "message"),
    [
        (None, "epoch,block\n", FileNotFoundError, "no file .*summary.csv"),
        ("epoch,eval_top1\n1,50\n", None, FileNotFoundError, "no file .*layers.csv"),
        ("epoch,eval_top1\n1,50\n", "epoch,block,budget\n1,0,\n", ValueError, "has no gates"),
        ("epoch,eval_top1\n1,50\n", "epoch,block\n1,0\n", ValueError, "has no gates"),
        ("epoch,eval_top1\n", "epoch,block,budget\n1,0,.5\n", ValueError, "summary.csv holds no epochs"),
        ("a,b\n1,2\n", "epoch,block,budget\n1,0,.5\n", ValueError, "summary.csv holds no epochs"),
        ("epoch,eval_top1\n1,50\n", "epoch,block,budget,budget_std,entropy,heads\n1,0,high,0,0,1\n", ValueError, "no table of a training.*high"),
        ("epoch,loss\n1,50\n", "epoch,block,budget,budget_std,entropy,heads\n1,0,.5,0,0,1\n", ValueError, "no table of a training"),
        ("epoch,eval_top1\n1,50\n", "epoch,block,budget,budget_std,entropy,heads\n2,0,.5,0,0,1\n", ValueError, "no epoch in common"),
    ],
)
def test_a_folder_without_the_epochs_of_gates_is_refused(tmp_path, summary, layers, error, message):
    for name, text in (("summary.csv", summary), ("layers.csv", layers)):
        if text is not None:
            (tmp_path / name).write_text(text)
    with pytest.raises(error, match=message):
        over_epochs(tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder"):
        over_epochs(tmp_path / "nowhere")


def block_row(block, **more):
    return {"block": block, "budget": 0.5, "budget_std": 0.1} | more


def test_every_part_of_a_report_is_drawn_also_where_groups_are_empty(run, tmp_path):
    empty = {"inputs": 0} | dict.fromkeys(("accuracy", "budget", "budget_std", "budget_per_block"))
    one = {"inputs": 1, "accuracy": 100.0, "budget": 0.5, "budget_std": 0.0, "budget_per_block": [0.5, 0.5]}
    groups = [{"group": name} | (one if name in ("medium", "right") else empty) for name in ("easy", "medium", "hard", "right", "wrong")]
    report = {
        "by_block": [block_row(0), block_row(1)],
        "by_class": [block_row(block, **{"class": "cat", "inputs": 1}) for block in (0, 1)],
        "by_difficulty": groups,
        "over_epochs": over_epochs(run),
    }
    drawn = draw(report, tmp_path)
    assert [path.name for path in drawn] == ["blocks.png", "classes.png", "difficulty.png", "budget_over_epochs.png", "entropy_over_epochs.png"]
    assert all(Image.open(path).width > 300 for path in drawn)
    assert not list(tmp_path.glob(".*"))  # no half-written file


def test_a_heat_map_of_many_classes_stays_on_a_page(tmp_path):
    rows = [block_row(block, **{"class": str(name), "inputs": 1}) for name in range(10 * NAMED_CLASSES) for block in (0, 1)]
    assert Image.open(draw_classes(rows, tmp_path / "classes.png")).height < 2000


def test_dollar_signs_in_the_names_of_classes_are_no_formulas(tmp_path):
    rows = [block_row(0, **{"class": name, "inputs": 1}) for name in ("a$_$b", "$")]
    assert Image.open(draw_classes(rows, tmp_path / "classes.png")).width > 300


def test_a_picture_that_fails_half_way_leaves_the_old_file(tmp_path, monkeypatch):
    path = draw_blocks([block_row(0)], tmp_path / "blocks.png")
    before = path.read_bytes()

    def disk_full(_figure, target, **_):
        target.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", disk_full)
    with pytest.raises(OSError, match="no space left"):
        draw_blocks([block_row(0)], path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
