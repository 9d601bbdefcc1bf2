"""WebDataset shards, wds/NAME: tar files in data_dir, described by its _info.json."""

import json
import random
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from timm.data.readers.reader import Reader

from vit_prune.train.checks import few
from vit_prune.train.data.images import DECODING_ERRORS, UnreadableImage, to_rgb
from vit_prune.train.data.library import need_package, pick_split
from vit_prune.train.data.stream import Stream

INFO_FILES = ("_info.json", "info.json")
SPLIT_KEYS = ("name", "filenames", "shard_lengths", "num_samples")
IMAGE_KEYS = "jpg;jpeg;png;webp;bmp;tif;tiff;gif"


def shards(name: str, data_dir: Path, split: str, *, batch_size: int, seed: int) -> Stream:
    """Raises: FileNotFoundError for a missing _info.json or shard; ValueError for an _info.json that lacks something."""
    need_package(name, "webdataset")
    from timm.data.readers.reader_wds import ReaderWds

    path, info = read_info(data_dir)
    own = pick_split(name, split, list(info.get("splits", {})))
    if lacking := [key for key in SPLIT_KEYS if key not in info["splits"][own]]:
        raise ValueError(f"{path}: the split {own} lacks {', '.join(lacking)}")
    if missing := [str(data_dir / file) for file in info["splits"][own]["filenames"] if not (data_dir / file).is_file()]:
        raise FileNotFoundError(f"{path} names shards that are not there: {few(missing)}")
    classes = class_names(path, info)
    options = {"is_training": split == "train", "batch_size": batch_size, "seed": seed, "input_key": IMAGE_KEYS, "input_img_mode": ""}
    return Stream(name, ReaderWds(root=str(data_dir), name=name, split=own, **options), classes, prepare)


def read_info(data_dir: Path) -> tuple[Path, dict]:
    """Raises: FileNotFoundError; ValueError for what is no JSON object."""
    found = [data_dir / file for file in INFO_FILES if (data_dir / file).is_file()]
    if not found:
        raise FileNotFoundError(f"no file {data_dir / INFO_FILES[0]}, which gives the shards of each split and the class names")
    try:
        info = json.loads(found[0].read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{found[0]} is no JSON: {error}") from None
    if not isinstance(info, dict):
        raise ValueError(f"{found[0]} must hold an object with the key splits")
    return found[0], info


def class_names(path: Path, info: dict) -> list[str]:
    names = info.get("class_names")
    if not isinstance(names, list) or not names or len(set(map(str, names))) < len(names):
        raise ValueError(f'num_classes is not known: add "class_names" to {path}, a list of different names in the order of the class numbers')
    return list(map(str, names))


def prepare(reader: Reader) -> None:
    seed_shuffling(reader)
    raise_errors(reader)


def seed_shuffling(reader: Reader) -> None:
    """timm shuffles by a seed of the process, on and on: by seed, epoch and worker instead."""
    for stage in reader.ds.pipeline:
        if "rng" in getattr(stage, "kw", {}):
            stage.kw["rng"] = random.Random(f"{reader.common_seed} {reader.epoch_count.value} {reader.global_worker_id}")


def raise_errors(reader: Reader) -> None:
    """Put this file's handling of errors in the place of timm's, which leaves out in silence what it cannot read."""
    import webdataset

    stages = [stage for stage in reader.ds.pipeline if "handler" in getattr(stage, "kw", {})]
    if len(stages) != 2:  # one opens the shards, one decodes
        raise NotImplementedError(f"webdataset {webdataset.__version__} builds pipelines in another way; install the version of the extra data")
    for stage in stages:
        stage.kw["handler"] = raise_named
        stage.args = tuple(partial(decode, timm_decode) for timm_decode in stage.args)


def decode(timm_decode: Callable, sample: dict) -> dict | None:
    """What timm makes of a sample, with an RGB image. Raises: UnreadableImage that names the sample and its shard."""
    try:
        decoded = timm_decode(sample)
        return None if decoded is None else decoded | {"jpg": to_rgb(decoded["jpg"])}
    except DECODING_ERRORS as error:
        raise UnreadableImage(f"cannot read the image {sample['__key__']} of {sample['__url__']}: {error!r}") from error


def raise_named(error: Exception) -> bool:
    """Raises: UnreadableImage for a damaged shard; the error itself otherwise."""
    if isinstance(error, (tarfile.TarError, EOFError)):
        raise UnreadableImage(f"cannot read the shard {error.args[-1]}: {error.args[0]}") from error
    raise error
