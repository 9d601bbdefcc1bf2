"""Train a detector, or judge one, in the processes that torchrun started: `torchrun --nproc-per-node 2 -m tests.detection.ranks CONFIGS.json`.

With a second argument, an iteration, the process is killed before that one.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

from vit_prune.detection.train import run as run_module
from vit_prune.detection.train.config import DetectTrainConfig


def die_before(iteration: int) -> None:
    original = run_module.step

    def step(job, *batch):
        if job.iteration == iteration:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(job, *batch)

    run_module.step = step


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 2:
        die_before(int(sys.argv[2]))
    for values in json.loads(Path(sys.argv[1]).read_text()):
        run_module.run(DetectTrainConfig(**values))
