"""Data sets that are arrays of gray images: fashion-mnist and the digits."""

import gzip
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

IDX_FILES = {"train": "train", "val": "t10k"}
FASHION_CLASSES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


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
