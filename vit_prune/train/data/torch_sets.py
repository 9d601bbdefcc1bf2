"""torchvision's data sets, torch/NAME, opened by timm."""

import re
from pathlib import Path

from timm.data import create_dataset
from torch.utils.data import Dataset

from vit_prune.train.data.folder import SPLITS
from vit_prune.train.data.images import read_image
from vit_prune.train.data.library import LibraryImages

TORCH = ("cifar10", "cifar100", "mnist", "kmnist", "qmnist", "fashion_mnist", "places365", "inaturalist", "imagenet", "image_folder")


def torch_set(name: str, data_dir: Path, split: str) -> LibraryImages:
    """One split of what lies in data_dir; nothing is downloaded.

    Raises: FileNotFoundError where it is not there, or not whole.
    """
    if name == "torch/image_folder" and not any((data_dir / own).is_dir() for own in SPLITS[split]):  # timm would take data_dir itself
        raise FileNotFoundError(f"no folder {' or '.join(str(data_dir / own) for own in SPLITS[split])}")
    try:
        source = create_dataset(name, root=str(data_dir), split=split, download=False)
    except (RuntimeError, OSError) as error:
        reason = re.split(r"You can \w+ download", str(error))[0].strip()
        raise FileNotFoundError(f"cannot open {name} in {data_dir}, and nothing is downloaded: {reason}") from error
    if hasattr(source, "loader"):
        source.loader = read_image  # its own leaves EXIF orientation and 16-bit gray to chance
    return LibraryImages(name, source, class_names(source))


def class_names(source: Dataset) -> list[str]:
    """Names that no two classes share: WordNet ids for ImageNet, where "crane" is a bird and a machine."""
    for attribute in ("wnids", "all_categories"):
        if hasattr(source, attribute):
            return list(getattr(source, attribute))
    return sorted(source.class_to_idx, key=source.class_to_idx.get)
