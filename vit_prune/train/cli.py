"""What the tools share: flags from a dataclass, and one sentence for a user's error."""

import logging
import sys
from collections.abc import Callable
from typing import TypeVar

import tyro

from vit_prune.patch.check import UnsupportedModel
from vit_prune.train.engine import TrainingDiverged
from vit_prune.train.study import StudyFailed

Config = TypeVar("Config")
USER_ERRORS = (ValueError, OSError, ImportError, TrainingDiverged, StudyFailed, UnsupportedModel)


def parse_flags(config_class: type[Config], *, default: Config | None = None, args: list[str] | None = None, description: str | None = None) -> Config:
    """Flags in kebab-case for the fields of a dataclass; those that are not given are `default`'s.

    tyro puts the ValueError of a dataclass into a frame and breaks its lines: the checks run after it, on the finished config.
    """
    unchecked = type(config_class.__name__, (config_class,), {"__post_init__": lambda self: None, "__doc__": config_class.__doc__})
    settings = {} if default is None else {"default": unchecked(**vars(default))}
    return config_class(**vars(tyro.cli(unchecked, args=args, description=description, **settings)))


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
