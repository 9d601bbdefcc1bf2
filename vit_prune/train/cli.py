"""What the tools share: flags from a dataclass, and one sentence for a user's error."""

import argparse
import logging
import sys
from collections.abc import Callable
from typing import TypeVar

import tyro

from vit_prune.patch.check import UnsupportedModel
from vit_prune.train.engine import TrainingDiverged
from vit_prune.train.recipe import load_recipe
from vit_prune.train.resume import recipe_of
from vit_prune.train.run_config import AUTO
from vit_prune.train.study import StudyFailed, load_variant

Config = TypeVar("Config")
SOURCES = (
    "--config FILE reads a YAML recipe with these names; flags override it. --config STUDY --variant NAME reads a variant of a study. "
    "--resume FOLDER goes on with a run by its own recipe."
)
USER_ERRORS = (ValueError, OSError, ImportError, TrainingDiverged, StudyFailed, UnsupportedModel)


def parse_flags(config_class: type[Config], *, default: Config | None = None, args: list[str] | None = None, description: str | None = None) -> Config:
    """Flags in kebab-case for the fields of a dataclass; those that are not given are `default`'s.

    tyro puts the ValueError of a dataclass into a frame and breaks its lines: the checks run after it, on the finished config.
    """
    unchecked = type(config_class.__name__, (config_class,), {"__post_init__": lambda self: None, "__doc__": config_class.__doc__})
    settings = {} if default is None else {"default": unchecked(**vars(default))}
    return config_class(**vars(tyro.cli(unchecked, args=args, description=description, **settings)))


def parse_training(config_class: type[Config], argv: list[str], *, task: str, description: str) -> Config:
    """The config of a training, from its flags over a recipe, a variant of a study, or the recipe of the run that is resumed.

    Raises: ValueError for a wrong value, OSError for a recipe that is not there; an unknown flag ends the program.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    first.add_argument("--variant")
    files, rest = first.parse_known_args(argv)
    first.add_argument("--resume")
    resumed = first.parse_known_args(argv)[0].resume
    default = overridden(config_class, task, files.config, files.variant, resumed)
    return parse_flags(config_class, default=default, args=rest, description=f"{description} {SOURCES}")


def overridden(config_class: type[Config], task: str, config: str | None, variant: str | None, resumed: str | None) -> Config | None:
    """What the flags override; None is the defaults."""
    if variant is not None:
        if config is None:
            raise ValueError("--variant goes with --config STUDY, the file that names it")
        return load_variant(config, variant, task)
    if config is None and resumed not in (None, AUTO):
        return load_recipe(recipe_of(resumed), config_class)
    return None if config is None else load_recipe(config, config_class)


def main(function: Callable[[], None]) -> None:
    """Run a tool. A user's error ends it with one sentence on stderr and exit status 1."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # where a font is missing it names every substitute
    try:
        function()
    except KeyboardInterrupt:
        raise SystemExit("stopped; what was written stays") from None
    except USER_ERRORS as error:
        raise SystemExit(f"error: {' '.join(str(error).split())}") from error
