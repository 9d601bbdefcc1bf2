"""tools/evaluate.py from its command line."""

import json

import pytest
import timm
import torch

from vit_prune import checkpoint

TINY = {"depth": 2, "embed_dim": 16, "num_heads": 2, "img_size": 8}


@pytest.fixture
def evaluate(run_tool):
    """On the digits: (exit status or None, stdout)."""
    return lambda *flags: run_tool("evaluate.py", *flags, "--dataset", "digits", "--workers", "0", "--device", "cpu")[:2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model with a bias that is not zero, saved at keep 0.5."""
    torch.manual_seed(0)
    model = timm.create_model("vit_mini28_bias", keep=0.5, **TINY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("saved") / "model"
    checkpoint.save(model, folder)
    return folder


def test_each_schedule_gets_a_row_and_its_own_result(evaluate, saved, tmp_path):
    code, out = evaluate("--checkpoint", saved, "--eval-keep", "1", "linear:1:.1", "--json", tmp_path / "x.json")
    assert code is None
    assert [line.split()[0] for line in out.splitlines()] == ["keep", "1", "linear:1:0.1"]
    results = json.loads((tmp_path / "x.json").read_text())
    dense, pruned = results["results"]
    assert dense["loss"] != pruned["loss"]
    assert dense["macs"] > pruned["macs"] > 0
    assert (results["images"], results["device"], results["dtype"]) == (360, "cpu", "float32")


def test_without_schedules_the_model_is_evaluated_as_it_was_saved(evaluate, saved, tmp_path):
    evaluate("--checkpoint", saved, "--json", tmp_path / "as_saved.json")
    evaluate("--checkpoint", saved, "--eval-keep", ".5", "--json", tmp_path / "half.json")
    evaluate("--checkpoint", saved, "--eval-keep", "1", "--json", tmp_path / "dense.json")
    losses = [json.loads((tmp_path / f"{name}.json").read_text())["results"][0]["loss"] for name in ("as_saved", "half", "dense")]
    assert losses[0] == losses[1] != losses[2]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files of weights: of the tiny model, cut short, of MAE pretraining."""
    folder = tmp_path_factory.mktemp("files")
    model = timm.create_model("vit_mini28_bias", num_classes=1000)
    torch.save(model.state_dict(), folder / "1000_classes.pth")
    (folder / "broken.pth").write_bytes((folder / "1000_classes.pth").read_bytes()[:1000])
    weights = {name: value for name, value in model.state_dict().items() if not name.startswith("head") and ".prune." not in name}
    torch.save({"model": {**weights, "mask_token": torch.zeros(1, 1, 128), "decoder_embed.weight": torch.zeros(64, 128)}}, folder / "mae.pth")
    torch.save(timm.create_model("vit_mini28_bias", num_classes=10).state_dict(), folder / "good.pth")
    return folder


def test_a_file_of_weights_is_evaluated_with_the_name_of_its_model(evaluate, files):
    code, out = evaluate("--checkpoint", files / "good.pth", "--model", "vit_mini28_bias", "--eval-keep", "1")
    assert code is None
    assert out.splitlines()[1].split()[0] == "1"


@pytest.mark.parametrize(
    ("name", "flags", "sentence"),
    [
        ("nothing", [], "no checkpoint"),
        ("good.pth", [], "say what model it is for with --model"),
        ("good.pth", ["--model", "vit_mini28_bais"], "unknown model 'vit_mini28_bais'; did you mean vit_mini28_bias"),
        ("good.pth", ["--model", "deit_ti_bias"], "is this another model?"),
        ("good.pth", ["--model", "vit_mini28_bias", "--eval-keep", "1", "0"], "eval_keep: keep must be in (0, 1], got 0.0"),
        ("good.pth", ["--model", "vit_mini28_bias", "--eval-keep", "1", "1,.5"], "keep lists 2 ratios, the model has 6 blocks"),
        ("1000_classes.pth", ["--model", "vit_mini28_bias"], "head has 1000 classes in the file, 10 in the model"),
        ("broken.pth", ["--model", "vit_mini28_bias"], "is not a whole checkpoint"),
        ("mae.pth", ["--model", "vit_mini28_bias"], "is a MAE pretraining file"),
    ],
    ids=["missing", "no model", "unknown model", "another model", "keep 0", "keep of another depth", "classes", "broken", "MAE"],
)
def test_a_users_error_is_one_sentence(evaluate, files, name, flags, sentence):
    code, out = evaluate("--checkpoint", files / name, *flags)
    assert code.startswith("error: ")
    assert sentence in code
    assert "\n" not in code
    assert out == ""


def test_a_size_without_a_model_is_refused_instead_of_ignored(evaluate, saved):
    assert evaluate("--checkpoint", saved, "--img-size", "8")[0].startswith("error: img_size goes with --model")


def test_a_missing_folder_for_the_results_is_known_before_the_work(evaluate, saved, tmp_path):
    assert "to write" in evaluate("--checkpoint", saved, "--json", tmp_path / "nowhere" / "x.json")[0]


def test_our_own_weights_file_needs_no_model(evaluate, saved):
    assert evaluate("--checkpoint", saved / "model.safetensors") == evaluate("--checkpoint", saved)


def test_a_checkpoint_with_other_classes_than_the_data_is_refused(evaluate, tmp_path):
    checkpoint.save(timm.create_model("vit_mini28_bias", num_classes=7, **TINY), tmp_path / "seven")
    assert evaluate("--checkpoint", tmp_path / "seven")[0] == "error: the checkpoint has 7 classes, the data has 10"


def test_weights_that_are_not_numbers_are_an_error_not_a_row(evaluate, saved, tmp_path):
    model = checkpoint.load(saved)
    torch.nn.init.constant_(model.norm.weight, float("nan"))
    checkpoint.save(model, tmp_path / "nan")
    code, _ = evaluate("--checkpoint", tmp_path / "nan", "--json", tmp_path / "x.json")
    assert "no finite outputs" in code
    assert not (tmp_path / "x.json").exists()


def test_a_half_precision_checkpoint_is_evaluated_in_its_own_dtype(evaluate, saved, tmp_path):
    checkpoint.save(checkpoint.load(saved).bfloat16(), tmp_path / "half")
    code, _ = evaluate("--checkpoint", tmp_path / "half", "--json", tmp_path / "x.json")
    assert code is None
    assert json.loads((tmp_path / "x.json").read_text())["dtype"] == "bfloat16"
