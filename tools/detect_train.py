"""Train a detector: `python tools/detect_train.py --model deit_s_bias --keep linear:1.0:0.3 --data-dir COCO`, or `--config RECIPE.yaml` and flags over it.

On 8 GPUs: `torchrun --nproc-per-node 8 tools/detect_train.py ...`; --batch-size is for each. The same command goes on with a run that was killed.
"""

import argparse
import os
import sys

from vit_prune.detection.train.config import DetectTrainConfig
from vit_prune.detection.train.run import run
from vit_prune.train.cli import main, parse_flags
from vit_prune.train.recipe import load_recipe

DESCRIPTION = "Train Mask R-CNN with a plain ViT, dense or with pruned columns. --config FILE reads a YAML recipe with these names; flags override it."


def parse(argv: list[str]) -> DetectTrainConfig:
    """Raises: ValueError for a wrong value, OSError for a recipe that is not there; an unknown flag ends the program."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    file, rest = first.parse_known_args(argv)
    default = DetectTrainConfig() if file.config is None else load_recipe(file.config, DetectTrainConfig)
    return parse_flags(DetectTrainConfig, default=default, args=rest, description=DESCRIPTION)


def train() -> None:
    config = parse(sys.argv[1:])
    row = run(config)
    if os.environ.get("RANK", "0") == "0":
        found = ", ".join(f"{kind} AP {row[f'{kind}_AP']:.2f}" for kind in ("box", "mask") if row[f"{kind}_AP"] is not None)
        print(f"{found or 'nothing to find in the images of the evaluation'}; results in {config.output}")


if __name__ == "__main__":
    main(train)
