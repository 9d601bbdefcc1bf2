"""Class lists, and the comparison of the classes of two sets."""

from collections.abc import Mapping
from pathlib import Path

from torch.utils.data import Dataset

from vit_prune.train.checks import few


def read_class_list(path: str | Path) -> list[str]:
    """The class names of a text file, one per line; blank lines and the spaces around a name do not count.

    Raises: FileNotFoundError; ValueError for a file that is no UTF-8 text, names nothing, or names a class twice.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"no class list {path}")
    try:
        names = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise ValueError(f"the class list {path} is no text in UTF-8") from None
    if not names:
        raise ValueError(f"the class list {path} is empty, expected one class name per line")
    if len(set(names)) < len(names):
        raise ValueError(f"the class list {path} names twice: {few(dict.fromkeys(name for name in names if names.count(name) > 1))}")
    return names


def check_same_classes(train: Dataset, val: Dataset) -> None:
    """Raises: ValueError that names the classes that only one of them has, or those with two numbers."""
    only_train, only_val, moved = class_differences(train.class_to_idx, val.class_to_idx)
    if only_train or only_val:
        raise ValueError(f"the classes of training and validation differ: only in training {few(only_train)}; only in validation {few(only_val)}")
    if moved:
        raise ValueError(f"the classes of training and validation have different numbers: {few(moved)}")


def class_differences(one: Mapping[str, int], other: Mapping[str, int]) -> tuple[list[str], list[str], list[str]]:
    """Two maps of class names to their numbers: the names in the first alone, in the second alone, and those with two numbers, "cat (0 and 1)"."""
    moved = [f"{name} ({index} and {other[name]})" for name, index in one.items() if name in other and index != other[name]]
    return [name for name in one if name not in other], [name for name in other if name not in one], moved
