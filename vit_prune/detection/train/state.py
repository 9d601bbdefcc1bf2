"""The folder of a detector's run: recipe.yaml, resume.pt, metrics.csv, last/. Each file is whole at any time."""

from pathlib import Path

import torch

from vit_prune.train.state import RECIPE, RESUME, as_csv, lock, replacing, write_atomically

FORMAT = 1
METRICS, LOCK, LAST = "metrics.csv", ".lock", "last"


def read_state(folder: Path) -> dict | None:
    """What `write_state` left, on the CPU; None where there is nothing. Raises: ValueError for a broken file, or one of another version."""
    path = folder / RESUME
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a broken pickle may raise anything
        raise ValueError(f"{path} is not whole ({type(error).__name__}): give another --output, or remove it") from error
    if state.get("format") != FORMAT:
        raise ValueError(f"{path} has format {state.get('format')!r}, this version reads {FORMAT}: finish the run with the version that began it")
    return state


def write_state(folder: Path, state: dict) -> None:
    """Raises: OSError for a full disk; the old file is whole then."""
    with replacing(folder / RESUME) as path:
        try:
            torch.save({"format": FORMAT, **state}, path)
        except RuntimeError as error:  # what a full disk is to torch
            raise OSError(f"cannot write {folder / RESUME}: {error}") from error


def write_rows(folder: Path, rows: list[dict]) -> None:
    write_atomically(folder / METRICS, as_csv(rows))


__all__ = ["LAST", "LOCK", "METRICS", "RECIPE", "RESUME", "lock", "read_state", "write_rows", "write_state"]
