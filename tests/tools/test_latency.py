"""tools/latency.py from its command line."""

import csv
import json

import pytest
import timm

from tests.tools.conftest import TOOLS
from vit_prune import checkpoint
from vit_prune.measure import run
from vit_prune.measure.config import LatencyConfig, load_config

CONFIGS = TOOLS.parent / "configs"
QUICK = ("--device", "cpu", "--threads", "1", "--runs", "2", "--warmup", "0", "--no-memory")


@pytest.fixture(autouse=True)
def one_thread_before_and_after():
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def latency(run_tool, tmp_path):
    """(exit status or None, stdout, the JSON or None)."""

    def call(*flags):
        code, out, _ = run_tool("latency.py", "--output", tmp_path / "out", *flags)
        reports = sorted((tmp_path / "out").glob("*/results.json"))
        return code, out, json.loads(reports[-1].read_text()) if reports else None

    return call


def test_a_grid_is_measured_printed_and_written(latency, tmp_path):
    grid = ("--batch-size", "1", "2", "--backend", "math", "auto", "--img-size", "28", "56")
    code, out, report = latency("--model", "vit_mini28_bias", "--keep", "0.5", *QUICK, *grid)
    assert code is None
    assert out.startswith("device: CPU; CPU: ")
    assert out.count("median ms") == 8
    assert {(row["img_size"], row["batch_size"], row["backend"]) for row in report["results"]} == {
        (size, batch, backend) for size in ("28x28", "56x56") for batch in (1, 2) for backend in ("math", "auto")
    }
    assert [row["model"] for row in report["results"][:2]] == ["vit_mini28", "vit_mini28_bias, keep 0.5"]
    pruned = report["results"][1]
    assert pruned["flops"] == 2 * pruned["macs"] < 2 * pruned["dense_macs"]
    assert pruned["predicted"] == pruned["dense_macs"] / pruned["macs"]
    (folder,) = (tmp_path / "out").iterdir()
    assert {path.name for path in folder.iterdir()} == {"results.json", "results.csv", "table.txt", "speedups.png"}
    with open(folder / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["median_ms"]) for row in rows] == [row["median_ms"] for row in report["results"]]
    assert rows[0]["threads"] == "1"


def test_what_was_measured_before_a_failure_is_on_disk(latency, monkeypatch):
    measure, settings = run.measure, []

    def fails_at_the_second(config, setting, *args):
        settings.append(setting)
        if len(settings) == 2:
            raise ValueError("the machine is gone")
        return measure(config, setting, *args)

    monkeypatch.setattr(run, "measure", fails_at_the_second)
    code, _, report = latency("--model", "vit_mini28_bias", *QUICK, "--batch-size", "1", "2", "3")
    assert code == "error: the machine is gone"
    assert {row["batch_size"] for row in report["results"]} == {1}


def test_several_models_against_several_others(latency, tmp_path):
    saved = tmp_path / "saved"
    checkpoint.save(timm.create_model("vit_mini28_bias", keep=0.5), saved)
    _, _, report = latency("--model", saved, "test_resnet", "--img-size", "64", "--against", "vit_mini28", "test_vit", *QUICK)
    assert report["baselines"] == {"vit_mini28": None, "test_vit": "vit_mini28", str(saved): "vit_mini28", "test_resnet": "vit_mini28"}
    assert report["results"][-1]["macs"] is None


def test_a_training_step_is_measured_unfused(latency):
    code, out, report = latency("--model", "vit_mini28", "--keep", "0.5", "--dropped", "merge", "--mode", "train", "--dtype", "bfloat16", *QUICK)
    assert code is None
    assert "training step, 28 x 28 px, batch 1, bfloat16 autocast, eager" in out
    assert report["results"][1]["speedup"] > 0


