"""Classes and their numbers, and a share of the texts that has as much of each."""

import logging

import numpy as np

from vit_prune.text.data.rows import Rows
from vit_prune.train.checks import few

log = logging.getLogger(__name__)


def classes_of(rows: Rows) -> list[str]:
    """The labels, sorted: as numbers where all are numbers, as text otherwise. Raises: ValueError for fewer than two."""
    names = set(rows.labels)
    if len(names) < 2:
        raise ValueError(f"{rows.source} has one class alone, {few(names)}: which column holds the labels?")
    numbers = all(name.removeprefix("-").isdecimal() for name in names)
    return sorted(names, key=lambda name: (int(name), name)) if numbers else sorted(names)


def numbered(rows: Rows, classes: list[str]) -> np.ndarray:
    """The class of each row, [n] int64. Raises: ValueError that names a label which is no class."""
    index = {name: number for number, name in enumerate(classes)}
    if unknown := sorted(set(rows.labels) - index.keys()):
        raise ValueError(f"{rows.source} has labels that the training texts have not: {few(unknown)}; they have {few(classes)}")
    return np.array([index[label] for label in rows.labels], dtype=np.int64)


def stratified(targets: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """The places of a share of the rows, rising; of each class the same share, at least one. A smaller share lies within a larger one of the same seed."""
    if fraction == 1:
        return np.arange(len(targets))
    chosen = []
    for number in np.unique(targets):
        places = np.flatnonzero(targets == number)
        order = np.random.default_rng((seed, int(number))).permutation(places)
        chosen.append(order[: max(1, round(fraction * len(places)))])
    return np.sort(np.concatenate(chosen))


def share_of(rows: Rows, targets: np.ndarray, fraction: float, seed: int) -> tuple[Rows, np.ndarray]:
    """The rows and classes of `stratified`."""
    places = stratified(targets, fraction, seed)
    return Rows(rows.source, [rows.parts[i] for i in places], [rows.labels[i] for i in places], rows.skipped), targets[places]
