"""Train in processes that are killed at a chosen moment and started again: `python -m tests.train.killed DATA_DIR OUTPUT`.

Each training runs in a fork of this process, which has everything imported and has computed no gradient. A trace of each holds the learning
rate, the keep ratios and a digest of the batch, after mixup, of every step.
"""

import hashlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from vit_prune import checkpoint
from vit_prune.methods.stack import columns_methods
from vit_prune.train import engine, run, state
from vit_prune.train.config import TrainConfig

SETTINGS = {
    "model": "vit_mini28_budget", "model_kwargs": {"depth": 2, "embed_dim": 16, "num_heads": 2}, "img_size": 8, "batch_size": 4, "workers": 0,
    "device": "cpu", "epochs": 4, "warmup_epochs": 1, "lr": 0.01, "sched_on_updates": True, "keep": "1,.5", "keep_warmup_epochs": 2,
    "mixup": 0.4, "cutmix": 1.0, "reprob": 0.5, "aa": "rand-m9", "drop": 0.1, "drop_path": 0.1, "layer_decay": 0.8, "clip_grad": 1.0, "grad_accum_steps": 2,
    "amp": True, "amp_dtype": "float16", "model_ema": True, "model_ema_decay": 0.9, "aug_repeats": 2, "checkpoint_interval": 2, "resume": "auto",
}  # fmt: skip
UPDATES_PER_EPOCH = 3  # 24 images, 4 in a batch, 2 batches in an update


def at_update(number: int) -> Callable[[], None]:
    """Die before the update of this number, counted from 1."""
    calls = []
    return lambda: before(engine, "train_step", lambda *_: calls.append(1) or len(calls) == number)


def in_epoch(epoch: int, module: object, name: str) -> Callable[[], None]:
    """Die before the call of a function that comes once per epoch."""
    calls = []
    return lambda: before(module, name, lambda *_: calls.append(1) or len(calls) == epoch)


def before(module: object, name: str, due: Callable[..., bool]) -> None:
    original = getattr(module, name)

    def call(*args, **kwargs):
        if due(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(module, name, call)


def half_written() -> None:
    """Die when half of the second resume.pt is on the disk."""
    original, calls = torch.save, []

    def save(content: dict, path: Path) -> None:
        original(content, path)
        calls.append(path)
        if len(calls) == 2:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save


def renaming(target: str) -> Callable[[], None]:
    """Die before this file of the second epoch takes its place."""
    calls = []
    return lambda: before(os, "replace", lambda _, path: str(path).endswith(target) and (calls.append(1) or len(calls) == 2))


MOMENTS = {
    "in the first epoch": at_update(2),
    "in the third epoch": at_update(2 * UPDATES_PER_EPOCH + 2),
    "in an evaluation": in_epoch(2, run, "judge"),
    "in the middle of resume.pt": half_written,
    "before resume.pt takes its place": renaming("resume.pt"),
    "between resume.pt and the checkpoints": in_epoch(3, checkpoint, "save"),
    "between the weights and the config of last": renaming("last/config.json"),
    "before the summary": in_epoch(2, state, "as_csv"),
    "with two workers": at_update(2 * UPDATES_PER_EPOCH + 2),
}


def trace_steps(path: Path) -> None:
    original = engine.forward_loss

    def forward_loss(training, images, targets):
        if training.mixup is not None:
            images, targets = training.mixup(images, targets)
        digest = hashlib.sha256(images.numpy().tobytes() + targets.numpy().tobytes()).hexdigest()[:16]
        line = {
            "lr": [group["lr"] for group in training.optimizer.param_groups],
            "keep": [method.keep_ratio for method in columns_methods(training.model)],
            "scale": training.update.scaler.get_scale(),
            "batch": digest,
        }
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")
        mixup, training.mixup = training.mixup, None
        try:
            return original(training, images, targets)
        finally:
            training.mixup = mixup

    engine.forward_loss = forward_loss


def train(config: TrainConfig, moment: Callable[[], None] | None = None) -> int:
    """The signal or status that the training ended with."""
    pid = os.fork()
    if pid:
        status = os.waitpid(pid, 0)[1]
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    try:
        torch.set_num_threads(1)
        trace_steps(Path(config.output) / f"{config.experiment}.trace")
        if moment is not None:
            moment()
        run.run(config)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main(data_dir: str, output: str) -> None:
    def config(name: str, **overrides) -> TrainConfig:
        return TrainConfig(**{**SETTINGS, "data_dir": data_dir, "output": output, "experiment": name, **overrides})

    Path(output).mkdir(parents=True)
    ends = {"whole": [train(config("whole"))], "two workers": [train(config("two workers", workers=2))]}
    for name, moment in MOMENTS.items():
        one = config(name, workers=2 if "workers" in name else 0)
        ends[name] = [train(one, moment), train(one)]
    (Path(output) / "ends.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main(*sys.argv[1:])
