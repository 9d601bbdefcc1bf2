"""Small texts on the disk."""

import csv
import gzip
import json
from pathlib import Path

WORDS = {"animals": "cat dog horse cow sheep mouse", "plants": "oak rose moss fern tulip pine", "tools": "saw hammer nail file drill vice"}


def rows(per_class: int, start: int = 0) -> list[dict]:
    """{"text", "label"} of three classes, each with words of its own, in turn."""
    return [
        {"text": " ".join(words.split()[(start + number + step) % 6] for step in range(1 + number % 4)), "label": label}
        for number in range(per_class)
        for label, words in WORDS.items()
    ]


def write_text(path: Path, text: str) -> Path:
    """Gzipped where the path ends in .gz."""
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_jsonl(path: Path, values: list[dict]) -> Path:
    return write_text(path, "".join(json.dumps(value) + "\n" for value in values))


def write_csv(path: Path, lines: list[list]) -> Path:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(lines)
    return path