def test_flags_override_a_recipe(latency, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("model: vit_mini28_bias\nkeep: 0.5\nbatch-size: [3]\nruns: 7\nmemory: false\ndevice: cpu\nthreads: 1\nwarmup: 0\n")
    _, _, report = latency("--config", path, "--runs", "1")
    assert (report["config"]["runs"], report["config"]["batch_size"], report["config"]["keep"]) == (1, [3], "0.5")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: [a]", "unknown key 'modle'; did you mean mode or model?"),
        ("model: [a]\nruns: many\n", "runs must be a whole number, got 'many'"),
        ("model: [a]\nimg-size: [1]\nimg_size: [2]\n", "img_size is given twice"),
        ("model: []", "model needs at least one name"),
    ],
)
def test_a_recipe_is_read_strictly(tmp_path, text, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"recipe.yaml: {message}"):
        load_config(path)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--model", "vit_mini28_bais"), "unknown model 'vit_mini28_bais'; nearest: vit_mini28_bias"),
        (("--model", "vit_mini28_bias", "--img-size", "28", "30"), "30 pixels cannot be cut into the patches of vit_mini28_bias"),
        (("--model", "vit_mini28", "--device", "gpu"), "device must be cpu, cuda or cuda:NUMBER, got 'gpu'"),
        (("--model", "vit_mini28", "--backend", "auto", "efficient"), "backend efficient cannot serve on the CPU"),
        (("--model", "vit_mini28", "--backend", "efficent"), "unknown backend 'efficent'; did you mean efficient?"),
        (("--model", "vit_mini28", "--engine", "eager", "cuda-graph"), "engine cuda-graph captures the launches of a CUDA device"),
        (("--model", "vit_mini28_bias", "--query-key-free", "6"), "vit_mini28_bias is pruned already and takes keep and heads alone"),
        (("--model", "vit_mini28", "--query-key-free", "6", "--backend", "flash"), "it never calls scaled_dot_product_attention"),
        (("--model", "vit_mini28", "--heads", "many"), "heads must be a number of heads >= 1, or one per block (6,4,2,...), got 'many'"),
        (("--model", "vit_mini28", "--heads", "9"), "heads must be a number of heads in 1..4, one per block, or None, got 9"),
        (("--model", "vit_mini28_bias", "--heads", "2"), "no gates in this model"),
        (("--model", "vit_mini28", "--runs", "0"), "runs must be >= 1, got 0"),
        (("--model", "vit_mini28", "--batch-size", "1", "1"), "batch-size takes one value or several different ones, got 1 1"),
        (("--model", "vit_mini28", "--keep", "2"), "keep must be in (0, 1], got 2.0"),
        (("--model", "test_resnet", "--keep", "0.5"), "ResNet cannot be patched"),
        (("--model", "vit_mini28", "--checkpoint", "nowhere"), "no checkpoint nowhere"),
        (("--model", "vit_mini28", "--output", __file__), "output must be a folder, and"),
        (("--config", "nowhere.yaml"), "nowhere.yaml"),
        ((), "model needs at least one name of timm"),
    ],
)
def test_a_users_error_is_one_sentence_before_anything_is_timed(latency, monkeypatch, flags, sentence):
    monkeypatch.setattr(run, "measure", lambda *_: pytest.fail("something was timed"))
    device = () if "--device" in flags else ("--device", "cpu")
    code, _, report = latency(*flags, *device)
    assert code.startswith("error: ")
    assert sentence in code
    assert report is None


@pytest.mark.parametrize("name", ["latency_table1", "latency_a40", "latency_epyc"])
def test_the_tables_recipes_print_every_row_and_leave_open_what_needs_a_gpu(latency, name):
    config = load_config(CONFIGS / f"{name}.yaml")
    assert isinstance(config, LatencyConfig)
    models = ("vit_mini28_bias", "vit_mini28")
    code, out, report = latency("--config", CONFIGS / f"{name}.yaml", "--model", *models, "--runs", "1", "--warmup", "0", "--threads", "1")
    assert code is None
    rows = [line for line in out.splitlines() if line.startswith("vit_mini28")]
    assert len(rows) == 4
    owed = config.device == "cuda"
    assert all(("owed" in row) == owed for row in rows)
    assert ("there is no CUDA device here" in out) == owed
    assert all(flops > 0 for flops in report["flops"].values())


def test_a_gpu_table_on_the_cpu_is_filled_and_the_header_says_so(latency):
    flags = ("--config", CONFIGS / "latency_a40.yaml", "--model", "vit_mini28_bias", *QUICK)
    code, out, report = latency(*flags)
    assert code is None
    assert out.startswith("device: CPU")
    assert [row["backend"] for row in report["results"]] == ["math", "math"]
    assert "x)  " in next(line for line in out.splitlines() if line.startswith("vit_mini28_bias"))
    assert "backend efficient cannot serve on the CPU" in next(iter(report["owed"].values()))


def test_accuracy_is_of_the_models_that_have_weights(latency, tmp_path):
    import torch

    torch.save(timm.create_model("vit_mini28").state_dict(), tmp_path / "dense.pth")
    flags = ("--config", CONFIGS / "latency_table1.yaml", "--model", "vit_mini28_bias", "--dataset", "digits", "--workers", "0", *QUICK)
    code, out, report = latency(*flags, "--checkpoint", f"vit_mini28={tmp_path / 'dense.pth'}")
    assert code is None
    assert set(report["accuracy"]) == {"vit_mini28"}
    assert 0 <= report["accuracy"]["vit_mini28"]["top1"] <= report["accuracy"]["vit_mini28"]["top5"] <= 100
    dense, pruned = (line for line in out.splitlines() if line.startswith("vit_mini28"))
    assert "owed" not in dense
    assert pruned.count("owed") == 2
