"""Train in the processes that torchrun started: `torchrun --nproc-per-node 2 -m tests.train.ranks CONFIGS.json`, a list of TrainConfig fields."""

import json
import sys
from pathlib import Path

import torch

from vit_prune.train.config import TrainConfig
from vit_prune.train.distributed import process_group
from vit_prune.train.run import run

if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group("cpu"):
        for values in json.loads(Path(sys.argv[1]).read_text()):
            run(TrainConfig(**values))
