"""tools/prune.py from its command line, and the other tools on the folder that it writes."""

import copy
import csv
import json
import shutil

import pytest
import torch

import vit_prune as vp
from tests.helpers import single_thread, tiny_named
from vit_prune.measure.macs import macs
from vit_prune.methods.l1 import L1, PrunePlan
from vit_prune.prune import prune

TINY = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 10}
QUICK = ["--dataset", "digits", "--batch-size", "700", "--workers", "0", "--device", "cpu", "--warmup-epochs", "0"]


@pytest.fixture(autouse=True)
def one_thread():
    with single_thread():
        yield


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A folder of vp.save: 2 blocks of 4 heads and 64 channels, 10 classes."""
    folder = tmp_path_factory.mktemp("dense") / "model"
    vp.save(tiny_named("vit_mini28", **TINY), folder)
    return folder


@pytest.fixture(scope="module")
def cut(dense):
    """The same with 3 heads and 32 channels, pruned by the API."""
    model = vp.load(dense)
    prune(model, L1(0.25, 0.5))
    vp.save(model, dense.parent / "cut")
    return dense.parent / "cut"


@pytest.fixture
def tool(run_tool, tmp_path):
    """(exit status or None, stdout)."""
    return lambda *flags: run_tool("prune.py", *flags, "--output", tmp_path / "out")[:2]


def cells(out: str, name: str) -> list[str]:
    return next(line.split()[1:] for line in out.splitlines() if line.startswith(name))


def test_a_folder_is_cut_counted_and_saved_with_its_plan(tool, dense, cut, tmp_path):
    code, out = tool("--model", dense)
    assert code is None, code
    whole, left = vp.load(dense), vp.load(tmp_path / "out")
    for name, model in (("before", whole), ("after", left)):
        parameters = sum(parameter.numel() for parameter in model.parameters())
        assert cells(out, name) == [f"{macs(model).total / 1e9:.3f}", f"{2 * macs(model).total / 1e9:.3f}", f"{parameters / 1e6:.2f}"]
    assert cells(out, "blocks.1") == ["3", "of", "4", "32", "of", "64"]
    assert left.state_dict().keys() == vp.load(cut).state_dict().keys()
    assert all(torch.equal(value, left.state_dict()[name]) for name, value in vp.load(cut).state_dict().items())
    plan = PrunePlan.from_dict(json.loads((tmp_path / "out/plan.json").read_text()))
    assert prune(whole, plan) == left.prune_plan == plan


def test_a_cut_folder_is_cut_again_and_counted_against_the_original(tool, cut):
    code, out = tool("--model", cut, "--heads", "0.34", "--mlp", "0.25", "--ranking", "global")
    assert code is None, code
    assert sum(int(cells(out, f"blocks.{block}")[0]) for block in range(2)) == 4
    assert sum(int(cells(out, f"blocks.{block}")[3]) for block in range(2)) == 48
    assert cells(out, "blocks.0")[2::3] == ["4", "64"]


def test_taylor_takes_as_many_batches_as_were_asked_for(tool, dense, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("torch.nn.functional.cross_entropy", lambda logits, labels: seen.append(labels) or logits.square().sum())
    code, out = tool("--model", dense, "--criterion", "taylor", "--dataset", "digits", "--batches", 3, "--batch-size", 64, "--device", "cpu")
    assert code is None, code
    assert [len(labels) for labels in seen] == [64] * 3
    assert all(len(labels.unique()) > 5 for labels in seen)  # shuffled: a folder's images are sorted by class
    assert cells(out, "blocks.0") == ["3", "of", "4", "32", "of", "64"]
    assert vp.load(tmp_path / "out").prune_plan != prune(vp.load(dense), L1(0.25, 0.5))


def test_a_name_takes_weights_size_and_classes(tool, tmp_path):
    weights = tiny_named("vit_mini28", img_size=16, depth=6, patch_size=4, embed_dim=128, num_classes=3)
    torch.save(weights.state_dict(), tmp_path / "weights.pth")
    code, out = tool("--model", "vit_mini28", "--img-size", 16, "--num-classes", 3, "--checkpoint", tmp_path / "weights.pth", "--heads", 0)
    assert code is None, code
    assert "weights loaded" in out
    plan = prune(copy.deepcopy(weights), L1(0, 0.5))
    assert vp.load(tmp_path / "out").prune_plan == plan


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--model", "vit_mini82"], "error: unknown model 'vit_mini82'; did you mean vit_mini28"),
        (["--model", "nowhere/model"], "error: no folder of vp.save nowhere/model"),
        (["--model", "DENSE", "--heads", "1"], "error: heads is the share that is removed, in [0, 1), got 1.0"),
        (["--model", "DENSE", "--heads", "0.1"], "error: heads: a share of 0.1 of 4 per block removes no whole head"),
        (["--model", "DENSE", "--pretrained"], "error: DENSE is a saved model, which is built as it was saved: leave out pretrained"),
        (["--model", "DENSE", "--dataset", "digits"], "error: --criterion taylor ranks by the images of --dataset"),
        (["--model", "DENSE", "--criterion", "taylor"], "error: --criterion taylor ranks by the images of --dataset"),
        (["--model", "vit_mini28", "--num-classes", "3", "--criterion", "taylor", "--dataset", "digits"], "error: vit_mini28 has 3 classes, the data has 10"),
        (["--model", "vit_mini28_bias"], "error: the model is patched"),
        (["--model", "test_resnet"], "error: timm.models.resnet.ResNet cannot be patched"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_users_error_is_one_sentence_and_writes_nothing(tool, dense, tmp_path, flags, sentence):
    code, _ = tool(*(dense if flag == "DENSE" else flag for flag in flags), "--device", "cpu")
    assert code.startswith(sentence.replace("DENSE", str(dense)))
    assert "\n" not in code
    assert not (tmp_path / "out").exists()


def test_an_unknown_flag_or_choice_ends_with_status_2(tool, dense):
    assert tool("--model", dense, "--criterion", "l2")[0] == 2
    assert tool("--model", dense, "--head", "0.5")[0] == 2


def test_a_folder_that_holds_something_is_not_written_over(tool, dense, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/config.json").write_text("{}")
    assert "out is there already" in tool("--model", dense)[0]
    assert (tmp_path / "out/config.json").read_text() == "{}"


@pytest.fixture
def train(run_tool, tmp_path):
    """(exit status or None, stdout)."""
    return lambda *flags: run_tool("train.py", *flags, *QUICK, "--output", tmp_path / "runs")[:2]


def test_training_goes_on_from_the_cut_weights(train, cut, tmp_path):
    assert train("--model", cut, "--epochs", 1, "--lr", "1e-12", "--weight-decay", 0, "--experiment", "run")[0] is None
    before, after = vp.load(cut), vp.load(tmp_path / "runs/run/last")
    assert after.prune_plan == before.prune_plan
    for name, value in before.state_dict().items():
        torch.testing.assert_close(after.state_dict()[name], value, rtol=0, atol=1e-6)
    assert f"model: {cut}\n" in (tmp_path / "runs/run/recipe.yaml").read_text()


def test_a_run_from_a_folder_is_resumed_and_says_where_the_folder_was(train, run_tool, cut, tmp_path):
    copied = shutil.copytree(cut, tmp_path / "copied")
    run = tmp_path / "runs/run"
    assert train("--model", copied, "--epochs", 1, "--lr", 0.01, "--experiment", "run")[0] is None
    assert run_tool("train.py", "--resume", run, "--epochs", 2)[0] is None
    with open(run / "summary.csv", newline="") as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["1", "2"]
    assert vp.load(run / "last").prune_plan == vp.load(cut).prune_plan
    shutil.rmtree(copied)
    assert run_tool("train.py", "--resume", run, "--epochs", 3)[0] == f"error: no folder of vp.save {copied}"


def test_another_number_of_classes_gets_a_fresh_head(train, cut, tmp_path):
    assert train("--model", cut, "--epochs", 1, "--num-classes", 12, "--experiment", "run")[0] is None
    assert vp.load(tmp_path / "runs/run/last").head.weight.shape == (12, 16)


@pytest.mark.filterwarnings("ignore:the token bias is all zero")
def test_a_cut_model_that_was_patched_takes_keep(train, cut, tmp_path):
    model = vp.load(cut)
    vp.patch(model, vp.TokenBias(keep=0.75))
    vp.save(model, tmp_path / "patched")
    assert train("--model", tmp_path / "patched", "--epochs", 1, "--keep", 1, "--eval-keep", 0.5, "--experiment", "run")[0] is None
    assert json.loads((tmp_path / "runs/run/last/config.json").read_text())["keep"] == [0.5, 0.5]
    code = train("--model", tmp_path / "patched", "--epochs", 1, "--eval-keep", 0.5)[0]
    assert code == "error: eval_keep with a saved model needs keep too, the columns kept in training"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pretrained", "--drop-path", "0.1", "--model-kwargs", "depth=1"], "leave out pretrained, drop_path, model_kwargs, or name a model of timm"),
        (["--per-head", "False"], "leave out per_head,"),
        (["--keep", "0.5"], "no Columns in this model"),
        (["--num-classes", "3"], "num_classes is 3, the data has 10 classes"),
    ],
    ids=str,
)
def test_what_a_saved_model_does_not_take_in_training_is_refused(train, cut, tmp_path, flags, message):
    code, _ = train("--model", cut, "--epochs", 1, *flags)
    assert code.startswith("error: ")
    assert message in code
    assert not (tmp_path / "runs").exists()


def test_the_cut_folder_is_evaluated(run_tool, cut, tmp_path):
    flags = ("--dataset", "digits", "--workers", 0, "--device", "cpu", "--json", tmp_path / "report.json")
    code, *_ = run_tool("evaluate.py", "--checkpoint", cut, *flags)
    assert code is None, code
    (row,) = json.loads((tmp_path / "report.json").read_text())["results"]
    assert row["macs"] == macs(vp.load(cut)).total


def test_the_cut_folder_is_timed_against_the_dense_one(run_tool, dense, cut, tmp_path):
    flags = ("--runs", 2, "--warmup", 0, "--no-memory", "--device", "cpu", "--threads", 1, "--output", tmp_path)
    code, *_ = run_tool("latency.py", "--model", cut, "--against", dense, *flags)
    assert code is None, code
    (path,) = tmp_path.glob("*/results.json")
    _, row = json.loads(path.read_text())["results"]
    assert row["predicted"] == macs(vp.load(dense)).total / macs(vp.load(cut)).total > 1


@pytest.mark.filterwarnings("ignore:the token bias is all zero")
def test_methods_are_timed_on_blocks_of_different_heads(run_tool, dense, tmp_path):
    model = vp.load(dense)
    first, second = (prune(vp.load(dense), L1(share, 0)).blocks[block] for block, share in enumerate((0.25, 0.5)))
    prune(model, PrunePlan((first, second)))
    assert [block.attn.num_heads for block in model.blocks] == [3, 2]
    vp.save(model, tmp_path / "uneven")
    flags = ("--runs", 2, "--warmup", 0, "--no-memory", "--device", "cpu", "--threads", 1, "--output", tmp_path / "out")
    assert run_tool("latency.py", "--model", tmp_path / "uneven", "--keep", 0.5, "--importance", "column_mean", *flags)[0] is None
    (path,) = (tmp_path / "out").glob("*/results.json")
    baseline, row = json.loads(path.read_text())["results"]
    assert baseline["model"] == f"{row['model']}, unpruned"  # not vit_mini28, which has more heads


def test_the_cut_folder_is_exported(run_tool, cut, tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    code, out, _ = run_tool("export.py", "--checkpoint", cut, "--output", tmp_path / "model.onnx")
    assert code is None, code
    assert "largest difference to torch" in out
