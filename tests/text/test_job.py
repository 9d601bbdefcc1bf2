"""The training of a text encoder, by the trainer that images have."""

import csv
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

import vit_prune as vp
from tests.helpers import randomise_bias
from tests.text.helpers import rows, write_jsonl
from tests.train.test_resume import differences
from vit_prune.methods.stack import columns_methods
from vit_prune.text.config import TextConfig
from vit_prune.text.data.tokenizer import load_tokenizer
from vit_prune.text.job import prepare_text
from vit_prune.train import engine
from vit_prune.train.evaluation.accuracy import evaluate
from vit_prune.train.recipe import load_recipe, save_recipe
from vit_prune.train.run import run
from vit_prune.train.state import RunFolder
from vit_prune.train.statistics import layer_statistics
from vit_prune.train.study import load_study, load_variant, train_one, with_run_folder

pytest.importorskip("tokenizers")
CPU = torch.device("cpu")


class Killed(Exception):
    """Nothing catches it."""


def train(config: TextConfig) -> dict:
    return run(config, prepare=prepare_text)


def test_it_learns_and_leaves_models_that_give_the_accuracy_of_the_summary(tiny_text):
    config = tiny_text(epochs=12)
    result = train(config)
    folder = Path(result["folder"])
    assert result["last"]["eval_top1"] > 90
    with open(folder / "summary.csv", newline="") as file:
        assert float(list(csv.DictReader(file))[-1]["eval_top1"]) == result["last"]["eval_top1"]
    model = vp.load(folder / "last")
    assert model.pretrained_cfg["label_names"] == ("animals", "plants", "tools")
    again = prepare_text(replace(config, tokenizer=str(folder / "last" / "tokenizer.json"), experiment="again"), CPU)
    assert evaluate(model, again.eval_loader, CPU)["top1"] == result["last"]["eval_top1"]
    for name in ("last", "best", "."):
        assert load_tokenizer(folder / name / "tokenizer.json").get_vocab_size() == model.vocab_size
    assert load_recipe(folder / "recipe.yaml", TextConfig) == replace(config, experiment=None)


def test_the_tokens_reach_the_model_as_whole_numbers_in_half_precision_too(tiny_text):
    model = prepare_text(tiny_text(), CPU)
    half = model.training.model.to(torch.bfloat16)
    assert evaluate(half, model.eval_loader, CPU)["images"] == 9


def kill_in_epoch(monkeypatch, epoch: int, updates_per_epoch: int):
    original, calls = engine.train_step, []

    def train_step(*args):
        calls.append(1)
        if len(calls) > (epoch - 1) * updates_per_epoch + 1:
            raise Killed
        return original(*args)

    monkeypatch.setattr(engine, "train_step", train_step)


SETTINGS = {
    "model": "text_mini_bias", "keep": "1,.5", "keep_warmup_epochs": 2, "epochs": 4, "warmup_epochs": 1, "batch_size": 4, "grad_accum_steps": 2,
    "drop": 0.1, "pos_drop": 0.1, "proj_drop": 0.1, "attn_drop": 0.1, "drop_path": 0.1, "clip_grad": 1.0, "smoothing": 0.1,
    "model_ema": True, "model_ema_decay": 0.9, "fraction": 0.75,
}  # fmt: skip


def test_a_run_that_ended_in_its_third_epoch_and_was_resumed_equals_the_whole_run_bit_for_bit(tiny_text, monkeypatch):
    whole = train(tiny_text(**SETTINGS, experiment="whole"))
    with monkeypatch.context() as patch:
        kill_in_epoch(patch, 3, updates_per_epoch=2)
        with pytest.raises(Killed):
            train(tiny_text(**SETTINGS, experiment="killed", resume="auto"))
    assert [row["epoch"] for row in RunFolder(f"{tiny_text().output}/killed").read()["rows"]] == [1, 2]
    resumed = train(tiny_text(**SETTINGS, experiment="killed", resume="auto"))
    first, second = (RunFolder(result["folder"]).read() for result in (whole, resumed))
    assert differences(first, second) == []
    for name in ("last", "best"):
        assert differences(*(load_file(f"{result['folder']}/{name}/model.safetensors") for result in (whole, resumed))) == []


def test_a_resumed_run_keeps_its_own_tokenizer_and_refuses_another(tiny_text, tmp_path):
    folder = Path(train(tiny_text())["folder"])
    before = (folder / "tokenizer.json").read_text()
    more = write_jsonl(tmp_path / "more.jsonl", [{"text": "zebra zebra zebra zoo", "label": "animals"}, *rows(8)])
    train(tiny_text(epochs=2, resume="auto", train_file=str(more)))
    assert (folder / "tokenizer.json").read_text() == before
    with pytest.raises(ValueError, match="cannot resume with vocab_size 60 -> 70"):
        train(tiny_text(epochs=3, resume="auto", vocab_size=70))


