"""Data sets by name: (PIL RGB image, class) with a settable transform, so that timm's loaders serve them all."""

from pathlib import Path

from torch.utils.data import Dataset

from vit_prune.train.data import hugging_face
from vit_prune.train.data.arrays import Arrays, digits, fashion_mnist, read_idx
from vit_prune.train.data.broken import IGNORED, BrokenImages, DecodedImages, broken_count, reset_broken
from vit_prune.train.data.classes import check_same_classes, read_class_list
from vit_prune.train.data.folder import Folder, folder
from vit_prune.train.data.images import UnreadableImage, read_image, to_rgb
from vit_prune.train.data.names import AUGMENTATION, DATASETS, Augmentation, augmentation, check_dataset
from vit_prune.train.data.shards import shards
from vit_prune.train.data.synthetic import Synthetic, parse_size
from vit_prune.train.data.torch_sets import torch_set

__all__ = [
    "AUGMENTATION",
    "DATASETS",
    "IGNORED",
    "Arrays",
    "Augmentation",
    "BrokenImages",
    "Folder",
    "Synthetic",
    "UnreadableImage",
    "augmentation",
    "broken_count",
    "check_dataset",
    "check_same_classes",
    "create_dataset",
    "digits",
    "fashion_mnist",
    "folder",
    "read_class_list",
    "read_idx",
    "read_image",
    "reset_broken",
    "to_rgb",
]

STREAMS = ("hfids", "wds")
WITHOUT_DATA_DIR = {"digits": "comes with scikit-learn", "synthetic": "makes its own images"}
DATA_DIR_OPTIONAL = ("hfds", "hfids")


def create_dataset(
    name: str, data_dir: str | None, split: str, *, class_map: str | None = None, skip_broken: bool = False, batch_size: int = 1, seed: int = 42
) -> Dataset:
    """One split, "train" or "val", of a data set.

    Args:
        name: one of DATASETS
        data_dir: folder of the data; for Hugging Face sets the cache
        class_map: for a folder, a file of class names, one per line: only these classes, numbered in this order
        skip_broken: train on the next image in the place of one that cannot be read, and leave it out of the evaluation, instead of stopping
        batch_size, seed: of a stream (hfids, wds), which makes whole batches and shuffles by itself

    Raises: ValueError or OSError that names the folder, file or package that is missing, empty or broken.
    """
    check_dataset(name)
    kind = name.partition("/")[0]
    if class_map is not None and name != "folder":
        raise ValueError(f"class_map picks the classes of a folder; the data set {name} has classes of its own, leave it out")
    if skip_broken and kind in STREAMS:
        raise ValueError(f"skip_broken needs a set with numbered images, and {name} is read as a stream; leave it out")
    root = check_data_dir(name, kind, data_dir)
    dataset = open_stream(name, root, split, batch_size, seed) if kind in STREAMS else open_map_style(name, root, split, class_map)
    if not len(dataset):
        raise ValueError(f"the data set {name} has no images in the split {split}")
    if skip_broken and isinstance(dataset, DecodedImages):
        dataset.skip_broken(split)
    return dataset


def check_data_dir(name: str, kind: str, data_dir: str | None) -> Path | None:
    """Raises: ValueError for a data_dir that is missing, or that the data set does not take; FileNotFoundError where it is no folder."""
    if kind in WITHOUT_DATA_DIR:
        if data_dir is not None:
            raise ValueError(f"the data set {name} {WITHOUT_DATA_DIR[kind]} and takes no data_dir, got {data_dir}")
        return None
    if data_dir is None:
        if kind in DATA_DIR_OPTIONAL:
            return None
        raise ValueError(f"the data set {name} needs --data-dir")
    root = Path(data_dir).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"data_dir {data_dir} is no folder")
    return root


def open_map_style(name: str, root: Path | None, split: str, class_map: str | None) -> Dataset:
    kind = name.partition("/")[0]
    if kind == "folder":
        return folder(root, split, class_map)
    if kind == "fashion-mnist":
        return fashion_mnist(root, split)
    if kind == "digits":
        return digits(split)
    if kind == "synthetic":
        return Synthetic(parse_size(name), split)
    if kind == "torch":
        return torch_set(name, root, split)
    return hugging_face.map_style(name, None if root is None else str(root), split)


def open_stream(name: str, root: Path | None, split: str, batch_size: int, seed: int) -> Dataset:
    if name.partition("/")[0] == "wds":
        return shards(name, root, split, batch_size=batch_size, seed=seed)
    return hugging_face.stream(name, None if root is None else str(root), split, batch_size=batch_size, seed=seed)
