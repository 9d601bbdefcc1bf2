"""Read the checkpoints that people have: one state dict with bare names, whatever it was wrapped in."""

import argparse
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vit_prune.checkpoint.common import listing

WEIGHTS = "model.safetensors"
CONFIG_KEY = "vit_prune"  # the entry of a safetensors header that holds a copy of config.json
CONTAINERS = ("model", "state_dict", "model_state_dict", "module")
EMA_CONTAINERS = ("state_dict_ema", "model_ema", "ema")
WRAPPERS = ("module.", "_orig_mod.")
PARTS = ("backbone.", "encoder.")  # names of the ViT inside a larger model
AVERAGE_COUNT = "n_averaged"  # torch's AveragedModel counts its updates here: not a weight
Grid = tuple[int, int]


class Content(NamedTuple):
    """One file: its weights by bare names, the names that belong to other parts of a larger model, and the patch grid where the file says it."""

    path: Path
    weights: dict[str, Tensor]
    outside: tuple[str, ...]
    grid: Grid | None


def read_checkpoint(path: str | Path, *, ema: bool = False) -> dict[str, Tensor]:
    """The weights in a file, by bare names, on the CPU.

    Args:
        path: a directory that `save` wrote, a .safetensors file, or a file by torch.save: a state dict, or a dict that holds one under
            model, state_dict, ... Nothing is unpickled but tensors, containers, plain values and argparse.Namespace.
        ema: read the averaged weights (state_dict_ema, model_ema) instead.

    Prefixes module., _orig_mod., backbone. and encoder. are taken off; where one of the last two occurs, all other names are dropped with a warning.
    Raises: FileNotFoundError; ValueError for a file that is no whole checkpoint, holds pickled objects, or lacks what `ema` asks for.
    """
    return open_checkpoint(path, ema).weights


def open_checkpoint(path: str | Path, ema: bool) -> Content:
    path, grid = Path(path), None
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.is_dir():
        path = member(path, WEIGHTS)
    if path.suffix == ".safetensors":
        contents, metadata = read_tensors(path)
        saved = json.loads(metadata.get(CONFIG_KEY, "{}")).get("grid_size")
        grid = None if saved is None else tuple(saved)
    else:
        contents = read_torch_file(path)
    weights, outside = strip(find_weights(contents, path, ema), path)
    if outside:
        warnings.warn(f"{path}: dropped {len(outside)} weights outside of the backbone: {listing(outside)}", stacklevel=3)
    return Content(path, weights, outside, grid)


def member(directory: Path, name: str) -> Path:
    """Raises: FileNotFoundError that lists what the directory holds instead."""
    if not (directory / name).exists():
        raise FileNotFoundError(f"{directory} has no {name}; it holds {listing(sorted(p.name for p in directory.iterdir())) or 'nothing'}")
    return directory / name


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and the header's metadata. Raises: ValueError where the file is cut short."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118  (it is not a dict)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}): copy or download it again") from error


def read_torch_file(path: Path) -> object:
    """What torch.save wrote, without unpickling any class but argparse.Namespace, in which training scripts keep their flags."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a broken pickle may raise anything
        refused = re.search(r"(?:GLOBAL|unsupported class|Unsupported class) (\S+)", str(error))
        if refused is None:
            reason = f"is not a whole checkpoint ({type(error).__name__})"
            raise ValueError(f"{path} {reason}: copy or download it again, or convert it to .safetensors") from error
        raise ValueError(
            f"{path} holds a pickled {refused[1]}, and unpickling it can run any code: where you trust the file, save its weights alone, "
            f"torch.save({{'model': model.state_dict()}}, ...), in the program that wrote it"
        ) from error


def find_weights(contents: object, path: Path, ema: bool) -> dict[str, Tensor]:
    if not isinstance(contents, Mapping):
        raise ValueError(f"{path} holds a {type(contents).__name__}; expected a state dict, or a dict with one under {', '.join(CONTAINERS)}")
    found = nested_weights(contents, EMA_CONTAINERS if ema else CONTAINERS, ema)
    if not found and not ema:
        found = {"": tensors_of(contents)} if tensors_of(contents) else {}
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise ValueError(f"{path} holds weights more than once, under {' and '.join(found)}: save the one that is meant alone")
    if ema:
        raise ValueError(f"{path} holds no EMA weights ({', '.join(EMA_CONTAINERS)}); it holds {listing(map(str, contents)) or 'nothing'}")
    averaged = nested_weights(contents, EMA_CONTAINERS, True)
    if averaged:
        raise ValueError(f"{path} holds only EMA weights, under {' and '.join(averaged)}: pass ema=True to load them")
    raise ValueError(f"{path} holds no weights; it holds {listing(map(str, contents)) or 'nothing'}")


def nested_weights(contents: Mapping, names: Iterable[str], ema: bool) -> dict[str, dict[str, Tensor]]:
    """Every state dict under these names, and under containers inside them: {"model_ema.module": weights}."""
    found = {}
    for name in names:
        inner = contents.get(name)
        if isinstance(inner, Mapping):
            deeper = nested_weights(inner, (*CONTAINERS, *(EMA_CONTAINERS if ema else ())), ema)
            here = {name: tensors_of(inner)} if tensors_of(inner) else {}
            found |= {f"{name}.{key}": weights for key, weights in deeper.items()} or here
    return found


def tensors_of(contents: Mapping) -> dict[str, Tensor]:
    return {str(name): value.detach() for name, value in contents.items() if isinstance(value, Tensor) and name != AVERAGE_COUNT}


def strip(weights: dict[str, Tensor], path: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Bare names, and the names outside of the backbone. Raises: ValueError where two names become one."""
    bare, outside = {name: without(name, WRAPPERS) for name in weights}, []
    while any(name.startswith(PARTS) for name in bare.values()):
        outside += [name for name in bare.values() if not name.startswith(PARTS)]
        bare = {full: without(name.split(".", 1)[1], WRAPPERS) for full, name in bare.items() if name.startswith(PARTS)}
    origin = {}
    for full, name in bare.items():
        if name in origin:
            raise ValueError(f"{path}: {origin[name]} and {full} are both {name} without their prefixes; save one of the two models alone")
        origin[name] = full
    return {name: weights[full] for name, full in origin.items()}, tuple(outside)


def without(name: str, prefixes: tuple[str, ...]) -> str:
    while name.startswith(prefixes):
        name = name.split(".", 1)[1]
    return name
