"""A study: one recipe, several variants of it, several seeds of each, trained side by side and compared in one table.

A study is a YAML file, STUDY.yaml beside the recipe that it names:

recipe: fashion_mnist.yaml
seeds: [0, 1, 2]
variants:
  dense: {model: vit_mini28}
  pruned: {keep: [1, .5, .3, .2]}
  random: {keep: [1, .5, .3, .2], importance: random, seeds: [0]}

`task: text`, beside them, where the recipe is one of tools/train_text.py.
"""

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch

from vit_prune.train.checks import check_name
from vit_prune.train.config import TrainConfig
from vit_prune.train.job import prepare
from vit_prune.train.recipe import check_keys, load_recipe, load_yaml
from vit_prune.train.run import run
from vit_prune.train.run_config import AUTO, RunConfig

KEYS = ("recipe", "seeds", "variants")
TASKS = ("images", "text")
MACS_UNITS = {"images": "multiply-accumulates per image", "text": "multiply-accumulates of a text of max_length tokens, the longest that the model takes"}


class StudyFailed(RuntimeError):
    """Runs of a study that came to no end."""


@dataclass(frozen=True)
class StudyRun:
    """One training of a study."""

    variant: str
    seed: int
    config: RunConfig
    task: str = "images"

    @property
    def data_field(self) -> str:
        """The field of the config that says where the data lies."""
        return "data_dir" if self.task == "images" else "dataset_dir"


def task_parts(task: str) -> tuple[type, Callable]:
    """The class of a task's configs, and what prepares its jobs."""
    if task == "images":
        return TrainConfig, prepare
    from vit_prune.text.config import TextConfig
    from vit_prune.text.job import prepare_text

    return TextConfig, prepare_text


def load_study(path: str | Path) -> list[StudyRun]:
    """Every run of a study file, its config checked. Raises: OSError; ValueError that names the file, the variant and what is wrong."""
    path = Path(path)
    values = load_yaml(path)
    try:
        task = values.pop("task", TASKS[0])
        check_name("task", task, TASKS)
        for key in values:
            check_name("key", key, (*KEYS, "task"))
        if missing := [key for key in KEYS if not values.get(key)]:
            raise ValueError(f"a study needs {', '.join(KEYS)}; {', '.join(missing)} is missing")
        check_types(values)
        recipe = load_recipe(path.parent / values["recipe"], task_parts(task)[0])
        runs = [one for name, changes in values["variants"].items() for one in runs_of(name, changes or {}, recipe, values["seeds"])]
        return [replace(one, task=task) for one in runs]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_types(values: Mapping) -> None:
    """Raises: ValueError for a study whose parts are not what they should be."""
    if not isinstance(values["recipe"], str):
        raise ValueError(f"recipe must be the name of a file, got {values['recipe']!r}")
    check_seeds(values["seeds"])
    if not isinstance(values["variants"], dict):
        raise ValueError(f"variants must be a mapping of names to fields, got {values['variants']!r}")
    for name, changes in values["variants"].items():
        if not isinstance(changes or {}, dict):
            raise ValueError(f"variant {name} must be a mapping of fields to values, got {changes!r}")


def check_seeds(seeds: object) -> None:
    """Raises: ValueError for anything but a list of different whole numbers: two runs of one seed would share a folder."""
    if not isinstance(seeds, list) or not seeds or any(type(seed) is not int for seed in seeds) or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be a list of different whole numbers, got {seeds!r}")


def runs_of(variant: str, changes: Mapping, recipe: RunConfig, seeds: list[int]) -> list[StudyRun]:
    """One run per seed, the variant's own seeds where it gives some. Raises: ValueError that names the variant."""
    changes = dict(changes)
    seeds = changes.pop("seeds", seeds)
    try:
        check_seeds(seeds)
        config = replace(recipe, **check_keys(changes, type(recipe)))
        return [StudyRun(variant, seed, replace(config, seed=seed)) for seed in seeds]
    except ValueError as error:
        raise ValueError(f"variant {variant}: {error}") from None


def load_variant(path: str | Path, variant: str, task: str = TASKS[0]) -> RunConfig:
    """The recipe of one variant, with its first seed. Raises: as `load_study`; ValueError for an unknown variant and a study of another task."""
    runs = load_study(path)
    if runs[0].task != task:
        raise ValueError(f"{path} is a study of the task {runs[0].task}: its variants are trained by tools/train{'_text' * (runs[0].task == 'text')}.py")
    check_name("variant", variant, dict.fromkeys(one.variant for one in runs))
    return next(one.config for one in runs if one.variant == variant)


def with_run_folder(one: StudyRun, *, data_dir: str | None, output: str | Path) -> StudyRun:
    """The run with a folder of its own, going on by itself where it was interrupted."""
    settings = {"output": str(output), "experiment": f"{one.variant}-seed{one.seed}", "resume": AUTO}
    data = {} if data_dir is None else {one.data_field: data_dir}
    return replace(one, config=replace(one.config, **settings, **data))


def train_all(runs: list[StudyRun], *, processes: int, threads: int = 1) -> dict[str, dict[int, dict]]:
    """Train every run, several at once, each in a process of its own.

    Returns: {variant: {seed: what `run` returns}}.
    Raises: StudyFailed that names the runs that failed, when the others have come to their end.
    """
    os.environ["TQDM_DISABLE"] = "1"  # the processes' bars would draw over each other; each says a line per epoch
    results: dict[str, dict[int, dict]] = {}
    failed = []
    with ThreadPoolExecutor(processes) as pool:
        for one, future in [(one, pool.submit(in_a_process, one, threads)) for one in runs]:
            if error := future.exception():
                failed.append(f"{one.variant} seed {one.seed}: {error}")
            else:
                results.setdefault(one.variant, {})[one.seed] = future.result()
    if failed:
        raise StudyFailed(f"{len(failed)} of {len(runs)} runs failed; {'; '.join(failed)}")
    return results


def in_a_process(one: StudyRun, threads: int) -> dict:
    """A process of its own for each: one that is killed, for want of memory say, takes no other with it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(train_one, one, threads).result()


def train_one(one: StudyRun, threads: int) -> dict:
    """What `run` returns; its log lines say which run they are of."""
    torch.set_num_threads(threads)
    logging.basicConfig(level=logging.INFO, format=f"{one.variant.replace('%', '%%'):8s} seed {one.seed}: %(message)s", force=True)
    return run(one.config, prepare=task_parts(one.task)[1])
