"""Train a text encoder: `python tools/train_text.py --config configs/text/debian_sections.yaml`, and flags over it.

On 8 GPUs: `torchrun --nproc-per-node 8 tools/train_text.py ...`; --batch-size is for each.
"""

import argparse
import os
import sys

from vit_prune.text.config import TextConfig
from vit_prune.text.job import prepare_text
from vit_prune.train.cli import main, parse_flags
from vit_prune.train.config import AUTO
from vit_prune.train.recipe import load_recipe
from vit_prune.train.resume import recipe_of
from vit_prune.train.run import run
from vit_prune.train.study import load_variant

DESCRIPTION = (
    "Train a text encoder, with pruning or without. --config FILE reads a YAML recipe with these names; flags override it. "
    "--config STUDY --variant NAME reads a variant of a study. --resume FOLDER goes on with a run by its own recipe."
)


def parse(argv: list[str]) -> TextConfig:
    """Raises: ValueError for a wrong value, OSError for a recipe that is not there; an unknown flag ends the program."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    first.add_argument("--variant")
    files, rest = first.parse_known_args(argv)
    first.add_argument("--resume")
    resumed = first.parse_known_args(argv)[0].resume
    return parse_flags(TextConfig, default=recipe(files.config, files.variant, resumed), args=rest, description=DESCRIPTION)


def recipe(config: str | None, variant: str | None, resumed: str | None) -> TextConfig | None:
    """What the flags override."""
    if variant is not None:
        if config is None:
            raise ValueError("--variant goes with --config STUDY, the file that names it")
        return load_variant(config, variant, "text")
    if config is None and resumed not in (None, AUTO):
        return load_recipe(recipe_of(resumed), TextConfig)
    return None if config is None else load_recipe(config, TextConfig)


def train() -> None:
    result = run(parse(sys.argv[1:]), prepare=prepare_text)
    if os.environ.get("RANK", "0") == "0":  # the first process of torchrun's, or the only one
        best, last = result["best"], result["last"]
        print(f"top-1 {last['eval_top1']:.2f} % after {last['epoch']} epochs, best {best['eval_top1']:.2f} % after {best['epoch']}")
        print(f"results in {result['folder']}")


if __name__ == "__main__":
    main(train)
