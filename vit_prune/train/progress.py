"""The bar of an epoch or an evaluation."""

import sys
from collections.abc import Iterable

from torch.utils.data import DataLoader
from tqdm import tqdm

from vit_prune.train.distributed import is_primary, world_size


def progress_bar(text: str, loader: DataLoader | Iterable) -> tqdm:
    """Images done by all processes, images per second, time left; silent where stderr is no terminal, and in all processes but the first."""
    return tqdm(desc=text, total=num_images(loader), unit=" images", file=sys.stderr, disable=None if is_primary() else True, leave=False)


def num_images(loader: DataLoader | Iterable) -> int | None:
    """That a loader gives in all processes; None where it is an iterable that does not say."""
    batch_size = getattr(getattr(loader, "loader", loader), "batch_size", None)  # timm's prefetcher wraps torch's loader
    if batch_size is None or not hasattr(loader, "dataset"):
        return None
    return min(len(loader.dataset), len(loader) * batch_size * world_size())  # the last, smaller batch may be left out
