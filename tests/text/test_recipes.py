"""Every recipe in configs/text builds with its own depth and heads and takes two steps, on made-up texts in narrow models."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch

from tests.text.helpers import rows, write_jsonl
from vit_prune.text.config import TextConfig
from vit_prune.text.job import prepare_text
from vit_prune.train.recipe import load_recipe
from vit_prune.train.run import run
from vit_prune.train.study import load_study

pytest.importorskip("tokenizers")
ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs" / "text").glob("*.yaml"))
PAPER = ("ag_news", "dbpedia", "imdb", "snli", "yelp_full")


def every_config() -> Iterator[tuple[str, TextConfig]]:
    """Each recipe, and each variant of each study."""
    for path in RECIPES:
        yield path.stem, load_recipe(path, TextConfig)
    for path in sorted((ROOT / "configs" / "studies").glob("*.yaml")):
        for one in load_study(path):
            if one.seed == 0 and one.task == "text":
                yield f"{path.stem}-{one.variant}", one.config


@pytest.fixture(params=[pytest.param(config, id=name) for name, config in every_config()])
def recipe(request) -> TextConfig:
    return request.param


def made_up(path: Path, config: TextConfig, per_class: int) -> str:
    """Texts in the columns that the recipe reads."""
    return str(write_jsonl(path, [dict.fromkeys(config.text_columns, row["text"]) | {config.label_column: row["label"]} for row in rows(per_class)]))


def test_a_recipe_takes_two_steps(recipe, tmp_path):
    counts = {"train": round(4 / recipe.fraction), "test": 4}
    files = {f"{split}_file": made_up(tmp_path / f"{split}.jsonl", recipe, count) for split, count in counts.items()}
    with torch.device("meta"):
        whole = timm.create_model(recipe.model, **recipe.model_kwargs)
    heads = whole.blocks[0].attn.num_heads
    short = {"epochs": 1, "warmup_epochs": 0, "batch_size": 6, "device": "cpu", "output": str(tmp_path), "experiment": "run"}
    config = replace(recipe, **files, **short, dataset_dir=None, model_kwargs=recipe.model_kwargs | {"embed_dim": 2 * heads})
    result = run(config, prepare=prepare_text)
    model = prepare_text(replace(config, experiment="again"), torch.device("cpu")).training.model
    assert result["last"]["skipped"] == 0
    assert (len(model.blocks), model.blocks[0].attn.num_heads) == (len(whole.blocks), heads)


def test_the_papers_recipes_are_the_papers():
    for name in PAPER:
        config = load_recipe(ROOT / "configs" / "text" / f"{name}.yaml", TextConfig)
        assert (config.model, config.opt, config.lr, config.batch_size, config.epochs, config.keep) == ("text_4l8h", "adamw", 2e-5, 16, 10, None), name
    assert load_recipe(ROOT / "configs/text/snli.yaml", TextConfig).text_columns == ("premise", "hypothesis")


def test_the_header_of_each_recipe_gives_its_command():
    for path in RECIPES:
        assert f"python tools/train_text.py --config configs/text/{path.name}" in path.read_text(), path.name
