"""One process among several: what torchrun started, and sums over all of them. In a single process every function does the plain thing."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from timm.utils.distributed import init_distributed_device_so, world_info_from_env
from torch import Tensor


@contextmanager
def process_group(device: str) -> Iterator[torch.device]:
    """Join the processes that torchrun (or SLURM) started, for the length of a with-block, and say which device is this one's.

    gloo on the CPU, nccl on CUDA. In a single process, and in a group that is there already, nothing is started and nothing ended.
    """
    if dist.is_initialized():
        yield torch.device(device)
        return
    check_device_count(device)
    own = torch.device(init_distributed_device_so(device)["device"])
    level = logging.getLogger().level
    if not is_primary():
        logging.getLogger().setLevel(logging.ERROR)
    try:
        yield own
    finally:
        logging.getLogger().setLevel(level)
    if dist.is_initialized():  # not after an error: the others are in the middle of a sum, and to end together with them could wait for ever
        dist.destroy_process_group()


def check_device_count(device: str) -> None:
    """Raises: ValueError for a process that has no GPU of its own."""
    local_rank, _, _ = world_info_from_env()
    if device.startswith("cuda") and local_rank >= torch.cuda.device_count():
        raise ValueError(f"this node has {torch.cuda.device_count()} GPUs and at least {local_rank + 1} processes: lower --nproc-per-node")


def processes_on_this_machine() -> int:
    """As torchrun or SLURM says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or 1)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_primary() -> bool:
    """True in the one process that writes files and draws bars."""
    return rank() == 0


def sum_over_ranks(value: Tensor) -> Tensor:
    """The sum of a tensor over all processes, the same in each."""
    if dist.is_initialized():
        value = value.clone()
        dist.all_reduce(value)
    return value


def largest_over_ranks(value: Tensor) -> Tensor:
    """Element by element, the same in each process."""
    if dist.is_initialized():
        value = value.clone()
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value


def same_over_ranks(value: int) -> bool:
    """Whether all processes hold the same number."""
    if not dist.is_initialized():
        return True
    values = [None] * world_size()
    dist.all_gather_object(values, value)
    return len(set(values)) == 1


def from_primary(value: object) -> object:
    """The first process's value, in each."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def on_primary(function: Callable[[], None]) -> None:
    """Call it in the first process; all wait for its end. Raises: in every process, the OSError or ValueError that it raised there."""
    error = None
    if is_primary():
        try:
            function()
        except (OSError, ValueError) as raised:
            error = raised
    if (error := from_primary(error)) is not None:
        raise error
