"""Hugging Face data sets through timm's readers: hfds/NAME with numbered images, hfids/NAME as a stream. NAME is a folder or a name of the hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from timm.data import create_dataset
from timm.data.readers.reader import Reader

from vit_prune.train.checks import few
from vit_prune.train.data.library import LibraryImages, need_package, pick_split
from vit_prune.train.data.stream import Stream


def map_style(name: str, data_dir: str | None, split: str) -> LibraryImages:
    """All images of a split that is on this machine already: a folder, or what the package datasets holds in its cache (data_dir, or its own).

    Raises: ValueError that says what is missing.
    """
    datasets = need_package(name, "datasets")
    path = name.partition("/")[2]
    with offline(), one_sentence(name, datasets):
        builder = datasets.load_dataset_builder(path, cache_dir=data_dir)
        own = pick_split(name, split, split_names(builder))
        columns = pick_columns(name, datasets, datasets.load_dataset(path, split=own, cache_dir=data_dir).features)
        reader = create_dataset(name, root=data_dir, split=own, download=False, **columns).reader
    classes = sorted(reader.class_to_idx, key=reader.class_to_idx.get)
    targets = reader.dataset.unique(columns["target_key"])
    if wrong := [target for target in targets if target is None or not 0 <= target < len(classes)]:
        raise ValueError(f"the split {own} of {name} has images of the class {few(map(str, wrong))}, expected 0 to {len(classes) - 1}")
    return LibraryImages(name, reader, classes)


def stream(name: str, data_dir: str | None, split: str, *, batch_size: int, seed: int) -> Stream:
    """The images of a split as they are read from a folder or from the hub, nothing kept.

    Raises: ValueError that says what is missing, such as the number of images or the class names in the dataset card.
    """
    datasets = need_package(name, "datasets")
    with one_sentence(name, datasets):
        builder = datasets.load_dataset_builder(name.partition("/")[2], cache_dir=data_dir)
        own = pick_split(name, split, split_names(builder))
        if not builder.info.features or not builder.info.splits or not builder.info.splits[own].num_examples:
            raise ValueError(f"{name} does not say in dataset_info of its README.md which columns and how many images it has: use hfds/ instead")
        columns = pick_columns(name, datasets, builder.info.features)
        options = {"is_training": split == "train", "batch_size": batch_size, "seed": seed, "input_img_mode": ""}
        reader = create_dataset(name, root=data_dir, split=own, download=False, **columns, **options).reader
    return Stream(name, reader, sorted(reader.class_to_idx, key=reader.class_to_idx.get), leave_undecoded)


def leave_undecoded(reader: Reader) -> None:
    """Decoding is this package's, which names what it cannot read."""
    import datasets

    reader.ds = reader.ds.cast_column(reader.input_key, datasets.Image(decode=False))


def split_names(builder) -> list[str]:
    return list(map(str, builder.info.splits or builder.config.data_files or ()))


def pick_columns(name: str, datasets: ModuleType, features: dict) -> dict[str, str]:
    """The columns called image and label, or the only ones of their types, by timm's names of them. Raises: ValueError where there are none, or several."""
    picked = {}
    for key, preferred, kind in (("input_key", "image", datasets.Image), ("target_key", "label", datasets.ClassLabel)):
        fits = [column for column, feature in features.items() if isinstance(feature, kind)]
        if preferred not in fits and len(fits) != 1:
            raise ValueError(
                f"{name} has {len(fits)} columns of the type {kind.__name__} ({few(fits)}), expected one, or one called {preferred}; its columns are "
                f"{few(features)}. " + "Without ClassLabel num_classes is not known: cast_column gives a column its class names" * (key == "target_key")
            )
        picked[key] = preferred if preferred in fits else fits[0]
    return picked


@contextmanager
def one_sentence(name: str, datasets: ModuleType) -> Iterator[None]:
    """Raises: ValueError that names the data set for whatever the package cannot open."""
    try:
        yield
    except (OSError, datasets.exceptions.DatasetsError) as error:
        where = "on this machine, nothing is downloaded" if name.startswith("hfds/") else "on this machine or on the hub"
        raise ValueError(f"cannot open {name}, expected a folder or a data set of the hub that is {where}: {error}") from error


@contextmanager
def offline() -> Iterator[None]:
    """No requests to the hub."""
    import datasets
    import huggingface_hub

    modules = (datasets.config, huggingface_hub.constants)
    before = [module.HF_HUB_OFFLINE for module in modules]
    for module in modules:
        module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value
