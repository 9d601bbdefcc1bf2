"""Train a model: `python tools/train.py --model deit_s_bias --data-dir DIR --keep linear:1.0:0.3`, or `--config RECIPE.yaml` and flags over it."""

import argparse
import sys

from vit_prune.train.cli import main, parse_flags
from vit_prune.train.config import TrainConfig
from vit_prune.train.recipe import load_recipe
from vit_prune.train.run import run

DESCRIPTION = "Train a Vision Transformer, with pruning or without. --config FILE reads a YAML recipe with these names; flags override it."


def parse(argv: list[str]) -> TrainConfig:
    """Raises: ValueError for a wrong value, OSError for a recipe that is not there; an unknown flag ends the program."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    known, rest = first.parse_known_args(argv)
    recipe = TrainConfig() if known.config is None else load_recipe(known.config)
    return parse_flags(TrainConfig, default=recipe, args=rest, description=DESCRIPTION)


def train() -> None:
    result = run(parse(sys.argv[1:]))
    print(f"best top-1 {result['best']['eval_top1']:.2f} % in epoch {result['best']['epoch']}; results in {result['folder']}")


if __name__ == "__main__":
    main(train)
