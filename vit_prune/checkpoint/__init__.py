"""Save a model that timm can build, patched or not, and load it again bit for bit.

A checkpoint is a directory: config.json says how the model is built, model.safetensors holds its state dict and, so that a kill
between the two renames can be told, a copy of the config in its header. Nothing is pickled.
"""

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import safetensors.torch
from torch import Tensor, nn

from vit_prune.checkpoint.common import misfits, unwrap
from vit_prune.checkpoint.fit import LoadedWeights, load_weights
from vit_prune.checkpoint.reader import CONFIG_KEY, WEIGHTS, member, read_checkpoint, read_tensors
from vit_prune.checkpoint.rebuild import build
from vit_prune.checkpoint.record import FORMAT, describe
from vit_prune.methods.schedules import Keep
from vit_prune.patch import set_keep, warn_if_untrained
from vit_prune.patch.fused import is_fused
from vit_prune.version import __version__

__all__ = ["LoadedWeights", "load", "load_weights", "read_checkpoint", "save"]


CONFIG = "config.json"
KEYS = {"architecture": str, "model_args": dict, "preprocessing": dict, "methods": list, "impl": str, "keep": list | None, "settings": dict}


def save(model: nn.Module, directory: str | Path, *, model_args: Mapping | None = None) -> None:
    """Write `directory`/config.json and `directory`/model.safetensors, each complete or not at all.

    Args:
        model: what timm.create_model built, patched or not; wrappers (torch.compile, DDP) are looked through. It is not changed.
        model_args: arguments of timm.create_model that cannot be read off the model, and "architecture" where it was not made by name.

    Raises: ValueError, before anything is written, where the recorded arguments do not build this model again.
    """
    model = unwrap(model)
    if is_fused(model):
        raise ValueError("a fused model cannot be saved: save the model before vp.fuse, and fuse what vp.load gives")
    state = model.state_dict()
    if any(value.is_meta for value in state.values()):
        raise ValueError("a model on the meta device has no weights to save")
    config = describe(model, dict(model_args or {}), state)
    if getattr(model, "calibration", None) and not config["calibrated"]:
        warnings.warn("the calibration is not saved, because no method of this model holds it: calibrate again after load", stacklevel=2)
    write(Path(directory), owned(state), config)


def load(path: str | Path, *, keep: Keep | float | str | Sequence[float] | None = None) -> nn.Module:
    """The model that `save` wrote, in train mode as from timm.create_model, on the CPU, in the dtypes that it had.

    Args:
        path: the directory, or a file in it.
        keep: other keep ratios than those that were saved.

    Raises: FileNotFoundError; ValueError for a config that is broken or names what is not known here, and for weights that are not the config's.
    """
    config, state, source = read_pair(Path(path))
    model = build(config, state, source)
    if misfit := misfits(state, model.state_dict()):
        raise ValueError(f"{source} does not describe the weights beside it: {misfit}")
    model.load_state_dict(state, strict=True)
    if keep is None:
        warn_if_untrained(model)
    else:
        set_keep(model, keep)
    return model


def read_pair(path: Path) -> tuple[dict, dict[str, Tensor], Path]:
    """Config, state dict, and the file that the config is from."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.suffix == ".safetensors" and not (path.name == WEIGHTS and (path.parent / CONFIG).exists()):
        state, metadata = read_tensors(path)
        if CONFIG_KEY not in metadata:
            raise ValueError(f"{path} does not say how to build its model: build it with timm and vp.patch, then load_weights(model, path)")
        return check_config(json.loads(metadata[CONFIG_KEY]), path), state, path
    directory = path if path.is_dir() else path.parent
    source, weights = directory / CONFIG, directory / WEIGHTS
    if path not in (directory, source, weights):
        raise ValueError(f"{path} was not written by save: build the model with timm and vp.patch, then load_weights(model, path)")
    config = read_config(member(directory, CONFIG))
    state, metadata = read_tensors(member(directory, WEIGHTS))
    written = check_config(json.loads(metadata[CONFIG_KEY]), weights) if CONFIG_KEY in metadata else config
    if written.get("digest") == config.get("digest"):
        return config, state, source
    warnings.warn(f"{source} and {weights} are from two saves, of which the second was cut short: the config inside {weights.name} is used", stacklevel=3)
    return written, state, weights


def read_config(path: Path) -> dict:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON ({error}): copy it again, or load {WEIGHTS} from a directory of its own") from error
    return check_config(config, path)


def check_config(config: object, path: Path) -> dict:
    """Raises: ValueError for what is no config, or one of another format."""
    if not isinstance(config, dict) or "format" not in config:
        raise ValueError(f"{path} is not a config that save wrote: it has no format")
    if config["format"] != FORMAT:
        raise ValueError(f"{path} has format {config['format']!r}, vit_prune {__version__} reads format {FORMAT}: install the version that wrote it")
    if wrong := [key for key, kind in KEYS.items() if not isinstance(config.get(key, ...), kind)]:
        raise ValueError(f"{path} is not a config that save wrote: {', '.join(wrong)} missing or of another type")
    return config


def owned(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as safetensors takes them: on the CPU, contiguous, each with memory of its own."""
    tensors, seen = {}, set()
    for name, value in state.items():
        value = value.detach().cpu().contiguous()
        memory = value.untyped_storage().data_ptr()
        tensors[name] = value.clone() if memory in seen else value
        seen.add(memory)
    return tensors


def write(directory: Path, tensors: dict[str, Tensor], config: dict) -> None:
    """Both files are complete on the disk under temporary names before the first takes its place."""
    directory.mkdir(parents=True, exist_ok=True)
    temporary = {name: directory / f".{name}.{os.getpid()}.tmp" for name in (WEIGHTS, CONFIG)}
    try:
        try:
            safetensors.torch.save_file(tensors, temporary[WEIGHTS], metadata={"format": "pt", CONFIG_KEY: json.dumps(config)})
        except safetensors.SafetensorError as error:  # what a full disk is to safetensors
            raise OSError(f"cannot write {directory / WEIGHTS}: {error}") from error
        temporary[CONFIG].write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for path in temporary.values():
            sync(path)
        for name, path in temporary.items():
            os.replace(path, directory / name)
        sync(directory)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """A file, or the entries of a directory, to the disk itself."""
    if os.name != "posix" and path.is_dir():  # elsewhere a directory cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
