"""What every reader gives: one or two texts and a label per row."""

from collections.abc import Collection
from dataclasses import dataclass, field

from vit_prune.train.checks import check_name

Parts = tuple[str, ...]  # the texts of one row: one, or the two of a pair


@dataclass
class Rows:
    """The rows of one split. skipped: how many were left out because they have the label of those that nobody labelled."""

    source: str  # the file or folder, for messages
    parts: list[Parts] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    skipped: int = 0

    def add(self, where: str, parts: Parts, label: object, skip_label: str | None) -> None:
        """Raises: ValueError that names the place for a text that is no text and a label that is no name or whole number."""
        for number, text in enumerate(parts, 1):
            if not isinstance(text, str):
                raise ValueError(f"{where}: text {number} is {text!r}, expected text")
        if isinstance(label, bool) or not isinstance(label, (str, int)) or not (name := str(label).strip()):
            raise ValueError(f"{where}: the label is {label!r}, expected a name or a whole number")
        if name == skip_label:
            self.skipped += 1
            return
        self.parts.append(parts)
        self.labels.append(name)


def check_columns(source: str, wanted: Collection[str], there: Collection[str]) -> None:
    """Raises: ValueError that names the file and the nearest columns for one that is not there."""
    for name in wanted:
        try:
            check_name("column", name, there)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
