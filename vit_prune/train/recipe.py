"""Recipes: YAML files with the fields of TrainConfig, read strictly and written in full."""

import re
from collections.abc import Hashable
from dataclasses import asdict, fields
from pathlib import Path

import yaml

from vit_prune.train.checks import check_name
from vit_prune.train.config import TrainConfig
from vit_prune.train.state import write_atomically


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


def load_recipe(path: str | Path) -> TrainConfig:
    """The recipe in a YAML file; fields that it leaves out keep their defaults. Keys may be written with - or _.

    Raises: OSError where the file cannot be read; ValueError, with the file's name, for what is no YAML mapping, an unknown key (with the
        nearest valid one), a key given twice and a wrong value.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = yaml.load(text, Loader=StrictLoader)  # a SafeLoader
        return TrainConfig(**check_keys({} if values is None else values))
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from None


def check_keys(values: object) -> dict:
    if not isinstance(values, dict):
        raise ValueError(f"a recipe is a mapping of names to values, got {type(values).__name__}")
    known = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        check_name("key", name, [item.name for item in fields(TrainConfig)])
        if name in known:
            raise ValueError(f"{name} is given twice")
        known[name] = value
    return known


def save_recipe(config: TrainConfig, path: str | Path) -> None:
    """Every field, in the order of the dataclass; `load_recipe` gives the same config back."""
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(config).items()}
    write_atomically(path, yaml.safe_dump(plain, sort_keys=False))
