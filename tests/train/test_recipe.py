"""Recipes: strict on the way in, complete on the way out, and those that we ship build."""

from pathlib import Path

import pytest

from vit_prune.train import build
from vit_prune.train.config import TrainConfig
from vit_prune.train.recipe import load_recipe, save_recipe

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


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
        ("- model", "a recipe is a mapping of names to values, got list"),
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


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_recipe_of_ours_builds_its_model_optimizer_schedule_and_loss(path):
    config = load_recipe(path)
    model = build.create_model(config, num_classes=10)
    optimizer = build.create_optimizer(config, model)
    scheduler = build.create_scheduler(config, optimizer, updates_per_epoch=10)
    scheduler.step(config.epochs - 1)
    scheduler.step_update(config.epochs * 10 - 1)
    assert 0 < optimizer.param_groups[0]["lr"] < config.lr
    assert (build.create_mixup(config, 10) is None) == (config.mixup == config.cutmix == 0)
    assert build.create_loss(config) is not None


def test_our_recipes_are_there_and_say_how_they_are_run():
    assert [path.name for path in CONFIGS] == ["deit_s_bias_imagenet.yaml", "digits.yaml", "fashion_mnist.yaml"]
    for path in CONFIGS:
        assert f"python tools/train.py --config configs/{path.name}" in path.read_text().split("\nmodel:")[0]
