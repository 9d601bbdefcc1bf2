"""A study: one recipe, several variants of it, several seeds of each, trained side by side and compared in one table.

A study is a YAML file, STUDY.yaml beside the recipe that it names:

recipe: fashion_mnist.yaml
seeds: [0, 1, 2]
variants:
  dense: {model: vit_mini28}
  pruned: {keep: [1, .5, .3, .2]}
  random: {keep: [1, .5, .3, .2], importance: random, seeds: [0]}
"""

import logging
import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch

from vit_prune.train.checks import check_name
from vit_prune.train.config import AUTO, TrainConfig
from vit_prune.train.recipe import check_keys, load_recipe, load_yaml
from vit_prune.train.run import run

KEYS = ("recipe", "seeds", "variants")


@dataclass(frozen=True)
class StudyRun:
    """One training of a study."""

    variant: str
    seed: int
    config: TrainConfig


def load_study(path: str | Path) -> list[StudyRun]:
    """Every run of a study file, its config checked. Raises: OSError; ValueError that names the file, the variant and what is wrong."""
    path = Path(path)
    values = load_yaml(path)
    try:
        for key in values:
            check_name("key", key, KEYS)
        if missing := [key for key in KEYS if not values.get(key)]:
            raise ValueError(f"a study needs {', '.join(KEYS)}; {', '.join(missing)} is missing")
        recipe = load_recipe(path.parent / values["recipe"])
        return [one for name, changes in values["variants"].items() for one in runs_of(name, changes or {}, recipe, values["seeds"])]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def runs_of(variant: str, changes: Mapping, recipe: TrainConfig, seeds: list[int]) -> list[StudyRun]:
    changes = dict(changes)
    seeds = changes.pop("seeds", seeds)
    try:
        config = replace(recipe, **check_keys(changes))
        return [StudyRun(variant, seed, replace(config, seed=seed)) for seed in seeds]
    except ValueError as error:
        raise ValueError(f"variant {variant}: {error}") from None


def load_variant(path: str | Path, variant: str) -> TrainConfig:
    """The recipe of one variant, with its first seed. Raises: as `load_study`; ValueError for an unknown variant."""
    runs = load_study(path)
    check_name("variant", variant, dict.fromkeys(one.variant for one in runs))
    return next(one.config for one in runs if one.variant == variant)


def placed(one: StudyRun, *, data_dir: str | None, output: str | Path) -> StudyRun:
    """The run with a folder of its own, going on by itself where it was interrupted."""
    settings = {"output": str(output), "experiment": f"{one.variant}-seed{one.seed}", "resume": AUTO}
    return replace(one, config=replace(one.config, data_dir=data_dir or one.config.data_dir, **settings))


def train_all(runs: list[StudyRun], *, processes: int, threads: int = 1) -> dict[str, dict[int, dict]]:
    """Train every run, several at once, each in a process of its own. Returns: {variant: {seed: what `run` returns}}."""
    os.environ["TQDM_DISABLE"] = "1"  # the processes' bars would draw over each other; each says a line per epoch
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        done = list(pool.map(train_one, runs, [threads] * len(runs)))
    results: dict[str, dict[int, dict]] = {}
    for one, result in zip(runs, done, strict=True):
        results.setdefault(one.variant, {})[one.seed] = result
    return results


def train_one(one: StudyRun, threads: int) -> dict:
    torch.set_num_threads(threads)
    logging.basicConfig(level=logging.INFO, format=f"{one.variant:8s} seed {one.seed}: %(message)s", force=True)
    return run(one.config)
