"""The order of the images, and the random numbers of each: functions of seed and epoch alone.

So a resumed run sees what the whole run would have seen, on any number of loader processes, and with one global batch on any number of ranks.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from vit_prune.train.distributed import rank, world_size


class Draw(NamedTuple):
    """One showing of an image."""

    index: int
    epoch: int
    repeat: int


class EpochSampler(Sampler[Draw]):
    """A new order in each epoch, the same everywhere; each of the processes takes every world_size-th draw of it.

    The draws of one update over all processes are the same set for any number of them. What does not fill an update is left out, or where the
    set is smaller than one, what does not fill a batch of all processes.

    Args:
        num_images: in the data set. batch_size: per process. batches: of each process in an update.
        repeats: each image comes so often, and an epoch has as many draws as without (repeated augmentation, arXiv 1902.05509).
    """

    def __init__(self, num_images: int, *, batch_size: int, seed: int, batches: int = 1, repeats: int = 1) -> None:
        self.num_images, self.seed, self.repeats, self.epoch = num_images, seed, repeats, 0
        self.rank, self.world_size = rank(), world_size()
        whole = num_images // (batch_size * self.world_size)  # batches of all processes
        self.length = (whole // batches * batches or whole) * batch_size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Draw]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.num_images)
        for place in range(self.rank, self.length * self.world_size, self.world_size):
            which, repeat = divmod(place, self.repeats)
            yield Draw(int(order[which]), self.epoch, repeat)


class Augmented(Dataset):
    """A data set that takes draws for indices, and augments each with random numbers of its own."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, draw: Draw) -> tuple:
        with random_numbers(self.seed, *draw):
            return self.dataset[draw.index]


class AugmentedStream(IterableDataset):
    """The same for a stream, whose images have places instead of indices: the same again with the same number of loader processes."""

    def __init__(self, stream: IterableDataset, seed: int) -> None:
        self.stream, self.seed, self.epoch, self.rank = stream, seed, 0, rank()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.stream.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.stream)

    def __iter__(self) -> Iterator[tuple]:
        worker = getattr(get_worker_info(), "id", 0)
        images, place = iter(self.stream), 0
        while True:
            with random_numbers(self.seed, self.epoch, self.rank, worker, place):
                try:
                    image = next(images)
                except StopIteration:
                    return
            yield image
            place += 1


@contextmanager
def random_numbers(*key: int) -> Iterator[None]:
    """Seed Python's, numpy's and torch's generators (of the CPU) by a key.

    In the main process, which draws for itself, they go on afterwards as if nothing had been.
    """
    saved = generators() if get_worker_info() is None else None
    first, second, third = map(int, np.random.SeedSequence(key).generate_state(3))
    random.seed(first)
    np.random.seed(second)
    torch.default_generator.manual_seed(third)
    try:
        yield
    finally:
        if saved is not None:
            restore(saved)


def generators() -> tuple:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def restore(saved: tuple) -> None:
    python, numpy, torch_cpu = saved
    random.setstate(python)
    np.random.set_state(numpy)
    torch.default_generator.set_state(torch_cpu)
