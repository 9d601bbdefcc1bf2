"""Recipes: strict on the way in, complete on the way out, and those that we ship build."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.train.helpers import LAUNCHER
from vit_prune.train import build
from vit_prune.train.config import TrainConfig
from vit_prune.train.recipe import load_recipe, save_recipe
from vit_prune.train.run import run
from vit_prune.train.state import RunFolder
from vit_prune.train.study import load_study

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
RECIPES = sorted(path for path in CONFIGS.glob("*.yaml") if not path.name.startswith("latency_"))  # those are of tools/latency.py
STUDIES = sorted((CONFIGS / "studies").glob("*.yaml"))


def every_config() -> Iterator[tuple[str, TrainConfig]]:
    """Each recipe, and each variant of each study."""
    for path in RECIPES:
        yield path.stem, load_recipe(path)
    for path in STUDIES:
        for one in load_study(path):
            if one.seed == 0 and one.task == "images":  # those of texts: tests/text/test_recipes.py
                yield f"{path.stem}-{one.variant}", one.config


@pytest.fixture
def recipe(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: x", r"recipe\.yaml: unknown key 'modle'; did you mean model"),
        ("lr: 1e-3\nlr: 2e-3", r"recipe\.yaml: lr is given twice"),
        ("data-dir: a\ndata_dir: b", "data_dir is given twice"),
        ("epochs: many", "epochs must be a whole number, got 'many'"),
        ("keep: 1.5", r"recipe\.yaml: keep must be in \(0, 1\], got 1.5"),
        ("- model", r"recipe\.yaml: expected a mapping of names to values, got list"),
        ("model: [", r"recipe\.yaml: while parsing"),
        ("model: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ],
    ids=["unknown key", "twice", "twice in two spellings", "type", "value", "list", "syntax", "python object"],
)
def test_a_wrong_recipe_is_refused_with_its_name(recipe, text, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(recipe(text))


def test_a_missing_recipe_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match=r"nothing\.yaml"):
        load_recipe(tmp_path / "nothing.yaml")


def test_numbers_lists_and_both_spellings_are_read(recipe):
    config = load_recipe(recipe("data-dir: x\nlr: 5e-4\nkeep: [1, .5]\nscale: [0.5, 1]\nmodel_kwargs: {depth: 2}\n"))
    assert (config.data_dir, config.lr, config.keep, config.scale, config.model_kwargs) == ("x", 5e-4, "1,0.5", (0.5, 1.0), {"depth": 2})


def test_an_empty_recipe_is_all_defaults(recipe):
    assert load_recipe(recipe("# nothing\n")) == TrainConfig()


def test_a_written_recipe_gives_the_same_config_back(tmp_path):
    config = TrainConfig(keep="step:1:.5:3", scale=(0.1, 1), lr=1e-5, hflip=0, aa="rand-m9", model_kwargs={"depth": 2, "qk_norm": True}, tau=None)
    save_recipe(config, tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml") == config


def test_a_recipe_takes_over_the_fields_of_its_base_but_not_over_its_own(recipe, tmp_path):
    (tmp_path / "base.yaml").write_text("lr: 0.5\nepochs: 7\n")
    config = load_recipe(recipe("base: base.yaml\nepochs: 8\n"))
    assert (config.lr, config.epochs) == (0.5, 8)


@pytest.mark.parametrize(
    ("base", "message"),
    [("lr: fast", "lr must be a number"), ("ler: 1", r"base\.yaml: unknown key 'ler'"), ("base: recipe.yaml", "leads back to this file")],
    ids=["value", "key", "circle"],
)
def test_what_is_wrong_in_a_base_is_named(recipe, tmp_path, base, message):
    (tmp_path / "base.yaml").write_text(base)
    with pytest.raises(ValueError, match=message):
        load_recipe(recipe("base: base.yaml\n"))


def test_our_recipes_are_there_and_say_how_they_are_run():
    names = {path.stem for path in RECIPES}
    assert {"deit_ti_bias_imagenet", "deit_s_bias_imagenet", "deit_b_bias_imagenet", "vit_ti_imagenet100", "vit_s_imagenet100"} < names
    assert {"deit_ti_budget_imagenet", "deit_s_budget_imagenet", "deit_b_budget_imagenet"} < names
    assert {"mae_vit_l_bias", "deit_s_bias_only_imagenet", "digits", "fashion_mnist"} < names
    for path in RECIPES:
        header = path.read_text().split("\nmodel:")[0]
        assert f"tools/train.py --config configs/{path.name}" in header
        assert "Hardware" in header


@pytest.mark.parametrize("config", [pytest.param(config, id=name) for name, config in every_config()])
def test_a_recipe_or_variant_of_ours_takes_two_steps_on_synthetic_images(config, tmp_path):
    """With its own widths, losses and schedules, at a depth and size for tests."""
    depth = config.model_kwargs.get("depth", max(2, config.query_key_free or 0))
    small = {
        "dataset": "synthetic/8",
        "data_dir": None,
        "img_size": 28 if "mini28" in config.model else 32,
        "model_kwargs": {**config.model_kwargs, "depth": depth},
    }
    quick = {"epochs": 1, "warmup_epochs": 0, "keep_warmup_epochs": 0, "batch_size": 4, "grad_accum_steps": 1, "workers": 0, "pretrained": False}
    result = run(replace(config, **small, **quick, output=str(tmp_path), experiment="run", tensorboard=False))
    assert result["last"]["train_loss"] > 0
    assert result["last"]["skipped"] == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_of_ours_takes_three_steps_at_full_size_in_two_processes(path, tmp_path):
    """`torchrun --nproc-per-node 2 tools/train.py --config RECIPE` on synthetic images: 12 images, 2 in a batch of each process."""
    quick = {"dataset": "synthetic/12", "batch-size": 2, "grad-accum-steps": 1, "epochs": 1, "warmup-epochs": 0, "keep-warmup-epochs": 0, "workers": 0}
    flags = [word for name, value in quick.items() for word in (f"--{name}", str(value))]
    where = ["--device", "cpu", "--output", str(tmp_path), "--experiment", "run", "--no-pretrained", "--no-tensorboard"]
    command = [*LAUNCHER, str(ROOT / "tools/train.py"), "--config", str(path), *flags, *where]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "best top-1" in done.stdout
    state = RunFolder(tmp_path / "run").read()
    assert state["world_size"] == 2
    steps = {int(entry["step"]) for entry in state["optimizer"]["state"].values()}
    assert steps == {3}
    assert state["rows"][0]["skipped"] == 0


@pytest.mark.parametrize("config", [pytest.param(config, id=name) for name, config in every_config()])
def test_the_schedule_of_a_recipe_ends_far_below_its_peak(config):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=build.peak_lr(config))
    scheduler = build.create_scheduler(config, optimizer, updates_per_epoch=10)
    scheduler.step(config.epochs - 1)
    scheduler.step_update(config.epochs * 10 - 1)
    assert 0 < optimizer.param_groups[0]["lr"] < 0.3 * build.peak_lr(config)
