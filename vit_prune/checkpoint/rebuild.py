"""Build the model that a config describes."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

from vit_prune.checkpoint.common import nearest, tuples
from vit_prune.methods.base import BlockCalibration, MethodConfig
from vit_prune.methods.l1 import PrunePlan
from vit_prune.methods.stack import prune_stacks
from vit_prune.patch import patch, set_keep, unpatch
from vit_prune.prune import prune


def build(config: dict, state: dict[str, Tensor], source: Path | str, *, device: str = "cpu") -> nn.Module:
    """The model that the config describes, with the state's dtypes and calibration, but not yet its weights."""
    model = create(config, source, device=device)
    if isinstance(getattr(model, "pretrained_cfg", None), dict):
        model.pretrained_cfg.update({key: tuples(value) for key, value in config["preprocessing"].items()})
    if config.get("prune_plan") is not None:  # older configs have no such entry
        with naming(source):
            prune(model, PrunePlan.from_dict(config["prune_plan"]))
    cast(model, state)
    if config["methods"]:
        if calibration := saved_calibration(model, state):
            model.calibration = calibration
        with naming(source):
            methods = [method_from(entry, source) for entry in config["methods"]]
            patch(model, methods, impl=config["impl"])
            if config["keep"]:
                set_keep(model, config["keep"])
        cast(model, state)
    with naming(source):
        restore(dict(model.named_modules()), config["settings"], source)
    return model


def create(config: dict, source: Path | str, *, device: str = "cpu") -> nn.Module:
    """The host that the config names, not patched. Raises: ValueError for names and arguments that timm does not know."""
    architecture = config["architecture"]
    args = {name: tuples(value) for name, value in config["model_args"].items()}
    if not timm.is_model(architecture):
        raise ValueError(f"{source}: timm {timm.__version__} has no architecture {architecture!r}{nearest(architecture, timm.list_models())}")
    with naming(f"{source}: timm.create_model({architecture!r}, **{args}) fails"), torch.device(device):
        model = timm.create_model(architecture, pretrained=False, **args)
    return unpatch(model) if prune_stacks(model) else model


def restore(modules: dict[str, nn.Module], settings: dict[str, dict], source: Path | str) -> None:
    for name, attributes in settings.items():
        if name not in modules:
            raise ValueError(f"{source}: settings names {name}, which the model does not have{nearest(name, modules)}")
        for key, value in attributes.items():
            setattr(modules[name], key, tuples(value))


@contextmanager
def naming(source: Path | str) -> Iterator[None]:
    """Errors say where they are from, and a bias is not warned about before it has its weights."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the token bias is all zero")
            yield
    except Exception as error:  # whatever a wrong argument runs into
        if str(error).startswith(str(source)):
            raise
        raise ValueError(f"{source}: {error}") from error


def method_from(entry: dict, source: Path | str) -> MethodConfig:
    """The config whose `to_dict` gave this entry. Raises: ValueError for an unknown name or field."""
    known = {cls.name: cls for cls in MethodConfig.__subclasses__() if hasattr(cls, "name")}
    name = entry.get("name") if isinstance(entry, dict) else entry
    if name not in known:
        raise ValueError(f"{source}: unknown method {name!r}; there are {', '.join(sorted(known))}{nearest(str(name), known)}")
    try:
        return known[name](**{key: tuples(value) for key, value in entry.items() if key != "name"})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: method {name}: {error}") from error


def cast(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Give the model the dtypes of the state, its buffers that are in no state dict included where there is one dtype."""
    dtypes = {value.dtype for value in state.values() if value.is_floating_point()}
    if len(dtypes) == 1:
        model.to(dtypes.pop())
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if name in state:
            tensor.data = tensor.data.to(state[name].dtype)


def saved_calibration(model: nn.Module, state: dict[str, Tensor]) -> list[BlockCalibration | None] | None:
    """What the methods hold of the calibration, per block; None where they hold none. What is not known of a block is empty."""
    measured = []
    for index, block in enumerate(getattr(model, "blocks", ())):
        held = {name.rsplit(".", 1)[1]: value for name, value in state.items() if name.startswith(f"blocks.{index}.attn.prune.")}
        if not held.keys() & {"q_mean", "directions"}:
            measured.append(None)
            continue
        q_mean = held["q_mean"].clone() if "q_mean" in held else torch.empty(0, block.attn.head_dim)
        directions = held["directions"].clone() if "directions" in held else torch.empty(model.embed_dim, 0)
        measured.append(BlockCalibration(q_mean, directions))
    return measured if any(measured) else None
