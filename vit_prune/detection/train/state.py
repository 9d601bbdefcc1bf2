"""The folder of a detector's run: recipe.yaml, resume.pt, metrics.csv, last/. Each file is whole at any time."""

from pathlib import Path

from vit_prune.train import state as files

FORMAT = 1
METRICS, LAST = "metrics.csv", "last"


def read_state(folder: Path) -> dict | None:
    """What `write_state` left, on the CPU; None where there is nothing. Raises: ValueError for a broken file, or one of another version."""
    path = folder / files.RESUME
    state = files.read_state(path, "give another --output")
    if state is not None and state.get("format") != FORMAT:
        raise ValueError(f"{path} has format {state.get('format')!r}, this version reads {FORMAT}: finish the run with the version that began it")
    return state


def write_state(folder: Path, state: dict) -> None:
    """Raises: OSError for a full disk; the old file is whole then."""
    files.write_state(folder / files.RESUME, {"format": FORMAT, **state})


def write_rows(folder: Path, rows: list[dict]) -> None:
    files.write_atomically(folder / METRICS, files.as_csv(rows))
