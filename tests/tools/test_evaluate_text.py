"""tools/evaluate_text.py from its command line."""

import csv
import json
import statistics

import pytest
import timm
import torch
import torch.nn.functional as F

from tests.helpers import single_thread
from tests.measure.fake_energy import fake_codecarbon
from tests.text.helpers import hand_macs, rows, save_encoder, write_csv, write_jsonl
from vit_prune import checkpoint
from vit_prune.text import job as job_module
from vit_prune.text.data.rows import Rows
from vit_prune.text.data.tokenizer import FILE, encode, load_tokenizer
from vit_prune.text.evaluation import run as run_module
from vit_prune.train.statistics import layer_statistics

pytest.importorskip("tokenizers")
SENTENCES = rows(9, start=1)


@pytest.fixture(autouse=True)
def one_thread():
    with single_thread():
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of models with their tokenizers, by name."""
    root = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        save_encoder(root / f"dense{seed}", seed=seed)
        save_encoder(root / f"budget{seed}", "text_mini_budget", seed=seed, initial_budget=0.5)
    save_encoder(root / "fixed", "text_mini_budget", budget=0.5)
    save_encoder(root / "mass", "text_mini_bias", rule="mass", tau=0.5)
    return root


@pytest.fixture
def texts(tmp_path):
    return write_jsonl(tmp_path / "test.jsonl", SENTENCES)


@pytest.fixture
def evaluate(run_tool, texts):
    """(exit status or None, stdout)."""
    return lambda *flags: run_tool("evaluate_text.py", *flags, "--device", "cpu", *([] if "--test-file" in flags else ["--test-file", texts]))[:2]


@pytest.fixture
def report(evaluate, tmp_path):
    """The JSON of an evaluation."""

    def call(*flags) -> dict:
        path = tmp_path / "report.json"
        code, _ = evaluate(*flags, "--json", path)
        assert code is None, code
        return json.loads(path.read_text())

    return call


def mean_tokens(folder, *more):
    """Of the sentences, each alone or in a pair with another text."""
    return statistics.fmean(len(ids) for ids in encode(load_tokenizer(folder / FILE), [(row["text"], *more) for row in SENTENCES], 16))


def one_by_one(folder):
    """Each text alone, without padding: {"heads": k of each text and block, "budget", "macs": by hand, "loss", "right"}."""
    model, tokenizer = checkpoint.load(folder).eval(), load_tokenizer(folder / FILE)
    found = {name: [] for name in ("heads", "budget", "macs", "loss", "right")}
    for row in SENTENCES:
        ids = torch.tensor(encode(tokenizer, [(row["text"],)], model.max_length))
        layers = layer_statistics(model, ids)
        target = model.pretrained_cfg["label_names"].index(row["label"])
        with torch.no_grad():
            logits = model(ids)
        found["heads"].append([int(layer["heads"]) for layer in layers])
        found["budget"].append([layer["budget"] for layer in layers])
        found["macs"].append(hand_macs(ids.shape[1], found["heads"][-1]))
        found["loss"].append(F.cross_entropy(logits, torch.tensor([target])).item())
        found["right"].append(int(logits.argmax()) == target)
    return found


def test_a_gated_row_is_what_each_text_alone_gives_and_costs_by_hand(report, models):
    alone = one_by_one(models / "budget0")
    row = report("--checkpoint", models / "budget0")["results"][0]
    of_texts = [statistics.fmean(ks) for ks in alone["heads"]]
    assert len(set(of_texts)) > 1
    assert len(set(alone["macs"])) > 4
    assert row["macs"] == round(statistics.fmean(alone["macs"]))
    assert row["macs_spread"] == round(statistics.pstdev(alone["macs"]))
    assert row["macs"] < row["macs_all_projected"] < row["dense_macs"]
    assert (row["heads"], row["heads_spread"]) == pytest.approx((statistics.fmean(of_texts), statistics.pstdev(of_texts)))
    assert row["heads_per_block"] == pytest.approx([statistics.fmean(block) for block in zip(*alone["heads"], strict=True)])
    assert row["budget"] == pytest.approx(statistics.fmean(s for text in alone["budget"] for s in text), abs=1e-5)
    assert (row["top1"], row["top5"], row["texts"]) == (pytest.approx(100 * statistics.fmean(alone["right"])), 100, 27)
    assert row["loss"] == pytest.approx(statistics.fmean(alone["loss"]), rel=1e-5)


def test_padding_and_the_size_of_batches_change_nothing(report, models):
    whole, parts = (report("--checkpoint", models / "budget0", models / "dense0", "--batch-size", size)["results"] for size in (27, 4))
    for one, other in zip(whole, parts, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert {name: one[name] for name in one if name not in ("loss", "loss_seeds", "budget")} == {
            name: other[name] for name in other if name not in ("loss", "loss_seeds", "budget")
        }


def test_dense_rows_have_lengths_but_no_gates(report, models):
    dense, fixed = report("--checkpoint", models / "dense0", models / "fixed")["results"]
    assert dense["macs_spread"] > 0
    assert dense["macs"] == dense["dense_macs"] == fixed["dense_macs"]
    assert [dense[name] for name in ("budget", "heads", "heads_spread", "heads_per_block", "macs_all_projected")] == [None] * 5
    assert (fixed["budget"], fixed["heads"], fixed["heads_spread"]) == (0.5, 2, 0)
    assert dense["tokens"] == fixed["tokens"] == mean_tokens(models / "dense0")


def test_seeds_give_mean_spread_and_each_value_in_json_and_table(evaluate, report, models):
    flags = ["--checkpoint", f"dense={models / 'dense0'},{models / 'dense1'}", f"budget={models / 'budget0'},{models / 'budget1'}"]
    dense, budget = report(*flags)["results"]
    alone = [report("--checkpoint", models / f"budget{seed}")["results"][0] for seed in (0, 1)]
    assert budget["top1_seeds"] == [one["top1"] for one in alone]
    assert (budget["top1"], budget["top1_std"]) == (statistics.fmean(budget["top1_seeds"]), statistics.stdev(budget["top1_seeds"]))
    assert budget["macs"] == statistics.fmean(one["macs"] for one in alone)
    assert dense["macs"] == dense["dense_macs"]
    _, out = evaluate(*flags)
    assert [line.split()[0] for line in out.splitlines()[2:4]] == ["dense", "budget"]
    assert " ".join(f"{top1:.2f}" for top1 in budget["top1_seeds"]) in out.splitlines()[3]
    assert "mean ± standard deviation over seeds: 2 of dense, 2 of budget" in out
    assert "27 texts of " in out


def test_the_report_says_what_it_depends_on_and_the_csv_says_the_same(report, models, tmp_path):
    found = report("--checkpoint", models / "budget0", "--csv", tmp_path / "x.csv", "--batch-size", "5")
    assert (found["texts"], found["batch_size"], found["device"], found["environment"]["threads"], found["energy"]) == (27, 5, "cpu", 1, None)
    assert {"torch", "timm", "vit_prune"} <= set(found["environment"]["versions"])
    assert "padding not counted" in found["units"]["macs"]
    assert "image" not in json.dumps(found["units"])
    numbers = {name for name, value in found["results"][0].items() if isinstance(value, (int, float))}
    assert numbers - {"texts", "query_key_free"} <= set(found["units"])
    with open(tmp_path / "x.csv", newline="") as file:
        [row] = csv.DictReader(file)
    assert (float(row["top1"]), int(row["macs"]), row["dtype"]) == (found["results"][0]["top1"], found["results"][0]["macs"], "float32")
    assert "threads" in row["environment"]


def test_energy_is_metered_for_each_seed_where_it_is_asked_for(evaluate, report, models, monkeypatch):
    trackers = fake_codecarbon(monkeypatch)
    flags = ["--checkpoint", f"dense={models / 'dense0'},{models / 'dense1'}"]
    assert (report(*flags)["results"][0]["energy_wh"], trackers) == (None, [])
    row = report(*flags, "--energy", "FRA")["results"][0]
    assert (row["energy_wh"], row["co2_g"], len(trackers)) == (2, 3, 2)
    out = {country: evaluate(*flags, *(["--energy", country] if country else []))[1] for country in (None, "FRA")}
    assert "Wh" not in out[None]
    assert out["FRA"].splitlines()[2].split()[-2:] == ["2", "3"]
    assert evaluate(*flags, "--energy", "XXX")[0].startswith("error: energy must be a country")


def test_test_texts_may_lack_a_class_and_are_numbered_as_the_model_numbers_them(report, models, tmp_path):
    whole = report("--checkpoint", models / "dense0")
    assert whole["texts"] == 27
    path = write_jsonl(tmp_path / "two.jsonl", [row for row in SENTENCES if row["label"] != "animals"] + [{"text": "oak", "label": -1}])
    two = report("--checkpoint", models / "dense0", "--test-file", path)
    assert (two["texts"], two["skipped"]) == (18, 1)
    model, tokenizer = checkpoint.load(models / "dense0").eval(), load_tokenizer(models / "dense0" / FILE)
    right = []
    for row in SENTENCES:
        if row["label"] != "animals":
            best = model(torch.tensor(encode(tokenizer, [(row["text"],)], 16))).argmax()
            right.append(model.pretrained_cfg["label_names"][best] == row["label"])
    assert two["results"][0]["top1"] == pytest.approx(100 * statistics.fmean(right))


def test_columns_and_pairs_are_read_as_in_training(run_tool, models, tmp_path):
    path = write_csv(tmp_path / "x.csv", [[row["label"], row["text"], "oak"] for row in SENTENCES])
    flags = ["--text-columns", "2", "3", "--label-column", "1", "--device", "cpu", "--json", tmp_path / "x.json"]
    assert run_tool("evaluate_text.py", "--checkpoint", models / "dense0", "--test-file", path, *flags)[0] is None
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["text_columns"] == ["2", "3"]
    assert found["results"][0]["tokens"] == mean_tokens(models / "dense0", "oak") > mean_tokens(models / "dense0")


def test_costs_without_a_closed_form_are_unknown_not_guessed(evaluate, report, models):
    row = report("--checkpoint", models / "mass")["results"][0]
    assert (row["macs"], row["saved"], row["keep"]) == (None, None, "mass 0.5")
    assert "unknown" in evaluate("--checkpoint", models / "mass")[1]


@pytest.fixture(scope="module")
def wrong(models, tmp_path_factory):
    """Folders that are no text encoders with their tokenizers, or of other classes."""
    root = tmp_path_factory.mktemp("wrong")
    for name, labels in (("other", ("animals", "plants", "stars")), ("unnamed", None)):
        save_encoder(root / name, labels=labels)
    save_encoder(root / "two", labels=None, num_classes=2)
    save_encoder(root / "bare")
    (root / "bare" / FILE).unlink()
    save_encoder(root / "vocabulary", vocab_size=99)
    save_encoder(root / "narrow", "text_mini_budget", s_max=0.5, initial_budget=0.5)
    checkpoint.save(timm.create_model("vit_mini28", depth=1, embed_dim=16, num_heads=2), root / "images")
    return root


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nothing", "no checkpoint"),
        ("", "has no config.json"),
        ("bare", "bare has no tokenizer.json beside it"),
        ("images", "images is a VisionTransformer, which takes no texts: tools/evaluate.py"),
        ("vocabulary", "knows 99 tokens, its tokenizer.json"),
        ("other", "other are not the data's: only in the checkpoint stars; only in the data tools"),
        ("two", "two has 2 classes, the data has 3"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_sentence_before_the_first_batch(evaluate, models, wrong, monkeypatch, name, sentence):
    monkeypatch.setattr(run_module, "measure", lambda *_, **__: pytest.fail("evaluated"))
    code, out = evaluate("--checkpoint", models / "dense0", wrong / name)
    assert code.startswith("error: ")
    assert sentence in code
    assert ("\n" in code, out) == (False, "")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--label-column", "lable"], "unknown column 'lable'; did you mean label?"),
        (["--text-columns", "label"], "text_columns and label_column must be different columns"),
        (["--batch-size", "0"], "batch_size must be > 0"),
        (["--dataset-dir", "d", "--test-file", "x.csv"], "give the texts: --test-file, or --dataset-dir, not both"),
        (["--test-split", "test"], "test_split goes with --dataset-dir"),
        (["--test-file", "x.txt"], "x.txt must end in .csv or .jsonl"),
        (["--json", "nowhere/x.json"], "no folder nowhere to write"),
    ],
)
def test_a_users_error_is_one_sentence(run_tool, models, texts, flags, sentence):
    code, out, _ = run_tool("evaluate_text.py", "--checkpoint", models / "dense0", "--test-file", texts, "--device", "cpu", *flags)
    assert str(code).startswith("error: ")
    assert sentence in code
    assert out == ""


def test_no_texts_and_an_unknown_flag_are_errors(run_tool, models):
    assert run_tool("evaluate_text.py", "--checkpoint", models / "dense0")[0] == "error: give the texts: --test-file, or --dataset-dir"
    assert run_tool("evaluate_text.py", "--checkpoint", models / "dense0", "--batch-sizes", "3")[0] == 2


def test_models_of_other_gates_are_not_two_seeds_of_one(evaluate, models, wrong):
    assert "are not two seeds of one model, their gates differ" in evaluate("--checkpoint", f"x={models / 'budget0'},{wrong / 'narrow'}")[0]


def test_a_model_without_class_names_takes_the_sorted_ones_of_the_data(report, models, wrong):
    named, unnamed = (report("--checkpoint", path)["results"][0] for path in (models / "dense0", wrong / "unnamed"))
    assert named["loss"] == unnamed["loss"]


def test_a_hugging_face_folder_is_read_at_its_test_split(run_tool, models, monkeypatch):
    asked = []

    def read_folder(*where, **columns):
        asked.append((*where, columns["label_column"]))
        return Rows("d (test)", [(row["text"],) for row in SENTENCES], [row["label"] for row in SENTENCES])

    monkeypatch.setattr(job_module, "read_folder", read_folder)
    code, out, _ = run_tool("evaluate_text.py", "--checkpoint", models / "dense0", "--dataset-dir", "d", "--test-split", "test", "--device", "cpu")
    assert (code, asked) == (None, [("d", "test", "label")])
    assert "27 texts of d (test); cpu, float32, threads 1, batch size 64" in out
