"""tools/search.py from its command line."""

import pytest
import timm
import torch

from tests.helpers import single_thread
from tests.search.test_cost import fit_by_macs
from vit_prune.measure.macs import macs
from vit_prune.methods.columns import Columns
from vit_prune.search import LatencyCost, Search, load_found

NAME = "vit_mini28"


@pytest.fixture(autouse=True)
def one_thread():
    with single_thread():
        yield


@pytest.fixture
def tool(run_tool, tmp_path):
    """(exit status or None, stdout), on four images of 16 pixels."""
    few = ("--model", NAME, "--img-size", 16, "--images", 4, "--exchanges", 0, "--output", tmp_path / "out")
    return lambda *flags: run_tool("search.py", *few, *flags)[:2]


def cells(out: str, start: str) -> list[str]:
    return next(line.split()[1:] for line in out.splitlines() if line.startswith(start))


def test_a_recipe_is_written_and_its_settings_are_shown_block_by_block(tool, tmp_path):
    code, out = tool("--target", "macs:0.96")
    assert code is None, code
    found = load_found(tmp_path / "out/macs-0.96.yaml")
    assert out.startswith(f"macs:0.96: predicted {found.share:.3f}, loss {found.loss:.5f} (features)\n")
    columns = next(method for method in found.methods if isinstance(method, Columns))
    assert (columns.importance, columns.dropped, columns.sampling) == ("column_mean", "merge", "systematic")
    merges = next((method.r for method in found.methods if method.name == "tome"), (0,) * 6)
    rows = [cells(out, f"blocks.{block}") for block in range(6)]
    assert [row[:2] for row in rows] == [[f"{keep:g}", str(r)] for keep, r in zip(columns.keep.ratios(6), merges, strict=True)]
    assert all(row[2:] == ["4", "of", "4", "512", "of", "512"] for row in rows)
    assert f"# vp.search, {NAME} at 16 px, photographs" in (tmp_path / "out/macs-0.96.yaml").read_text()


def test_what_is_cut_is_shown_and_the_recipe_makes_a_model_of_that_cost(tool, tmp_path):
    code, out = tool("--methods", "l1", "--target", "macs:0.8", "macs:0.7")
    assert code is None, code
    for target in ("0.8", "0.7"):
        found = load_found(tmp_path / f"out/macs-{target}.yaml")
        model = timm.create_model(NAME, img_size=16, num_classes=0)
        whole = macs(model).total
        assert macs(found.apply(model)).total / whole == pytest.approx(found.share)
        assert found.share <= float(target)
    shown = out.split("macs:0.7")[1]
    kept = [(len(block.heads), len(block.channels)) for block in found.plan.blocks]
    assert [tuple(int(cells(shown, f"blocks.{block}")[place]) for place in (2, 5)) for block in range(6)] == kept


def test_one_search_on_as_many_images_as_were_asked_for_serves_all_targets(tool, monkeypatch):
    calls, find = [], Search.find
    monkeypatch.setattr(Search, "find", lambda self, target, **how: calls.append((self, target, how)) or find(self, target, **how))
    assert tool("--target", "macs:0.98", "macs:0.97", "--methods", "columns", "--exchanges", 1)[0] is None
    assert [call[1:] for call in calls] == [("macs:0.98", {"exchanges": 1}), ("macs:0.97", {"exchanges": 1})]
    assert calls[0][0] is calls[1][0]
    assert [len(images) for images, _ in calls[0][0].batches] == [1] * 4


def test_under_a_target_of_time_the_ratio_that_was_measured_is_shown(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(LatencyCost, "_fit", fit_by_macs)
    monkeypatch.setattr(LatencyCost, "measure", lambda *_: 0.9)
    code, out = tool("--target", "latency:0.9", "--methods", "l1")
    assert code is None, code
    found = load_found(tmp_path / "out/latency-0.9.yaml")
    assert found.measured == 0.9
    assert out.startswith(f"latency:0.9: predicted {found.share:.3f}, measured 0.900, loss ")


@pytest.mark.parametrize("fidelity", ["logits", "labels"])
def test_a_data_set_is_searched_by_its_images_and_labels(tool, tmp_path, fidelity):
    torch.save(timm.create_model(NAME, img_size=16, num_classes=10).state_dict(), tmp_path / "weights.pth")
    flags = ("--data", "digits", "--fidelity", fidelity, "--checkpoint", tmp_path / "weights.pth", "--methods", "l1", "--target", "macs:0.9")
    code, out = tool(*flags)
    assert code is None, code
    assert f"({fidelity})" in out
    assert load_found(tmp_path / "out/macs-0.9.yaml").fidelity == fidelity


def test_a_checkpoint_and_a_seed_reach_the_model(tool, tmp_path):
    torch.manual_seed(7)
    torch.save(timm.create_model(NAME, img_size=16, num_classes=0).state_dict(), tmp_path / "weights.pth")
    outs = []
    for place, flags in enumerate((("--seed", 1), ("--seed", 1), ("--seed", 2), ("--seed", 1, "--checkpoint", tmp_path / "weights.pth"))):
        outs.append(tool("--target", "macs:0.9", "--methods", "l1", "--output", tmp_path / str(place), *flags)[1].splitlines()[0])
    assert outs[0] == outs[1]
    assert len(set(outs)) == 3


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--target", "macs:2"), "target must be macs:SHARE or latency:SHARE"),
        (("--target", "macs:0.9", "0.8"), "got '0.8'"),
        (("--target", "macs:0.9", "--checkpoint", "nowhere.pth"), "nowhere.pth"),
        (("--target", "macs:0.9", "--checkpoint", "x.pth", "--pretrained"), "give --pretrained or --checkpoint, not both"),
        (("--target", "macs:0.9", "--fidelity", "logits"), "photographs have no classes"),
        (("--target", "macs:0.9", "--images", "0"), "images must be at least 1, got 0"),
        (("--target", "macs:0.9", "--methods", "tome", "tome"), "a method is given twice"),
        (("--target", "macs:0.9", "--data", "cifar"), "unknown dataset 'cifar'"),
        (("--target", "macs:0.9", "--model", "vit_mini82"), "did you mean vit_mini28"),
        (("--target", "macs:0.1", "--methods", "l1"), "not to 0.1"),
    ],
)
def test_a_users_error_is_one_sentence_and_writes_nothing(tool, tmp_path, flags, sentence):
    code, out = tool(*flags)
    assert code.startswith("error: ")
    assert sentence in code
    assert "\n" not in code
    assert not out
    assert not (tmp_path / "out").exists()


def test_help_names_every_flag_and_an_unknown_choice_ends_with_status_2(run_tool):
    code, out, _ = run_tool("search.py", "--help")
    assert code == 0
    assert all(flag in out for flag in ("--target", "--methods", "--fidelity", "--exchanges", "--data-dir", "of the photographs there are"))
    assert run_tool("search.py", "--model", NAME, "--target", "macs:0.9", "--output", "x", "--methods", "tomme")[0] == 2


def test_a_recipe_that_is_there_is_not_written_over(tool):
    tool("--target", "macs:0.9", "--methods", "l1")
    assert "macs-0.9.yaml is there already: give another --output" in tool("--target", "macs:0.9", "--methods", "l1")[0]


def test_a_target_out_of_reach_leaves_the_others_their_turn_and_is_told_at_the_end(tool, tmp_path):
    code, out = tool("--methods", "tome", "--target", "macs:0.1", "macs:0.97")
    assert code.startswith("error: macs:0.1: r ")
    assert out.startswith("macs:0.97: predicted 0.9")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["macs-0.97.yaml"]
