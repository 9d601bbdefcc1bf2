"""Loaders of timm's parts, for a model's own image size and normalisation: uint8 batches, normalised on the device."""

import logging
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from timm.data import create_transform, resolve_model_data_config
from timm.data.loader import PrefetchLoader, fast_collate
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from vit_prune.train.config import TrainConfig
from vit_prune.train.distributed import processes_on_this_machine, rank, world_size
from vit_prune.train.draws import Augmented, AugmentedStream, EpochSampler

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
PREFETCHED = 2  # batches that each worker holds ready: torch's default
MIB = 2**20


def data_config(model: nn.Module) -> dict:
    """timm's data config of a model: input_size [3, height, width] as it was built, mean, std, interpolation, crop_pct, crop_mode."""
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    return resolve_model_data_config(model, args={} if size is None else {"input_size": (3, *size)})


def train_loader(dataset: Dataset, config: TrainConfig, data: dict, device: torch.device) -> PrefetchLoader:
    """Shuffled and augmented batches of this process, as many as in every other; what does not fill a batch in all of them is left out.

    Raises: ValueError where not even one batch is there, and where the workers' batches do not fit into shared memory.
    """
    images = config.batch_size * world_size()
    if len(dataset) < images:
        raise ValueError(f"{len(dataset)} images to train on are fewer than one batch of {images}: lower --batch-size")
    check_shared_memory(2 * config.workers, config.batch_size * math.prod(data["input_size"]))  # those of the evaluation live as long
    dataset.transform = train_transform(config, data)
    if isinstance(dataset, IterableDataset):
        dataset.set_loader_cfg(num_workers=config.workers)  # it gives each worker as many whole batches
        source, sampler = AugmentedStream(dataset, config.seed), None
    else:
        source = Augmented(dataset, config.seed)
        settings = {"batch_size": config.batch_size, "batches": config.grad_accum_steps, "repeats": max(1, config.aug_repeats)}
        sampler = EpochSampler(len(dataset), seed=config.seed, **settings)
    batches = loader(source, sampler, batch_size=config.batch_size, workers=config.workers, data=data, device=device, drop_last=True)
    return prefetch(batches, data, device, re_prob=config.reprob, re_mode="pixel")


def train_transform(config: TrainConfig, data: dict) -> object:
    return create_transform(
        data["input_size"],
        is_training=True,
        no_aug=config.no_aug,
        scale=config.scale,
        ratio=config.ratio,
        hflip=config.hflip or 0.0,
        color_jitter=config.color_jitter or None,
        auto_augment=config.aa,
        interpolation=data["interpolation"],
        mean=data["mean"],
        std=data["std"],
        use_prefetcher=True,
    )


def eval_loader(dataset: Dataset, *, batch_size: int, workers: int, data: dict, device: torch.device) -> PrefetchLoader:
    """Every image once over all processes, in order, as the model's data config says."""
    check_shared_memory(workers, batch_size * math.prod(data["input_size"]))
    dataset.transform = create_transform(
        data["input_size"],
        interpolation=data["interpolation"],
        mean=data["mean"],
        std=data["std"],
        crop_pct=data["crop_pct"],
        crop_mode=data["crop_mode"],
        use_prefetcher=True,
    )
    sampler = None if isinstance(dataset, IterableDataset) else range(rank(), len(dataset), world_size())
    if sampler is None and world_size() > 1:
        log.warning("a stream is shared among processes by timm, which may leave an image out or give it twice: evaluate in one process for exact figures")
    return prefetch(loader(dataset, sampler, batch_size=batch_size, workers=workers, data=data, device=device, drop_last=False), data, device)


def loader(dataset: Dataset, sampler: object, *, batch_size: int, workers: int, data: dict, device: torch.device, drop_last: bool) -> DataLoader:
    return DataLoader(
        dataset,
        batch_size,
        sampler=sampler,
        num_workers=workers,
        collate_fn=fast_collate,
        pin_memory=device.type == "cuda",
        drop_last=drop_last,
        persistent_workers=workers > 0 and sampler is not None,  # a stream's workers learn the epoch when they start
        generator=torch.Generator(),  # its draws are not the main process's
    )


def prefetch(batches: DataLoader, data: dict, device: torch.device, **erasing) -> PrefetchLoader:
    return PrefetchLoader(batches, mean=data["mean"], std=data["std"], device=device, img_dtype=torch.float32, **erasing)


def check_shared_memory(workers: int, batch_bytes: int) -> None:
    """Raises: ValueError where the batches that the workers hold ready (uint8) do not fit into it: they would die of a bus error."""
    workers *= processes_on_this_machine()  # which share it
    needed = workers * PREFETCHED * batch_bytes
    if not workers or not SHARED_MEMORY.is_dir():
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    if needed > free:
        raise ValueError(
            f"{workers} workers on this machine hold {needed / MIB:.0f} MiB of images in shared memory, and {SHARED_MEMORY} has {free / MIB:.0f} MiB free: "
            "lower --workers (0 needs none) or --batch-size, or give the machine more (docker: --shm-size)"
        )


def set_epoch(batches: PrefetchLoader, epoch: int) -> None:
    """Before each epoch of training: it decides order and augmentation."""
    source = batches.dataset if isinstance(batches.dataset, IterableDataset) else batches.sampler
    source.set_epoch(epoch)


@contextmanager
def worker_deaths_explained() -> Iterator[None]:
    """A worker that dies takes its reason with it: say the usual one. Raises: OSError instead of torch's RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise OSError(f"a process that loads images died, mostly for want of (shared) memory: lower --workers or --batch-size ({error})") from error
