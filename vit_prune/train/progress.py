"""The bar of an epoch or an evaluation."""

import sys

from torch.utils.data import DataLoader
from tqdm import tqdm

from vit_prune.train.distributed import is_primary, world_size


def progress_bar(text: str, loader: DataLoader) -> tqdm:
    """Images done by all processes, images per second, time left; silent where stderr is no terminal, and in all processes but the first."""
    batch_size = getattr(loader, "loader", loader).batch_size  # timm's prefetcher wraps torch's loader
    total = min(len(loader.dataset), len(loader) * batch_size * world_size())  # the last, smaller batch may be left out
    return tqdm(desc=text, total=total, unit=" images", file=sys.stderr, disable=None if is_primary() else True, leave=False)