def test_training_goes_on_from_a_saved_model_with_its_tokenizer(tiny_text):
    folder = Path(train(tiny_text())["folder"])
    config = TextConfig(**{**vars(tiny_text()), "model": str(folder / "last"), "model_kwargs": {}, "experiment": "on", "vocab_size": TextConfig.vocab_size})
    job = prepare_text(config, CPU)
    assert job.files["tokenizer.json"] == (folder / "last" / "tokenizer.json").read_text()
    assert torch.equal(job.training.model.pos_embed, vp.load(folder / "last").pos_embed)
    with pytest.raises(ValueError, match="has a tokenizer of its own: leave out vocab_size"):
        prepare_text(replace(config, vocab_size=99), CPU)
    with pytest.raises(ValueError, match="last takes 16 tokens at most, max_length is 32"):
        prepare_text(replace(config, max_length=32), CPU)
    with pytest.raises(ValueError, match=r"is a saved model, which is built as it was saved: leave out proj_drop, or name a model of timm"):
        prepare_text(replace(config, proj_drop=0.1), CPU)


def test_weights_of_an_earlier_run_may_be_the_start(tiny_text):
    folder = Path(train(tiny_text())["folder"])
    job = prepare_text(tiny_text(experiment="on", initial_checkpoint=str(folder / "last")), CPU)
    assert torch.equal(job.training.model.patch_embed.weight, vp.load(folder / "last").patch_embed.weight)
    assert job.files["tokenizer.json"] == (folder / "last" / "tokenizer.json").read_text()


def test_other_texts_of_the_same_number_are_told_when_a_run_goes_on(tiny_text, tmp_path, caplog):
    train(tiny_text())
    other = tmp_path / "other.jsonl"
    other.write_text(Path(tiny_text().test_file).read_text().replace("mouse", "horse"))
    with caplog.at_level("WARNING"):
        train(tiny_text(epochs=2, resume="auto", test_file=str(other)))
    assert "the texts are others" in caplog.text


def test_padding_is_in_no_statistic_of_a_block():
    torch.manual_seed(0)
    model = randomise_bias(timm.create_model("text_mini_bias", vocab_size=50, max_length=32, embed_dim=32, depth=2, num_heads=4, rule="mass", tau=0.6))
    ids = torch.randint(1, 50, (1, 8))
    alone, padded = (layer_statistics(model, torch.cat([ids, torch.zeros(1, pad, dtype=torch.long)], 1)) for pad in (0, 24))
    assert alone[0]["tokens"] == 8
    assert alone[0]["kept_mass"] >= 0.6
    for one, other in zip(alone, padded, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_a_share_of_the_training_texts_is_told_by_the_number_of_updates(tiny_text):
    job = prepare_text(tiny_text(fraction=0.5, batch_size=4), CPU)
    assert (len(job.train_set), len(job.train_loader), len(job.eval_set)) == (12, 3, 9)


def test_rows_left_out_are_told(tiny_text, tmp_path, caplog):
    path = write_jsonl(tmp_path / "some.jsonl", [*rows(8), {"text": "a", "label": -1}, {"text": "b", "label": -1}])
    with caplog.at_level(logging.INFO):
        prepare_text(tiny_text(train_file=str(path)), CPU)
    assert "some.jsonl: 24 texts, 2 with the label -1 left out" in caplog.text


def test_pruned_training_keeps_columns_and_writes_them_down(tiny_text):
    result = train(tiny_text(model="text_mini_bias", keep=0.5))
    assert [method.keep_ratio for method in columns_methods(vp.load(Path(result["folder"]) / "last"))] == [0.5, 0.5]
    assert len(result["layers"]) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_file": None, "test_file": None}, "no texts given: --train-file and --test-file, or --dataset-dir"),
        ({"label_column": "lable"}, r"train\.jsonl line 1: unknown column 'lable'; did you mean label\?"),
        ({"model": "text_mimi"}, "unknown model 'text_mimi'; did you mean text_mini"),
        ({"model": "vit_mini28"}, "vit_mini28 cannot be built with .*vocab_size"),
        ({"keep": 0.5}, "text_mini cannot be built with .*keep"),
        ({"tokenizer": "nowhere.json"}, r"no tokenizer nowhere\.json"),
        ({"batch_size": 100}, "24 texts to train on are fewer than one batch of 100"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_can_be_known_before_the_first_batch_is_refused_there(tiny_text, changes, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        prepare_text(tiny_text(**changes), CPU)


def test_a_study_trains_variants_of_a_text_recipe(tiny_text, tmp_path, monkeypatch):
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    save_recipe(replace(tiny_text(), experiment=None), tmp_path / "recipe.yaml")
    study = tmp_path / "study.yaml"
    study.write_text("task: text\nrecipe: recipe.yaml\nseeds: [0]\nvariants:\n  dense: {}\n  pruned: {model: text_mini_bias, keep: 0.5}\n")
    runs = [with_run_folder(one, data_dir=None, output=tmp_path / "out") for one in load_study(study)]
    assert train_one(runs[1], threads=1)["last"]["eval_images"] == 9
    assert load_variant(study, "pruned", "text").keep == "0.5"
    with pytest.raises(ValueError, match=r"is a study of the task text: its variants are trained by tools/train_text\.py"):
        load_variant(study, "pruned")
