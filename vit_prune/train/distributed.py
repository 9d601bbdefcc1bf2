"""One process among several: what torchrun started, and sums over all of them. In a single process every function does the plain thing."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from timm.utils.distributed import init_distributed_device_so
from torch import Tensor


@contextmanager
def process_group(device: str) -> Iterator[torch.device]:
    """Join the processes that torchrun (or SLURM) started, for the length of a with-block, and say which device is this one's.

    gloo on the CPU, nccl on CUDA. In a single process, and in a group that is there already, nothing is started and nothing ended.
    """
    if dist.is_initialized():
        yield torch.device(device)
        return
    own = torch.device(init_distributed_device_so(device)["device"])
    level = logging.getLogger().level
    if not is_primary():
        logging.getLogger().setLevel(logging.ERROR)
    try:
        yield own
    finally:
        logging.getLogger().setLevel(level)
        if dist.is_initialized():
            dist.destroy_process_group()


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


def wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


def from_primary(value: object) -> object:
    """The first process's value, in each."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]
