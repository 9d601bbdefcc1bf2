"""The names of data sets, and what depends on the name alone."""

from typing import NamedTuple

from vit_prune.train.checks import check_name
from vit_prune.train.data.synthetic import parse_size
from vit_prune.train.data.torch_sets import TORCH

DATASETS = ("folder", "fashion-mnist", "digits", "synthetic/N", "hfds/NAME", "hfids/NAME", "wds/NAME", "torch/NAME")


class Augmentation(NamedTuple):
    """What a data set bears where the user did not say otherwise."""

    scale: tuple[float, float]
    ratio: tuple[float, float]
    hflip: float
    color_jitter: float


FASHION = Augmentation(scale=(0.7, 1.0), ratio=(3 / 4, 4 / 3), hflip=0.5, color_jitter=0.0)
CHARACTERS = Augmentation(scale=(0.8, 1.0), ratio=(0.9, 1.1), hflip=0.0, color_jitter=0.0)  # a mirrored digit is another digit
AUGMENTATION = {
    "folder": Augmentation(scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), hflip=0.5, color_jitter=0.4),  # timm's
    "fashion-mnist": FASHION,
    "torch/fashion_mnist": FASHION,
    "digits": CHARACTERS,
    "torch/mnist": CHARACTERS,
    "torch/kmnist": CHARACTERS,
    "torch/qmnist": CHARACTERS,
}


def augmentation(name: str) -> Augmentation:
    """The defaults for a data set: its own, or those of a folder."""
    return AUGMENTATION.get(name, AUGMENTATION["folder"])


def check_dataset(name: str) -> None:
    """Raises: ValueError for a name that is no data set, with the nearest valid ones, or all."""
    kind, _, rest = name.partition("/")
    if kind == "synthetic":
        parse_size(name)
    elif kind == "torch":
        check_name("torchvision dataset", rest, TORCH)
    elif kind != "wds" and not (kind in ("hfds", "hfids") and rest):
        check_name("dataset", name, DATASETS)
