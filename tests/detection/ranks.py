"""Train a detector, or judge one, in the processes that torchrun started: `torchrun --nproc-per-node 2 -m tests.detection.ranks CONFIGS.json`.

With a second argument, an iteration, the process is killed before that one.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from vit_prune.detection.train import run as run_module
from vit_prune.detection.train.config import DetectTrainConfig
from vit_prune.train.distributed import world_size


def die_before(iteration: int) -> None:
    original = run_module.step

    def step(job, *batch):
        if job.iteration == iteration:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(job, *batch)

    run_module.step = step


def compare_ranks() -> None:
    """Before each evaluation, all processes hold the same weights, or the run ends."""
    original = run_module.judge

    def judge(job):
        digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in job.model.state_dict().values())).hexdigest()
        digests = [None] * world_size()
        if world_size() > 1:
            dist.all_gather_object(digests, digest)
            assert len(set(digests)) == 1, "the processes hold other weights"
        return original(job)

    run_module.judge = judge


if __name__ == "__main__":
    compare_ranks()
    torch.set_num_threads(1)
    if len(sys.argv) > 2:
        die_before(int(sys.argv[2]))
    for values in json.loads(Path(sys.argv[1]).read_text()):
        run_module.run(DetectTrainConfig(**values))
