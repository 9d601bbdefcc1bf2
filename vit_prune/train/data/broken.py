"""Images that cannot be read: an error by default; with skip_broken named once, counted and replaced."""

import logging
from collections.abc import Callable
from multiprocessing import RawArray

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, get_worker_info

from vit_prune.train.data.images import UnreadableImage
from vit_prune.train.distributed import largest_over_ranks

log = logging.getLogger(__name__)

IGNORED = -1  # the class of an image that evaluation leaves out
MAX_IN_A_ROW = 100
NAMED, COUNTED = 1, 2  # bits of a flag


class BrokenImages:
    """Which of `size` images could not be read, one byte per image, shared by the processes of a loader."""

    def __init__(self, size: int) -> None:
        try:
            self._flags, self._shared = RawArray("B", size), True
        except OSError:
            self._flags, self._shared = bytearray(size), False  # serves as long as one process loads the images

    @property
    def flags(self) -> np.ndarray:
        """[size], True where an image could not be read since the last reset."""
        return np.frombuffer(self._flags, dtype=np.uint8) & COUNTED > 0

    def reset(self) -> None:
        """Count from 0 again; what was named once is not named again."""
        flags = np.frombuffer(self._flags, dtype=np.uint8)
        flags &= NAMED

    def add(self, index: int, error: UnreadableImage) -> None:
        """Raises: OSError in a worker process that shares no memory with the main process."""
        if not self._shared and get_worker_info() is not None:
            raise OSError("skip_broken counts in memory that the workers share, and there is none here: use --workers 0, or leave out skip_broken")
        if not self._flags[index] & NAMED:
            log.error("skipped: %s", error)  # heard from every process of a run, not from the first alone
        self._flags[index] = NAMED | COUNTED


class DecodedImages(Dataset):
    """Base of the map-style sets that decode images. A subclass has `classes`, `class_to_idx`, `__len__` and `sample`."""

    transform: Callable | None = None
    split = "train"
    broken: BrokenImages | None = None  # None: an unreadable image is an error

    def skip_broken(self, split: str) -> None:
        """From now on, "train" puts the next readable image in the place of a broken one, "val" a black image of the class IGNORED."""
        self.split = split
        self.broken = BrokenImages(len(self))

    def sample(self, index: int) -> tuple[Image.Image, int]:
        """An RGB image and its class. Raises: UnreadableImage."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> tuple:
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        image, target = self.sample(index) if self.broken is None else self.sample_or_substitute(index)
        return (image if self.transform is None else self.transform(image)), target

    def sample_or_substitute(self, index: int) -> tuple[Image.Image, int]:
        """Raises: UnreadableImage for a training image where no image is readable among those that follow it."""
        tries = min(MAX_IN_A_ROW, len(self))
        for position in range(index, index + tries):
            try:
                return self.sample(position % len(self))
            except UnreadableImage as caught:
                error = caught
                self.broken.add(position % len(self), error)
            if self.split == "val":
                return Image.new("RGB", (256, 256)), IGNORED
        raise UnreadableImage(f"{tries} images in a row, the last being this one: {error}")


def broken_count(dataset: Dataset, device: torch.device) -> int:
    """Different images that no process of the run could read since the last reset; 0 for a set that does not skip them, or has none that could break."""
    if getattr(dataset, "broken", None) is None:
        return 0
    return int(largest_over_ranks(torch.from_numpy(dataset.broken.flags.astype(np.uint8)).to(device)).sum())


def reset_broken(dataset: Dataset) -> None:
    """Count the broken images from 0 again."""
    if getattr(dataset, "broken", None) is not None:
        dataset.broken.reset()
