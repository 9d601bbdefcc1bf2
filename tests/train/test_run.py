"""A whole run: reproducible, pruned where asked, and never at the cost of the last good checkpoint."""

import csv
import logging
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

import vit_prune as vp
from vit_prune import checkpoint
from vit_prune.methods.stack import columns_methods, prune_stacks
from vit_prune.train import build
from vit_prune.train import run as run_module
from vit_prune.train.build import add_merging
from vit_prune.train.engine import TrainingDiverged
from vit_prune.train.job import prepare
from vit_prune.train.recipe import load_recipe
from vit_prune.train.run import run
from vit_prune.train.state import History, RunFolder, write_atomically


def weights(folder):
    return load_file(f"{folder}/last/model.safetensors")


def summary(folder):
    with open(f"{folder}/summary.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_two_runs_with_one_seed_are_equal_bit_for_bit_and_another_seed_is_not(tiny_config):
    settings = {"keep": "1,.5", "drop_path": 0.1, "mixup": 0.2}
    first, again, other = (run(tiny_config(experiment=name, seed=seed, **settings)) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    one, two, three = (weights(result["folder"]) for result in (first, again, other))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["head.weight"], three["head.weight"])
    assert first["last"]["train_loss"] == again["last"]["train_loss"]


def test_the_folder_holds_the_resolved_recipe_a_row_per_epoch_and_both_checkpoints(tiny_config, tmp_path):
    result = run(tiny_config(epochs=2))
    assert result["folder"] == str(tmp_path / "output" / "run")
    rows = summary(result["folder"])
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert {"train_loss", "eval_loss", "eval_top1", "eval_top5", "lr", "seconds"} < rows[0].keys()
    recipe = load_recipe(f"{result['folder']}/recipe.yaml")
    assert (recipe.num_classes, recipe.hflip, recipe.device) == (2, 0.5, "cpu")
    for name in ("best", "last"):
        assert checkpoint.load(f"{result['folder']}/{name}").num_classes == 2
    assert result["last"]["eval_top1"] == float(rows[-1]["eval_top1"])


def test_pruning_in_training_and_in_evaluation_are_two_switches(tiny_config, monkeypatch):
    seen = []
    for name in ("train_one_epoch", "evaluate"):
        original = getattr(run_module, name)

        def spy(first, *args, original=original, name=name, **kwargs):
            model = getattr(first, "model", first)
            seen.append((name, [method.keep_ratio for method in columns_methods(model)]))
            return original(first, *args, **kwargs)

        monkeypatch.setattr(run_module, name, spy)
    for experiment, keep, eval_keep in (("a", ".5", "1"), ("b", None, "1,.25"), ("c", "1,.5", None)):
        run(tiny_config(experiment=experiment, keep=keep, eval_keep=eval_keep, epochs=2))
    expected = [([0.5, 0.5], [1, 1]), ([1, 1], [1, 0.25]), ([1, 0.5], [1, 0.5])]
    assert seen == [(name, ratios[index]) for ratios in expected for _ in range(2) for index, name in enumerate(("train_one_epoch", "evaluate"))]


def test_the_checkpoint_evaluates_as_the_run_did(tiny_config):
    result = run(tiny_config(keep=".5", eval_keep="1,.25"))
    assert [method.keep_ratio for method in columns_methods(checkpoint.load(f"{result['folder']}/last"))] == [1, 0.25]


def test_training_from_scratch_with_pruning_does_not_warn_of_the_zero_bias(tiny_config, recwarn):
    run(tiny_config(keep=".5", eval_keep="1,.25"))
    assert not [warning for warning in recwarn if "bias is all zero" in str(warning.message)]


def test_a_run_that_diverges_says_so_and_leaves_the_checkpoints_of_the_epoch_before(tiny_config):
    config = tiny_config(epochs=3, warmup_epochs=1, warmup_lr=1e-4, lr=1e30, opt="sgd")  # epoch 1 is fine, epoch 2 is not
    with pytest.raises(TrainingDiverged, match=r"training diverged: the loss is .* epoch 2"):
        run(config)
    folder = f"{config.output}/{config.experiment}"
    assert [row["epoch"] for row in summary(folder)] == ["1"]
    assert all(value.isfinite().all() for value in weights(folder).values())
    assert RunFolder(folder).read()["rows"][-1]["epoch"] == 1


def test_weights_broken_by_the_very_last_step_are_not_saved(tiny_config, monkeypatch):
    def break_after_the_last_step(training, loader, epoch):
        with torch.no_grad():
            training.model.head.weight.fill_(float("nan"))
        return {"loss": 1.0, "lr": 1.0, "skipped": 0, "images_per_second": 1.0}

    monkeypatch.setattr(run_module, "train_one_epoch", break_after_the_last_step)
    with pytest.raises(TrainingDiverged, match="in the evaluation after epoch 1"):
        run(tiny_config())
    assert not list((Path(tiny_config().output) / "run").glob("*/model.safetensors"))


def test_the_results_of_an_earlier_run_are_not_overwritten(tiny_config):
    run(tiny_config())
    with pytest.raises(FileExistsError, match="run holds the results of an earlier run: give another --experiment"):
        run(tiny_config(seed=7))


def test_runs_without_a_name_get_folders_of_their_own(tiny_config):
    first, second = (prepare(tiny_config(experiment=None), torch.device("cpu")).config.experiment for _ in range(2))
    assert first != second
    assert first.endswith("-vit_mini28_bias-8")


def test_best_is_the_first_of_the_highest_top1_not_the_last_epoch(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr("vit_prune.train.state.checkpoint.save", lambda model, path: saved.append((model, path.name)))
    folder, history = RunFolder(tmp_path / "run", keep_every=2), History()
    folder.open()
    for epoch, top1 in enumerate([50.0, 70.0, 60.0, 70.0], start=1):
        history.rows.append({"epoch": epoch, "eval_top1": top1})
        folder.publish(epoch, history)
    assert [epoch for epoch, name in saved if name == "best"] == [1, 2]
    assert [epoch for epoch, name in saved if name == "last"] == [1, 2, 3, 4]
    assert [name for _, name in saved if name.startswith("epoch")] == ["epoch-0002", "epoch-0004"]
    assert history.best["epoch"] == 2


def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path, monkeypatch):
    write_atomically(tmp_path / "x", "old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_head_with_fewer_outputs_than_classes_is_refused_before_the_first_batch(tiny_config):
    with pytest.raises(ValueError, match="num_classes is 1, the data has 2 classes"):
        run(tiny_config(num_classes=1))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model": "vit_mini28_bais"}, "unknown model 'vit_mini28_bais'; did you mean vit_mini28_bias"),
        ({"model": "vit_mini28", "keep": 0.5}, "vit_mini28 cannot be built with .*keep"),
        ({"model": "vit_mini28", "eval_keep": 0.5}, "vit_mini28 cannot be built with .*keep"),
        ({"keep": "1,1,.5"}, "keep lists 3 ratios, the model has 2 blocks"),
        ({"eval_keep": "1,1,.5"}, "keep lists 3 ratios, the model has 2 blocks"),
        ({"model_kwargs": {"dpeth": 3}}, "cannot be built with .*dpeth"),
        ({"initial_checkpoint": "nothing.pth"}, r"nothing\.pth does not exist"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_model_that_cannot_be_is_refused_before_the_run_has_a_folder(tiny_config, tmp_path, overrides, message):
    with pytest.raises((ValueError, OSError), match=message):
        run(tiny_config(**overrides))
    assert not (tmp_path / "output").exists()


def test_a_dense_model_of_timm_trains_too(tiny_config):
    assert run(tiny_config(model="vit_mini28"))["best"]["epoch"] == 1


def test_training_starts_from_the_checkpoint_that_was_given(tiny_config, caplog):
    source = run(tiny_config(experiment="source"))
    with caplog.at_level(logging.INFO):
        model = build.create_model(tiny_config(initial_checkpoint=f"{source['folder']}/last"), 2)
    assert torch.equal(model.head.weight, weights(source["folder"])["head.weight"])
    assert "weights loaded" in caplog.text


def test_a_layer_file_says_what_each_block_keeps_and_what_its_bias_does(tiny_config):
    folder = run(tiny_config(keep="1,.25", epochs=2))["folder"]
    with open(f"{folder}/layers.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["epoch"], row["block"]) for row in rows] == [("1", "0"), ("1", "1"), ("2", "0"), ("2", "1")]
    assert [(float(row["columns"]), row["tokens"]) for row in rows[:2]] == [(5, "5"), (2, "5")]  # 4 patches and the class token
    assert float(rows[0]["kept_mass"]) == 1
    assert 0 < float(rows[1]["kept_mass"]) < 1
    assert float(rows[1]["weight_norm"]) > 0


@pytest.mark.parametrize("model", ["vit_mini28", "vit_mini28_bias"])
def test_tokens_merge_in_training_and_in_what_is_saved(tiny_config, model):
    keep = {"keep": "1,.5"} if model == "vit_mini28_bias" else {}
    folder = Path(run(tiny_config(model=model, tome_r="1,0", **keep))["folder"])
    loaded = checkpoint.load(folder / "last").eval()
    images = torch.randn(2, 3, *loaded.patch_embed.img_size)
    assert loaded.merged_features(images)[1].sizes.shape == (2, 4)  # of 4 patches and the class token
    learnt = [stack.token_bias.weight.any() for stack in prune_stacks(loaded) if hasattr(stack, "token_bias")]
    assert len(learnt) == (2 if keep else 0)
    assert all(learnt)


def test_a_dense_model_has_no_layer_file(tiny_config):
    assert not (Path(run(tiny_config(model="vit_mini28"))["folder"]) / "layers.csv").exists()


def test_the_average_is_what_is_judged_and_saved_and_the_weights_themselves_are_told_beside_it(tiny_config):
    result = run(tiny_config(model_ema=True, model_ema_decay=1.0, lr=0.1, epochs=2, warmup_epochs=1))
    state = RunFolder(result["folder"]).read()
    saved = weights(result["folder"])
    assert all(torch.equal(saved[name], state["ema"][name]) for name in saved)
    assert not torch.equal(state["ema"]["head.weight"], state["model"]["head.weight"])
    assert "raw_top1" in result["last"]


def test_tensorboard_gets_the_rows_of_the_summary(tiny_config):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run(tiny_config(tensorboard=True, epochs=2))
    events = EventAccumulator(f"{result['folder']}/tensorboard").Reload()
    assert [event.step for event in events.Scalars("eval/eval_top1")] == [1, 2]
    assert events.Scalars("eval/eval_top1")[-1].value == pytest.approx(result["last"]["eval_top1"])
    assert events.Scalars("columns/block 01")


def test_only_the_bias_trains_when_asked_and_everything_else_stays_bit_for_bit(tiny_config):
    source = run(tiny_config(experiment="source"))["folder"]
    result = run(tiny_config(initial_checkpoint=f"{source}/last", train_only=("bias",), lr=0.1, weight_decay=0, epochs=2, keep=".5"))
    before, after = weights(source), weights(result["folder"])
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {f"blocks.{block}.attn.prune.token_bias.weight" for block in (0, 1)}


def test_bias_and_head_train_together_for_other_classes(tiny_config):
    model = build.create_model(tiny_config(train_only=("bias", "head")), 2)
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == {
        "head.weight", "head.bias", "blocks.0.attn.prune.token_bias.weight", "blocks.1.attn.prune.token_bias.weight",
    }  # fmt: skip


def test_a_part_that_the_model_has_not_is_refused(tiny_config):
    with pytest.raises(ValueError, match="train_only bias: vit_mini28 has no bias"):
        run(tiny_config(model="vit_mini28", train_only=("bias",)))


def test_the_peak_rate_follows_the_images_of_an_update_unless_it_is_given(tiny_config):
    assert build.peak_lr(tiny_config(batch_size=256, grad_accum_steps=2, lr_base=1e-3)) == pytest.approx(5e-4)
    assert build.peak_lr(tiny_config(lr=0.3)) == 0.3


def test_a_compiled_run_gives_the_checkpoint_of_the_plain_one(tiny_config):
    plain, compiled = (run(tiny_config(experiment=str(backend), torchcompile=backend, keep="1,.5"))["folder"] for backend in (None, "aot_eager"))
    one, two = weights(plain), weights(compiled)
    assert one.keys() == two.keys()
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)


def test_checkpointed_blocks_give_the_weights_of_the_plain_run(tiny_config):
    plain, checkpointed = (run(tiny_config(experiment=str(flag), grad_checkpointing=flag))["folder"] for flag in (False, True))
    one, two = weights(plain), weights(checkpointed)
    assert all(torch.allclose(one[name], two[name], atol=1e-6) for name in one)


def test_a_batch_that_mixup_cannot_pair_is_left_out_or_refused_before_the_first_step(tiny_config, image_folder):
    """7 images: one batch of 4 with three left over; an odd batch size; fewer images than a batch."""
    data = str(image_folder({"train/a": 4, "train/b": 3, "val/a": 1, "val/b": 1}))
    assert run(tiny_config(data_dir=data, mixup=0.8, batch_size=4))["last"]["train_loss"] > 0
    with pytest.raises(ValueError, match="batch_size must be even, got 3"):
        tiny_config(data_dir=data, mixup=0.8, batch_size=3)
    with pytest.raises(ValueError, match="7 images to train on are fewer than one batch of 8"):
        run(tiny_config(data_dir=data, mixup=0.8, batch_size=8, experiment="other"))


def test_an_evaluation_without_a_readable_image_is_no_divergence(tiny_config, image_folder):
    root = image_folder({"train/a": 4, "train/b": 4, "val/a": 1, "val/b": 1})
    for path in (root / "val").rglob("*.png"):
        path.write_text("no image")
    with pytest.raises(ValueError, match="none of the images of the evaluation could be read"):
        run(tiny_config(data_dir=str(root), skip_broken=True))


def test_an_optimizer_that_cannot_run_here_is_refused_with_a_sentence(tiny_config):
    with pytest.raises(ValueError, match="opt fusedsgd cannot be had here"):
        run(tiny_config(opt="fusedsgd"))


def test_the_average_begins_with_the_first_update_that_was_made(tiny_config):
    """At decay 1 it stays what it began with: not the untrained weights, also where the scaler skipped the first updates."""
    folder = run(tiny_config(model_ema=True, model_ema_decay=1.0, lr=0.1, epochs=1, batch_size=8))["folder"]
    state = RunFolder(folder).read()
    assert state["updates_made"] == 1
    assert all(torch.equal(state["ema"][name], state["model"][name]) for name in state["model"])


def test_broken_images_are_counted_in_the_summary_when_they_are_skipped(tiny_config, image_folder):
    root = image_folder({"train/a": 4, "train/b": 4, "val/a": 2, "val/b": 2})
    for name in ("train/a/0.png", "val/b/0.png"):
        (root / name).write_text("no image")
    row = run(tiny_config(data_dir=str(root), skip_broken=True))["last"]
    assert (row["broken_images"], row["eval_images"]) == (2, 3)


def test_merging_is_added_to_a_model_that_has_learnt_its_bias_and_leaves_it_that():
    model = timm.create_model("vit_mini28_bias", depth=2, embed_dim=32, num_heads=4)
    for stack in prune_stacks(model):
        torch.nn.init.normal_(stack.token_bias.weight)
        stack.impl = "math"
    before = [stack.token_bias.weight.clone() for stack in prune_stacks(model)]
    add_merging(model, vp.ToMe(r=1))
    assert all(torch.equal(stack.token_bias.weight, weight) for stack, weight in zip(prune_stacks(model), before, strict=True))
    assert {stack.impl for stack in prune_stacks(model)} == {"math"}
