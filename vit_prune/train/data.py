"""Data sets by name, each a map-style set of (PIL RGB image, class) with a settable transform, so that timm's loaders serve them all."""

import gzip
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from timm.utils.misc import natural_key
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS

from vit_prune.train.checks import few

SPLITS = {"train": ("train",), "val": ("val", "validation")}
IDX_FILES = {"train": "train", "val": "t10k"}
FASHION_CLASSES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


class Augmentation(NamedTuple):
    """What a data set bears where the user did not say otherwise."""

    scale: tuple[float, float]
    ratio: tuple[float, float]
    hflip: float
    color_jitter: float


AUGMENTATION = {
    "folder": Augmentation(scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), hflip=0.5, color_jitter=0.4),  # timm's
    "fashion-mnist": Augmentation(scale=(0.7, 1.0), ratio=(3 / 4, 4 / 3), hflip=0.5, color_jitter=0.0),
    "digits": Augmentation(scale=(0.8, 1.0), ratio=(0.9, 1.1), hflip=0.0, color_jitter=0.0),  # a mirrored digit is another digit
}


class UnreadableImage(OSError):
    """An image file that cannot be decoded; the message names it. A loader's worker process wraps it in a traceback, taken off here."""

    def __str__(self) -> str:
        return super().__str__().rpartition(f"{type(self).__name__}: ")[2].strip()


class Folder(ImageFolder):
    """ROOT/CLASS/.../IMAGE. Classes are numbered as timm does it (2 before 10); hidden files and folders and stray files are no data.

    Raises: FileNotFoundError where there is no class folder, or one without images (it would shift the numbers of all classes after it).
    """

    def __init__(self, root: Path) -> None:
        super().__init__(str(root), loader=self.read, is_valid_file=self.is_image, allow_empty=True)
        filled = set(self.targets)
        if empty := [f"{root}/{name}" for name, index in self.class_to_idx.items() if index not in filled]:
            raise FileNotFoundError(f"no images in {few(empty)}; names of images end in {', '.join(IMG_EXTENSIONS)}")

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        names = sorted((entry.name for entry in os.scandir(directory) if entry.is_dir() and not entry.name.startswith(".")), key=natural_key)
        if not names:
            raise FileNotFoundError(f"{directory} holds no class folders: expected {directory}/CLASS/IMAGE")
        return names, {name: index for index, name in enumerate(names)}

    def is_image(self, path: str) -> bool:
        return path.lower().endswith(IMG_EXTENSIONS) and f"{os.sep}." not in path[len(self.root) :]

    @staticmethod
    def read(path: str) -> Image.Image:
        try:
            with Image.open(path) as image:
                return image.convert("RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # what Pillow's decoders raise
            raise UnreadableImage(f"cannot read the image {path}: {error}") from error


class Arrays(Dataset):
    """Gray images in memory: images [n, height, width] uint8, targets [n]."""

    def __init__(self, images: np.ndarray, targets: np.ndarray, classes: tuple[str, ...]) -> None:
        self.images = images
        self.targets = targets
        self.classes = classes
        self.class_to_idx = {name: index for index, name in enumerate(classes)}
        self.transform: Callable | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple:
        image = Image.fromarray(self.images[index]).convert("RGB")
        return (image if self.transform is None else self.transform(image)), int(self.targets[index])


def create_dataset(name: str, data_dir: str | None, split: str) -> Dataset:
    """One split, "train" or "val", of a data set.

    Raises: ValueError or OSError that names the folder or file that is missing, empty or broken.
    """
    if name == "digits":
        if data_dir is not None:
            raise ValueError(f"the data set digits comes with scikit-learn and takes no data_dir, got {data_dir}")
        return digits(split)
    if data_dir is None:
        raise ValueError(f"the data set {name} needs --data-dir")
    root = Path(data_dir).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"data_dir {data_dir} is no folder")
    return fashion_mnist(root, split) if name == "fashion-mnist" else folder(root, split)


def folder(data_dir: Path, split: str) -> Folder:
    roots = [data_dir / name for name in SPLITS[split] if (data_dir / name).is_dir()]
    if not roots:
        raise FileNotFoundError(f"no folder {' or '.join(str(data_dir / name) for name in SPLITS[split])}")
    return Folder(roots[0])


def fashion_mnist(data_dir: Path, split: str) -> Arrays:
    images = read_idx(data_dir / f"{IDX_FILES[split]}-images-idx3-ubyte.gz", ndim=3)
    targets = read_idx(data_dir / f"{IDX_FILES[split]}-labels-idx1-ubyte.gz", ndim=1)
    if len(images) != len(targets) or not len(images):
        raise ValueError(f"{data_dir}: {len(images)} images and {len(targets)} labels of the split {split}")
    if targets.max() >= len(FASHION_CLASSES):
        raise ValueError(f"{data_dir}: the split {split} has the label {targets.max()}, expected 0 to {len(FASHION_CLASSES) - 1}")
    return Arrays(images, targets, FASHION_CLASSES)


def read_idx(path: Path, *, ndim: int) -> np.ndarray:
    """An idx file of bytes: magic 00 00 08 NDIM, ndim big-endian sizes, the data. Raises: FileNotFoundError; ValueError for a broken one."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        raw = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, gzip.zlib.error) as error:
        raise ValueError(f"{path} is no whole gzip file: {error}") from None
    if raw[:4] != bytes((0, 0, 8, ndim)):
        raise ValueError(f"{path} begins with {raw[:4].hex()}, expected 000008{ndim:02x} (idx, unsigned bytes, {ndim} dims)")
    header = 4 + 4 * ndim
    shape = [int.from_bytes(raw[start : start + 4], "big") for start in range(4, header, 4)]
    if len(raw) - header != math.prod(shape):
        raise ValueError(f"{path} holds {len(raw) - header} bytes of data, its header says {'x'.join(map(str, shape))}")
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(shape)


def digits(split: str) -> Arrays:
    """scikit-learn's 1,797 digits of 8x8 pixels: 1,437 to train, 360 to evaluate, the same split (stratified, seed 0) every time."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    train, val = train_test_split(np.arange(len(data.target)), test_size=0.2, stratify=data.target, random_state=0)
    rows = train if split == "train" else val
    images = np.round(data.images[rows] * (255 / 16)).astype(np.uint8)  # 0 to 16 in the original
    return Arrays(images, data.target[rows], tuple(map(str, range(10))))


def check_same_classes(train: Dataset, val: Dataset) -> None:
    """Raises: ValueError that names the classes that only one of them has."""
    if train.class_to_idx == val.class_to_idx:
        return
    only = [sorted(one.class_to_idx.keys() - other.class_to_idx.keys()) for one, other in ((train, val), (val, train))]
    raise ValueError(f"the classes of training and validation differ: only in training {few(only[0])}; only in validation {few(only[1])}")
