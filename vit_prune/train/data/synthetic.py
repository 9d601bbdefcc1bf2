"""Noise of any amount, to try out a setup without data."""

from collections.abc import Callable

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

SPLIT_NUMBERS = {"train": 0, "val": 1}
SIDE, NUM_CLASSES = 256, 10


class Synthetic(Dataset):
    """`size` RGB images of 256 x 256 random pixels; pixels depend on the split and the index alone, the class is index % 10."""

    def __init__(self, size: int, split: str) -> None:
        self.size = size
        self.split = split
        self.classes = tuple(map(str, range(NUM_CLASSES)))
        self.class_to_idx = {name: index for index, name in enumerate(self.classes)}
        self.transform: Callable | None = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple:
        if not 0 <= index < self.size:
            raise IndexError(f"image {index} of {self.size}")
        generator = np.random.default_rng((SPLIT_NUMBERS[self.split], index))
        image = Image.fromarray(generator.integers(0, 256, size=(SIDE, SIDE, 3), dtype=np.uint8))
        return (image if self.transform is None else self.transform(image)), index % NUM_CLASSES


def parse_size(name: str) -> int:
    """The N of synthetic/N. Raises: ValueError where it is no whole number > 0."""
    text = name.partition("/")[2]
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise ValueError(f"the data set synthetic/N takes a number of images > 0, such as synthetic/24, got {name}")
    return int(text)
