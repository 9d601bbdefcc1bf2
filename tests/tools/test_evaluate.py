"""tools/evaluate.py from its command line."""

import csv
import json
import os
import statistics
import subprocess
import sys

import pytest
import timm
import torch

from tests.measure.fake_energy import fake_codecarbon
from tests.tools.conftest import TOOLS
from tests.train.helpers import write_image
from vit_prune import checkpoint
from vit_prune.measure.macs import macs
from vit_prune.train.evaluation import run as evaluate_module

TINY = {"depth": 2, "embed_dim": 16, "num_heads": 2, "img_size": 8}


def tiny(seed=0, name="vit_mini28_bias", **kwargs):
    """A model with weights, and a bias, that are not zero."""
    torch.manual_seed(seed)
    model = timm.create_model(name, **TINY | kwargs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


@pytest.fixture
def evaluate(run_tool):
    """On the digits: (exit status or None, stdout)."""
    return lambda *flags: run_tool("evaluate.py", *flags, "--dataset", "digits", "--workers", "0", "--device", "cpu")[:2]


@pytest.fixture
def report(evaluate, tmp_path):
    """The JSON of an evaluation on the digits."""

    def call(*flags) -> dict:
        path = tmp_path / "report.json"
        code, _ = evaluate(*flags, "--json", path)
        assert code is None, code
        return json.loads(path.read_text())

    return call


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of vp.save, by name."""
    root = tmp_path_factory.mktemp("models")
    made = {
        "half": tiny(0, keep=0.5),
        "other": tiny(1, keep=0.5),
        "mass": tiny(0, rule="mass", tau=0.7),
        "plain": tiny(2, "vit_mini28"),
        "free": tiny(2, query_key_free=1),
        "gray": tiny(0, keep=0.5),
    }
    made["gray"].pretrained_cfg = made["gray"].pretrained_cfg | {"mean": (0.1, 0.1, 0.1)}
    for name, model in made.items():
        checkpoint.save(model, root / name)
    return root


@pytest.fixture
def saved(models):
    return models / "half"


def names(out):
    """The first cell of each line of the table."""
    return [line.split()[0] for line in out.partition("\n\n")[0].splitlines()[2:]]


def test_each_schedule_gets_a_row_and_its_own_result(evaluate, saved, tmp_path):
    code, out = evaluate("--checkpoint", saved, "--eval-keep", "1", "linear:1:.1", "--json", tmp_path / "x.json")
    assert code is None
    assert [line.split()[1] for line in out.splitlines()[2:4]] == ["1", "linear:1:0.1"]
    results = json.loads((tmp_path / "x.json").read_text())
    dense, pruned = results["results"]
    assert dense["loss"] != pruned["loss"]
    assert dense["macs"] > pruned["macs"] > 0
    assert (dense["columns"], pruned["columns"]) == (5, 3.5)
    assert (results["images"], results["device"], results["ranks"], dense["dtype"]) == (360, "cpu", 1, "float32")


def test_without_schedules_the_model_is_evaluated_as_it_was_saved(report, saved):
    results = [report("--checkpoint", saved, *flags)["results"][0] for flags in ([], ["--eval-keep", ".5"], ["--eval-keep", "1"])]
    losses = [row["loss"] for row in results]
    assert losses[0] == losses[1] != losses[2]
    assert results[0]["keep"] == "0.5"


def test_each_of_several_checkpoints_is_evaluated_with_its_own_weights_and_images(report, models):
    paths = [models / name for name in ("half", "other", "gray", "plain")]
    together = report("--checkpoint", *paths)["results"]
    alone = [report("--checkpoint", path)["results"][0] for path in paths]
    assert together == alone
    assert len({row["loss"] for row in alone}) == 4


def test_one_loader_serves_all_models_that_take_the_same_images(report, models, monkeypatch):
    made = []
    monkeypatch.setattr(evaluate_module, "eval_loader", lambda *args, original=evaluate_module.eval_loader, **kw: made.append(1) or original(*args, **kw))
    report("--checkpoint", *(models / name for name in ("half", "other", "gray")), "--eval-keep", "1", ".5")
    assert len(made) == 2


def test_the_last_batch_weighs_by_its_images(report, saved):
    whole, parts = (report("--checkpoint", saved, "--batch-size", size)["results"][0] for size in ("360", "7"))  # 51 whole batches and one of 3
    assert (parts["top1"], parts["top5"]) == (whole["top1"], whole["top5"])
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-6)


def test_training_and_inference_are_not_swapped_in_the_two_by_two_table(evaluate, report, models):
    paths = [models / "half", models / "other"]
    table = report("--table", "training-inference", "--checkpoint", *paths, "--eval-keep", ".25")["results"]
    assert [(row["trained"], row["inference"]) for row in table] == [("dense", "dense"), ("dense", "pruned"), ("pruned", "dense"), ("pruned", "pruned")]
    alone = [report("--checkpoint", path, "--eval-keep", keep)["results"][0]["loss"] for path in paths for keep in ("1", ".25")]
    assert [row["loss"] for row in table] == alone
    _, out = evaluate("--table", "training-inference", "--checkpoint", *paths, "--eval-keep", ".25")
    lines = [line.split() for line in out.splitlines()]
    for place, name in ((0, "dense"), (2, "pruned")):
        assert lines[2 + place // 2] == [
            "trained",
            name,
            *(part for row in table[place : place + 2] for part in (f"{row['top1']:.2f}", f"({row['top5']:.2f})")),
        ]


def test_rules_report_their_own_columns_and_the_macs_of_the_mean_in_any_batch(report, models):
    flags = ["--table", "rules", "--checkpoint", models / "half", models / "mass"]
    topk, mass = report(*flags)["results"]
    assert (topk["importance"], topk["rule"], topk["keep"], topk["tau"], topk["columns_spread"]) == ("logit", "topk", "0.5", None, 0)
    assert (mass["importance"], mass["rule"], mass["keep"], mass["tau"]) == ("prob", "mass", "mass 0.7", 0.7)
    assert mass["columns_spread"] > 0
    per_block = [round(columns) for columns in mass["columns_per_block"]]
    assert mass["macs"] == macs(checkpoint.load(models / "mass"), num_columns=per_block).total
    again = report(*flags, "--batch-size", "7")["results"][1]  # 51 whole batches and one of 3
    assert [again[name] for name in ("columns", "columns_spread", "macs")] == [mass[name] for name in ("columns", "columns_spread", "macs")]


def test_query_key_free_blocks_are_counted_and_compared_with_the_first_row(report, models):
    plain, free = report("--table", "query-key-free", "--checkpoint", models / "plain", models / "free")["results"]
    assert (plain["query_key_free"], free["query_key_free"]) == (0, 1)
    assert (plain["top1_difference"], free["top1_difference"]) == (0, free["top1"] - plain["top1"])
    assert plain["saved"] == 0 < free["saved"] == 100 * macs(checkpoint.load(models / "free")).saved


def test_several_seeds_give_their_mean_their_spread_and_each_value(evaluate, report, models):
    seeds = f"bias={models / 'half'},{models / 'other'}"
    row = report("--checkpoint", seeds, "--eval-keep", "1")["results"][0]
    alone = [report("--checkpoint", models / name, "--eval-keep", "1")["results"][0] for name in ("half", "other")]
    assert row["top1_seeds"] == [one["top1"] for one in alone]
    assert (row["top1"], row["top1_std"]) == (statistics.fmean(row["top1_seeds"]), statistics.stdev(row["top1_seeds"]))
    assert row["macs"] == alone[0]["macs"]
    _, out = evaluate("--checkpoint", seeds, "--eval-keep", "1")
    assert names(out) == ["bias"]
    assert f"{row['top1']:.2f} ± {row['top1_std']:.2f}" in out


def test_the_csv_holds_the_same_numbers_and_what_they_depend_on(report, saved, tmp_path):
    results = report("--checkpoint", saved, "--eval-keep", "1", ".5", "--csv", tmp_path / "x.csv")
    with open(tmp_path / "x.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row, expected in zip(rows, results["results"], strict=True):
        assert (float(row["top1"]), float(row["loss"]), int(row["macs"])) == (expected["top1"], expected["loss"], expected["macs"])
        assert (row["dataset"], row["device"], row["dtype"], row["batch_size"], row["images"]) == ("digits", "cpu", "float32", "256", "360")
        assert "top1: percent" in row["units"]


def test_energy_is_metered_for_each_row_where_it_is_asked_for(evaluate, report, models, monkeypatch):
    trackers = fake_codecarbon(monkeypatch)
    flags = ["--checkpoint", f"bias={models / 'half'},{models / 'other'}", models / "plain"]
    plain = report(*flags)
    assert (plain["energy"], plain["results"][0]["energy_wh"], plain["results"][0]["co2_g"], trackers) == (None, None, None, [])
    metered = report(*flags, "--energy", "FRA")
    assert [tracker.calls for tracker in trackers] == [["start", "stop"]] * 3  # two seeds, and one
    meter = "codecarbon 9.9, process: RAM(), CPU(Cpu Load)"
    assert [(row["energy_wh"], row["co2_g"], row["energy_meter"]) for row in metered["results"]] == [(2, 3, meter)] * 2
    assert (metered["energy"], metered["units"]["energy_wh"].split()[0], metered["units"]["co2_g"].split()[0]) == ("FRA", "watt-hours", "grams")
    out = {country: evaluate(*flags, *(["--energy", country] if country else []))[1] for country in (None, "FRA")}
    assert "Wh" not in out[None]
    assert "CO2eq" in out["FRA"].splitlines()[0]
    assert out["FRA"].splitlines()[2].split()[-2:] == ["2", "3"]
    assert "electricity of FRA; codecarbon 9.9" in out["FRA"]


def test_a_country_that_is_not_known_and_two_processes_are_errors_before_the_work(evaluate, saved, monkeypatch):
    fake_codecarbon(monkeypatch)
    assert evaluate("--checkpoint", saved, "--energy", "XXX")[0].startswith("error: energy must be a country that codecarbon knows")
    monkeypatch.setattr(evaluate_module, "world_size", lambda: 2)
    assert "energy is metered in one process, and these are 2" in evaluate("--checkpoint", saved, "--energy", "FRA")[0]


def test_amp_reaches_the_model_and_the_report(report, saved):
    wide, narrow = report("--checkpoint", saved), report("--checkpoint", saved, "--amp", "--amp-dtype", "bfloat16")
    assert (wide["autocast"], narrow["autocast"]) == (None, "bfloat16")
    assert wide["results"][0]["loss"] != narrow["results"][0]["loss"]


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
    assert names(out) == [str(files / "good.pth")]


@pytest.mark.parametrize(
    ("name", "flags", "sentence"),
    [
        ("nothing", [], "no checkpoint"),
        ("good.pth", [], "say what model it is for with --model"),
        ("good.pth", ["--model", "vit_mini28_bais"], "unknown model 'vit_mini28_bais'; did you mean vit_mini28_bias"),
        ("good.pth", ["--model", "deit_ti_bias"], "is this another model?"),
        ("good.pth", ["--model", "vit_mini28_bias", "--eval-keep", "1", "0"], "eval_keep: keep must be in (0, 1], got 0.0"),
        ("good.pth", ["--model", "vit_mini28_bias", "--eval-keep", "1", "1,.5"], "good.pth: keep lists 2 ratios, the model has 6 blocks"),
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


@pytest.mark.parametrize(
    ("checkpoints", "flags", "sentence"),
    [
        (["half"], ["--table", "training-inference", "--eval-keep", ".5"], "compares two checkpoints, trained dense and trained pruned, got 1"),
        (["half", "other"], ["--table", "training-inference"], "takes one --eval-keep, the schedule of pruned inference, got 0"),
        (["half", "other"], ["--table", "training-inference", "--eval-keep", "linear:1:1"], "compares keep 1 with a schedule that prunes"),
        (["half"], ["--table", "rules", "--eval-keep", "1", ".5"], "give one --eval-keep at most, got 2"),
        (["half", "plain"], ["--table", "rules"], "plain has no Columns, so it has no rule to compare"),
        (["half", "plain"], ["--eval-keep", ".5"], "plain: no Columns in this model"),
        (["half", "mass"], ["--eval-keep", ".5"], "mass: the rule mass takes tau, not keep"),
        (["half"], ["--eval-keep", "1", "1,.5,.5"], "half: keep lists 3 ratios, the model has 2 blocks"),
        (["half", "half"], [], "name them, NAME=PATH"),
        (["half"], ["--table", "rulse"], "unknown table 'rulse'; did you mean rules?"),
        (["half"], ["--amp-dtype", "float64"], "unknown amp_dtype 'float64'"),
    ],
)
def test_what_does_not_fit_the_last_checkpoint_is_known_before_the_first_is_evaluated(evaluate, models, monkeypatch, checkpoints, flags, sentence):
    monkeypatch.setattr(evaluate_module, "measure", lambda *_, **__: pytest.fail("evaluated"))
    code, _ = evaluate("--checkpoint", *(models / name for name in checkpoints), *flags)
    assert code.startswith("error: ")
    assert sentence in code


def test_checkpoints_of_two_models_are_not_two_seeds_of_one(evaluate, models, tmp_path):
    checkpoint.save(tiny(keep=0.5, num_heads=4), tmp_path / "heads")
    assert "are not two seeds of one model, their weights differ" in evaluate("--checkpoint", f"x={models / 'half'},{tmp_path / 'heads'}")[0]
    assert "are not two seeds of one model, their rule differ" in evaluate("--checkpoint", f"x={models / 'half'},{models / 'mass'}")[0]
    assert "lists one path twice" in evaluate("--checkpoint", f"x={models / 'half'},{models / 'half'}")[0]


def test_a_size_without_a_model_is_refused_instead_of_ignored(evaluate, saved):
    assert evaluate("--checkpoint", saved, "--img-size", "8")[0].startswith("error: img_size goes with --model")


@pytest.mark.parametrize("flag", ["--json", "--csv"])
def test_a_missing_folder_for_the_results_is_known_before_the_work(evaluate, saved, tmp_path, flag):
    assert "to write" in evaluate("--checkpoint", saved, flag, tmp_path / "nowhere" / "x")[0]
    assert "is a folder" in evaluate("--checkpoint", saved, flag, tmp_path)[0]


def test_our_own_weights_file_needs_no_model(report, saved):
    file, folder = (report("--checkpoint", path)["results"][0] for path in (saved / "model.safetensors", saved))
    assert file["loss"] == folder["loss"]


def test_weights_that_are_not_numbers_are_an_error_not_a_row(evaluate, saved, tmp_path):
    model = checkpoint.load(saved)
    torch.nn.init.constant_(model.norm.weight, float("nan"))
    checkpoint.save(model, tmp_path / "nan")
    code, _ = evaluate("--checkpoint", saved, tmp_path / "nan", "--json", tmp_path / "x.json")
    assert f"{tmp_path / 'nan'} at keep 0.5 is nan: its weights give no finite outputs" in code
    assert not (tmp_path / "x.json").exists()


def test_a_half_precision_checkpoint_is_evaluated_in_its_own_dtype(report, saved, tmp_path):
    checkpoint.save(checkpoint.load(saved).bfloat16(), tmp_path / "half")
    assert [row["dtype"] for row in report("--checkpoint", saved, tmp_path / "half")["results"]] == ["float32", "bfloat16"]


def test_a_checkpoint_with_another_number_of_classes_than_the_data_is_refused(evaluate, tmp_path):
    checkpoint.save(tiny(num_classes=7), tmp_path / "seven")
    assert evaluate("--checkpoint", tmp_path / "seven")[0].endswith("seven has 7 classes, the data has 10")


@pytest.fixture
def labelled(tmp_path):
    """A function that saves a tiny model with a class list, as training does it."""

    def make(*label_names: str) -> str:
        model = tiny(num_classes=len(label_names))
        model.pretrained_cfg = {**model.pretrained_cfg, "label_names": label_names}
        checkpoint.save(model, tmp_path / "labelled")
        return str(tmp_path / "labelled")

    return make


@pytest.fixture
def on_folder(run_tool, tmp_path):
    """Five images of the classes a and b, in the folder "data": (exit status or None, stdout, the JSON)."""
    for index in range(5):
        write_image(tmp_path / "data" / "val" / "ab"[index % 2] / f"{index}.png", seed=index)

    def call(*flags: object) -> tuple:
        path = tmp_path / "folder.json"
        path.unlink(missing_ok=True)
        code, out, _ = run_tool("evaluate.py", *flags, "--data-dir", tmp_path / "data", "--workers", "0", "--device", "cpu", "--json", path)
        return code, out, json.loads(path.read_text()) if path.exists() else None

    return call


def test_other_class_names_are_refused_although_their_number_is_right(on_folder, labelled):
    code, _, _ = on_folder("--checkpoint", labelled("a", "c"))
    assert code.endswith("labelled are not the data's: only in the checkpoint c; only in the data b")


def test_the_same_classes_in_another_order_are_refused_and_put_right_by_a_class_map(on_folder, labelled, tmp_path):
    path = labelled("b", "a")
    code, _, _ = on_folder("--checkpoint", path)
    assert "in another order: b (0 and 1), a (1 and 0)" in code
    (tmp_path / "classes.txt").write_text("b\na\n")
    code, _, mapped = on_folder("--checkpoint", path, "--class-map", tmp_path / "classes.txt")
    assert code is None
    in_order = on_folder("--checkpoint", labelled("a", "b"))[2]
    assert mapped["results"][0]["loss"] != in_order["results"][0]["loss"]
    assert mapped["class_map"] == str(tmp_path / "classes.txt")


def test_broken_images_are_left_out_of_every_mean_counted_and_said(on_folder, labelled, tmp_path):
    path = labelled("a", "b")
    _, _, whole = on_folder("--checkpoint", path)
    for name in ("a/9.png", "b/9.png"):
        (tmp_path / "data" / "val" / name).write_bytes(b"no image")
    assert "cannot read the image" in on_folder("--checkpoint", path)[0]
    code, out, skipped = on_folder("--checkpoint", path, "--skip-broken", "--batch-size", "7", "--eval-keep", "1", ".5")
    assert code is None
    assert "2 images could not be read and are left out" in out
    assert (skipped["images"], skipped["broken_images"]) == (5, 2)
    assert skipped["results"][0]["loss"] == pytest.approx(whole["results"][0]["loss"])
    assert (whole["broken_images"], skipped["results"][0]["top1"]) == (0, whole["results"][0]["top1"])


def test_without_any_readable_image_there_is_no_row_of_nan(on_folder, labelled, tmp_path):
    for path in (tmp_path / "data").rglob("*.png"):
        path.write_bytes(b"no image")
    assert "none of the images could be read" in on_folder("--checkpoint", labelled("a", "b"), "--skip-broken")[0]


TWICE = """
import os, runpy, sys
import torch.distributed as dist
tool, store, first, second = sys.argv[1:]
sys.argv = [tool, *first.split()]
runpy.run_path(tool, run_name="__main__")  # in a group of its own
dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(os.environ["RANK"]), world_size=2)
sys.argv = [tool, *second.split()]
runpy.run_path(tool, run_name="__main__")  # in a group that is there already
dist.destroy_process_group()
"""


def test_two_processes_agree_with_one_exactly_also_where_one_of_them_has_no_image(run_tool, tmp_path):
    commands = []
    for name, images, classes in (("five", 5, "ab"), ("one", 1, "a")):
        for index in range(images):
            write_image(tmp_path / name / "val" / classes[index % len(classes)] / f"{index}.png", seed=index)
        checkpoint.save(tiny(num_classes=len(classes), rule="mass", tau=0.7), tmp_path / name / "model")
        data = f"--checkpoint {tmp_path / name / 'model'} --data-dir {tmp_path / name} --batch-size 1 --workers 0 --device cpu"
        commands.append(f"{data} --json {tmp_path / name / 'two.json'}")
        assert run_tool("evaluate.py", *data.split(), "--json", tmp_path / name / "single.json")[0] is None
    out = torchrun(tmp_path, commands)
    assert out.count("2 processes") == 2  # only the first process prints
    for name, images in (("five", 5), ("one", 1)):
        single, two = (json.loads((tmp_path / name / f"{run}.json").read_text()) for run in ("single", "two"))
        assert (single["ranks"], two["ranks"], two["images"]) == (1, 2, images)
        assert two["results"] == single["results"]  # top1, top5, loss, columns, MACs: bit for bit


def torchrun(folder, commands):
    """Run the tool in two processes with one command, then with the other; a start takes seconds. Returns: stdout."""
    (folder / "twice.py").write_text(TWICE)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = [*launcher, folder / "twice.py", TOOLS / "evaluate.py", folder / "store", *commands]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
