"""Peak memory of one call in a process of its own, in which nothing else was ever allocated."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from vit_prune.measure.backends import pinned
from vit_prune.measure.clock import use
from vit_prune.measure.engines import build_call
from vit_prune.measure.memory import Peak, peak_of_call

PROGRAM = "import sys; from vit_prune.measure.fresh import child; child(*sys.argv[1:])"  # not -m: a user's own main program stays out of it


@dataclass(frozen=True)
class Job:
    """What the process runs: a model as `engines.prepare` leaves it, the arguments of its forward, and how."""

    model: nn.Module
    inputs: tuple
    engine: str = "eager"
    mode: str = "inference"
    dtype: str = "float32"
    backend: str = "auto"
    device: str = "cpu"
    threads: int = 1


def peak_in_fresh_process(job: Job) -> Peak:
    """Start a process, let it load the job, call it twice, and tell the peak of the second call.

    Raises: ValueError for a model that cannot be pickled; ChildProcessError with the process's last line where it fails (out of memory, say).
    """
    with TemporaryDirectory() as folder:
        path, result = Path(folder) / "job.pt", Path(folder) / "peak.json"
        try:
            torch.save(job, path)
        except (AttributeError, TypeError, RuntimeError) as error:  # PicklingError is one of the first two by now
            raise ValueError(f"the model cannot be sent to a process of its own: {error}") from error
        done = subprocess.run([sys.executable, "-c", PROGRAM, path, result], env=environment(), capture_output=True, text=True)
        if done.returncode or not result.exists():
            last = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
            raise ChildProcessError(f"peak memory of {type(job.model).__name__} could not be measured in a process of its own: {last}")
        return Peak(**json.loads(result.read_text()))


def environment() -> dict[str, str]:
    """The child finds what its parent finds."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def child(path: str, result: str) -> None:
    """What the process does."""
    job = torch.load(path, map_location="cpu", weights_only=False)  # our own file, of a moment ago
    torch.set_num_threads(job.threads)
    device = torch.device(job.device)
    if device.type == "cuda":
        use(device)
    model = job.model.to(device)
    inputs = tuple(value.to(device) if isinstance(value, torch.Tensor) else value for value in job.inputs)
    with pinned(job.backend):
        call = build_call(model, inputs, engine=job.engine, mode=job.mode, dtype=job.dtype, threads=job.threads)
        peak = peak_of_call(call, device, before=lambda: model.zero_grad(set_to_none=True))
    Path(result).write_text(json.dumps(asdict(peak)))
