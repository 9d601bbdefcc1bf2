"""Folders of images, one folder per class."""

import os
from pathlib import Path

from PIL import Image
from timm.utils.misc import natural_key
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS

from vit_prune.train.checks import few
from vit_prune.train.data.broken import DecodedImages
from vit_prune.train.data.classes import read_class_list
from vit_prune.train.data.images import read_image

SPLITS = {"train": ("train",), "val": ("val", "validation")}


class Folder(DecodedImages, ImageFolder):
    """ROOT/CLASS/.../IMAGE. Classes are numbered as timm does it (2 before 10), or by their place in the class list, which leaves out all others.
    Hidden files and folders and stray files are no data.

    Raises: FileNotFoundError where there is no class folder, one of the list is missing, or one has no images (it would shift the numbers of all
    classes after it).
    """

    def __init__(self, root: Path, class_map: str | None = None) -> None:
        self.class_map = class_map
        super().__init__(str(root), is_valid_file=self.is_image, allow_empty=True)
        filled = set(self.targets)
        if empty := [f"{root}/{name}" for name, index in self.class_to_idx.items() if index not in filled]:
            raise FileNotFoundError(f"no images in {few(empty)}; names of images end in {', '.join(IMG_EXTENSIONS)}")

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        names = sorted((entry.name for entry in os.scandir(directory) if entry.is_dir() and not entry.name.startswith(".")), key=natural_key)
        if not names:
            raise FileNotFoundError(f"{directory} holds no class folders: expected {directory}/CLASS/IMAGE")
        if self.class_map is not None:
            names = self.listed(directory, names)
        return names, {name: index for index, name in enumerate(names)}

    def listed(self, directory: str, names: list[str]) -> list[str]:
        wanted = read_class_list(self.class_map)
        if missing := [name for name in wanted if name not in set(names)]:
            raise FileNotFoundError(f"the class list {self.class_map} names classes without a folder in {directory}: {few(missing)}")
        return wanted

    def is_image(self, path: str) -> bool:
        return path.lower().endswith(IMG_EXTENSIONS) and f"{os.sep}." not in path[len(self.root) :]

    def sample(self, index: int) -> tuple[Image.Image, int]:
        path, target = self.samples[index]
        return self.read(path), target

    @staticmethod
    def read(path: str) -> Image.Image:
        return read_image(path)


def folder(data_dir: Path, split: str, class_map: str | None = None) -> Folder:
    """Raises: FileNotFoundError; ValueError for a broken class list."""
    roots = [data_dir / name for name in SPLITS[split] if (data_dir / name).is_dir()]
    if not roots:
        raise FileNotFoundError(f"no folder {' or '.join(str(data_dir / name) for name in SPLITS[split])}")
    return Folder(roots[0], class_map)
