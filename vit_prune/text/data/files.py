"""CSV and JSON lines, plain or gzipped, line by line, so that an error names its line."""

import csv
import gzip
import json
import logging
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from vit_prune.text.data.rows import Rows, check_columns

log = logging.getLogger(__name__)

KINDS = (".csv", ".jsonl")


def read_file(path: str | Path, text_columns: tuple[str, ...], label_column: str, *, skip_label: str | None = None) -> Rows:
    """The rows of FILE.csv or FILE.jsonl, with .gz or without.

    Args:
        text_columns: one or two names, of the header or of the JSON keys; numbers, from 1, for a CSV without a header, as label_column then.
        skip_label: rows with this label are left out and counted.

    Raises: OSError; ValueError that names the file, and the line or the column, for what cannot be read.
    """
    path = Path(path)
    kind = kind_of(path)
    with opened(path) as file:
        rows = read_csv(file, path, text_columns, label_column, skip_label) if kind == ".csv" else read_json(file, path, text_columns, label_column, skip_label)
    if not rows.labels:
        raise ValueError(f"{path} holds no rows with labels")
    return rows


def kind_of(path: str | Path) -> str:
    """Raises: ValueError for another ending than those of KINDS."""
    path = Path(path)
    kind = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if kind not in KINDS:
        raise ValueError(f"{path} must end in {' or '.join(KINDS)}, with .gz or without")
    return kind


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """Raises: ValueError with the file's name for one that is not whole or no text in UTF-8."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is no whole gzip file: {error}") from None


def read_csv(file: TextIO, path: Path, text_columns: tuple[str, ...], label_column: str, skip_label: str | None) -> Rows:
    wanted, rows, expected = (*text_columns, label_column), Rows(str(path)), None
    reader = csv.reader(file, strict=True)
    by_number = all(name.isdecimal() for name in wanted)
    csv.field_size_limit(sys.maxsize)  # a long document is cut, not refused
    try:
        for cells in filter(None, reader):
            if expected is None:
                expected = len(cells)
                names = list(map(str, range(1, expected + 1))) if by_number else cells
                check_columns(str(path), wanted, names)
                places = list(map(names.index, wanted))
                if not by_number:
                    continue
            if len(cells) != expected:
                raise ValueError(f"{path} line {reader.line_num}: {len(cells)} columns, the first line has {expected}")
            *parts, label = (cells[place] for place in places)
            rows.add(f"{path} line {reader.line_num}", tuple(parts), label, skip_label)
    except csv.Error as error:
        raise ValueError(f"{path} line {reader.line_num}: {error}") from None
    if by_number and len(rows.labels) > 2 and rows.labels[0] not in rows.labels[1:] and not rows.labels[0].removeprefix("-").isdecimal():
        log.warning(f"{path}: is its first line a header? No other has the label {rows.labels[0]!r}. Name the columns by it then, not by number")
    return rows


def read_json(file: TextIO, path: Path, text_columns: tuple[str, ...], label_column: str, skip_label: str | None) -> Rows:
    rows = Rows(str(path))
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{where}: expected one object per line, got {type(values).__name__}")
        check_columns(where, (*text_columns, label_column), values)
        rows.add(where, tuple(values[name] for name in text_columns), values[label_column], skip_label)
    return rows
