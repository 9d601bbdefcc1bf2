"""Train a text encoder: `python tools/train_text.py --config configs/text/debian_sections.yaml`, and flags over it.

On 8 GPUs: `torchrun --nproc-per-node 8 tools/train_text.py ...`; --batch-size is for each.
"""

import os
import sys

from vit_prune.text.config import TextConfig
from vit_prune.text.job import prepare_text
from vit_prune.train.cli import main, parse_training
from vit_prune.train.run import run

DESCRIPTION = "Train a text encoder, with pruning or without."


def train() -> None:
    result = run(parse_training(TextConfig, sys.argv[1:], task="text", description=DESCRIPTION), prepare=prepare_text)
    if os.environ.get("RANK", "0") == "0":  # the first process of torchrun's, or the only one
        best, last = result["best"], result["last"]
        print(f"top-1 {last['eval_top1']:.2f} % after {last['epoch']} epochs, best {best['eval_top1']:.2f} % after {best['epoch']}")
        print(f"results in {result['folder']}")


if __name__ == "__main__":
    main(train)
