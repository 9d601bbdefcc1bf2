"""What the sets that come through timm share: the package they need, and the wrapper of those with numbered images."""

import importlib
import importlib.util
from collections.abc import Sequence
from io import BytesIO
from types import ModuleType
from typing import BinaryIO

from PIL import Image
from torch.utils.data import Dataset

from vit_prune.train.data.broken import DecodedImages
from vit_prune.train.data.images import DECODING_ERRORS, UnreadableImage, read_image, to_rgb

SPLITS = {"train": ("train",), "val": ("validation", "val", "test")}  # the first of them that is there


class LibraryImages(DecodedImages):
    """A map-style set of (PIL image or open file, class) as RGB images; `classes` are names in the order of their numbers."""

    def __init__(self, name: str, source: Dataset, classes: Sequence[str]) -> None:
        self.name = name
        self.source = source
        self.classes = list(classes)
        self.class_to_idx = {name: index for index, name in enumerate(self.classes)}

    def __len__(self) -> int:
        return len(self.source)

    def sample(self, index: int) -> tuple[Image.Image, int]:
        try:
            image, target = self.source[index]
            return (to_rgb(image) if isinstance(image, Image.Image) else self.read(image, index)), int(target)
        except UnreadableImage:
            raise
        except (*DECODING_ERRORS, AssertionError, TypeError) as error:  # the last two where a row holds no image
            raise UnreadableImage(f"cannot read image {index} of {self.name}: {error or 'there is none'}") from error

    def read(self, file: BinaryIO, index: int) -> Image.Image:
        with file:
            return read_image(file, f"{index} of {self.name}" if isinstance(file, BytesIO) else file.name)


def need_package(name: str, package: str) -> ModuleType:
    """Raises: ValueError where the package that the data set needs is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # a folder of that name is no package
        raise ValueError(f"the data set {name} needs the package {package}: pip install 'vit_prune[data]'")
    return importlib.import_module(package)


def pick_split(name: str, split: str, found: Sequence[str]) -> str:
    """The set's own name of "train" or "val". Raises: ValueError that names the splits that are there."""
    for own in SPLITS[split]:
        if own in found:
            return own
    raise ValueError(f"the data set {name} has no split {' or '.join(SPLITS[split])}; it has {', '.join(map(str, found)) or 'none'}")
