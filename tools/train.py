"""Train a model: `python tools/train.py --model deit_s_bias --data-dir DIR --keep linear:1.0:0.3`, or `--config RECIPE.yaml` and flags over it.

On 8 GPUs: `torchrun --nproc-per-node 8 tools/train.py ...`; --batch-size is for each.
"""

import os
import sys

from vit_prune.train.cli import main, parse_training
from vit_prune.train.config import TrainConfig
from vit_prune.train.run import run

DESCRIPTION = "Train a Vision Transformer, with pruning or without."


def train() -> None:
    result = run(parse_training(TrainConfig, sys.argv[1:], task="images", description=DESCRIPTION))
    if os.environ.get("RANK", "0") == "0":  # the first process of torchrun's, or the only one
        print(f"best top-1 {result['best']['eval_top1']:.2f} % in epoch {result['best']['epoch']}; results in {result['folder']}")


if __name__ == "__main__":
    main(train)
