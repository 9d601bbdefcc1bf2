"""Recipes: YAML files with the fields of TrainConfig, read strictly and written in full."""

import re
from collections.abc import Hashable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TypeVar

import yaml

from vit_prune.train.checks import check_name
from vit_prune.train.config import TrainConfig
from vit_prune.train.state import write_atomically

Config = TypeVar("Config")


class StrictLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice, and reads 1e-3 as the number that it is (YAML 1.1 takes it for text)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise ValueError(f"{key} is given twice")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))


def load_recipe(path: str | Path, kind: type[Config] = TrainConfig) -> Config:
    """The recipe in a YAML file; fields that it leaves out keep their defaults. Keys may be written with - or _.

    `base: FILE`, beside it, is a recipe whose fields it takes over where it does not give its own.

    Raises: OSError where the file cannot be read; ValueError, with the file's name, for what is no YAML mapping, an unknown key (with the
        nearest valid one), a key given twice and a wrong value.
    """
    values = recipe_values(Path(path), kind)
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def recipe_values(path: Path, kind: type = TrainConfig, inside: tuple[Path, ...] = ()) -> dict:
    """The fields that a recipe and its base give. Raises: OSError; ValueError that names the file, also for bases that lead in a circle."""
    if path.resolve() in inside:
        raise ValueError(f"{path}: its base leads back to this file")
    values = load_yaml(path)
    base = values.pop("base", None)
    try:
        values = check_keys(values, kind)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return values if base is None else recipe_values(path.parent / str(base), kind, (*inside, path.resolve())) | values


def load_yaml(path: str | Path) -> dict:
    """A mapping from a YAML file. Raises: OSError; ValueError with the file's name."""
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=StrictLoader)  # a SafeLoader
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from None
    if values is not None and not isinstance(values, dict):
        raise ValueError(f"{path}: expected a mapping of names to values, got {type(values).__name__}")
    return values or {}


def check_keys(values: dict, kind: type = TrainConfig) -> dict:
    """The values by the names of fields. Raises: ValueError for an unknown name or one in both spellings."""
    known = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        check_name("key", name, [item.name for item in fields(kind)])
        if name in known:
            raise ValueError(f"{name} is given twice")
        known[name] = value
    return known


def save_recipe(config: Config, path: str | Path) -> None:
    """Every field, in the order of the dataclass; `load_recipe` gives the same config back."""
    write_atomically(path, yaml.safe_dump(plain(config), sort_keys=False))


def plain(config: Config) -> dict:
    """The fields, tuples as lists: for YAML and for torch.load(weights_only=True)."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(config).items()}
