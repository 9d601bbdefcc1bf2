"""The models that an evaluation compares: named, loaded, and checked against the data before the first batch."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from vit_prune import checkpoint
from vit_prune.methods.schedules import parse_keep
from vit_prune.methods.stack import columns_methods, prune_stacks
from vit_prune.patch import set_keep
from vit_prune.train.build import build_model
from vit_prune.train.checks import few
from vit_prune.train.labels import check_classes, label_names

log = logging.getLogger(__name__)

RULE_FIELDS = ("rule", "importance", "sampling", "dropped", "tau")


@dataclass(frozen=True)
class Candidate:
    """A name, and one checkpoint, or one per seed."""

    name: str
    paths: tuple[str, ...]


def parse_candidates(texts: tuple[str, ...]) -> tuple[Candidate, ...]:
    """Raises: ValueError for a name or a path that is given twice, FileNotFoundError for a checkpoint that is not there."""
    candidates = tuple(map(parse_candidate, texts))
    if not candidates:
        raise ValueError("checkpoint needs a folder of vp.save, or a file of weights together with --model")
    names = [candidate.name for candidate in candidates]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"two checkpoints are called {few(twice)}: name them, NAME=PATH")
    for candidate in candidates:
        for path in candidate.paths:
            if not Path(path).exists():
                raise FileNotFoundError(f"no checkpoint {path}")
    return candidates


def parse_candidate(text: str) -> Candidate:
    """PATH, or NAME=PATH,PATH,... with the checkpoints of several seeds. Raises: ValueError for anything else."""
    name, sign, rest = text.partition("=")
    if not sign or os.sep in name or Path(text).exists():
        return Candidate(text, (text,))
    paths = tuple(rest.split(","))
    if not name or not all(paths):
        raise ValueError(f"checkpoint must be PATH or NAME=PATH,PATH,..., got {text!r}")
    if len({Path(path).resolve() for path in paths}) < len(paths):
        raise ValueError(f"checkpoint {name} lists one path twice, which is not two seeds: {rest}")
    return Candidate(name, paths)


def load_model(path: str, *, model: str | None, img_size: int | None, dense: bool, classes: tuple[str, ...]) -> nn.Module:
    """What vp.save wrote, or the named model of timm with the weights of a file; its classes are compared with the data's.

    Args: dense: build the named model with keep 1, because schedules follow.
    Raises: ValueError or OSError for a checkpoint that is broken, of another model, or of other classes.
    """
    if model is None:
        loaded = checkpoint.load(path)
        check_classes(path, loaded, classes, label_names(loaded))
        return loaded
    kwargs = {"keep": "1"} if dense else {}
    if img_size is not None:
        kwargs["img_size"] = img_size
    built = build_model(model, num_classes=len(classes), **kwargs)
    log.info(checkpoint.load_weights(built, path, purpose="evaluate"))
    check_classes(path, built, classes, None)
    return built


def check_schedules(path: str, model: nn.Module, schedules: tuple[str | None, ...]) -> None:
    """Raises: ValueError that names the checkpoint, for a schedule that does not fit it. The last one stays set."""
    try:
        for keep in schedules:
            if keep is not None:
                set_keep(model, keep)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def check_seeds(candidate: Candidate, models: list[nn.Module]) -> None:
    """Raises: ValueError that names what differs, where the checkpoints of one name are not the same model."""
    first, *others = map(identity, models)
    for path, other in zip(candidate.paths[1:], others, strict=True):
        if differs := [key for key in first if first[key] != other[key]]:
            key = differs[0]
            values = "" if key in ("weights", "gates") else f": {first[key]} and {other[key]}"
            raise ValueError(f"{candidate.paths[0]} and {path} are not two seeds of one model, their {key} differ{values}")


def identity(model: nn.Module) -> dict:
    """What the seeds of one model share: the settings of the methods, and every weight's shape and dtype."""
    settings = {name: value for name, value in describe(model).items() if name != "keep"}
    gates = [gate.config for stack in prune_stacks(model) for gate in stack.gaters]
    weights = {name: (value.shape, value.dtype) for name, value in model.state_dict().items()}
    return settings | {"keep ratios": ratios_of(model), "gates": gates, "weights": weights}


def describe(model: nn.Module) -> dict:
    """{"keep": the schedule, as text, "rule", "importance", "sampling", "dropped", "tau": of Columns, None without, "query_key_free": blocks}."""
    columns = columns_methods(model)
    config = columns[0].config if columns else None
    fields = {name: getattr(config, name, None) for name in RULE_FIELDS}
    return {"keep": keep_of(model), **fields, "query_key_free": sum(stack.query_key_free for stack in prune_stacks(model))}


def keep_of(model: nn.Module) -> str:
    """The keep ratios that the model has now, in the grammar of `parse_keep`; "mass 0.9" and the like under the other rules."""
    columns = columns_methods(model)
    if not columns:
        return "1"
    config, ratios = columns[0].config, ratios_of(model)
    if config.rule != "topk":
        return f"{config.rule} {config.tau:g}"
    if len(set(ratios)) == 1:
        return str(parse_keep(ratios[0]))
    return str(config.keep if saved_as(config.keep, ratios) else parse_keep(tuple(round(ratio, 4) for ratio in ratios)))


def ratios_of(model: nn.Module) -> tuple[float, ...]:
    return tuple(method.keep_ratio for method in columns_methods(model))


def saved_as(keep: object, ratios: tuple[float, ...]) -> bool:
    """Whether a schedule gives these ratios."""
    try:
        return keep.ratios(len(ratios)) == ratios
    except ValueError:  # a list of another length
        return False
