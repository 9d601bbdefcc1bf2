"""The summaries of gates as text for people."""

from collections.abc import Sequence

from vit_prune.measure.report import text_table
from vit_prune.train.evaluation.tables import mmacs

MANY_CLASSES, SHOWN = 40, 10  # with more classes, those of largest and of smallest s are shown
NOT_KNOWN = "-"


def block_table(rows: Sequence[dict]) -> str:
    headers = ("block", "s", "heads that run", "entropy of p", "at most")
    lines = [
        (str(row["block"]), spread(row), f"{row['heads']:.2f} of {row['num_heads']}", f"{row['entropy']:.3f}", f"{row['max_entropy']:.3f}") for row in rows
    ]
    return text_table(headers, lines)


def class_table(rows: Sequence[dict]) -> str:
    """A line per class, a column per block; many classes are cut to those with most and least s."""
    classes: dict[str, list[dict]] = {}
    for row in rows:
        classes.setdefault(row["class"], []).append(row)
    note = ""
    if len(classes) > MANY_CLASSES:
        order = sorted(classes, key=lambda name: -sum(row["budget"] for row in classes[name]))
        note = f"\nthe {SHOWN} classes of largest and of smallest mean s, out of {len(classes)}"
        classes = {name: classes[name] for name in (*order[:SHOWN], *order[-SHOWN:])}
    headers = ("s by class", "inputs", *(f"block {row['block']}" for row in next(iter(classes.values()))))
    return text_table(headers, [(name, str(blocks[0]["inputs"]), *map(spread, blocks)) for name, blocks in classes.items()]) + note


def difficulty_table(rows: Sequence[dict]) -> str:
    headers = ("group", "inputs", "loss", "accuracy %", "s", "heads that run")
    return text_table(headers, [(row["group"], str(row["inputs"]), *figures(row)) for row in rows])


def overall_table(row: dict) -> str:
    headers = ("inputs", "loss", "accuracy %", "s", "heads that run", "MMACs per input", "spread of MMACs")
    macs = mmacs(row), NOT_KNOWN if row["macs_spread"] is None else mmacs({"macs": row["macs_spread"]})
    return text_table(headers, [(str(row["inputs"]), *figures(row), *macs)])


def epoch_table(rows: Sequence[dict]) -> str:
    headers = ("epoch", "top-1 %", "s", "heads that run", "entropy of p")
    lines = [(str(row["epoch"]), f"{row['accuracy']:.2f}", f"{row['budget']:.3f}", f"{row['heads']:.2f}", f"{row['entropy']:.3f}") for row in rows]
    return text_table(headers, lines)


def figures(row: dict) -> tuple[str, str, str, str]:
    """Loss, accuracy, s and k of a group."""
    if not row["inputs"]:
        return (NOT_KNOWN,) * 4
    return f"{row['loss']:.4f}", f"{row['accuracy']:.2f}", spread(row), f"{row['heads']:.2f}"


def spread(row: dict) -> str:
    return f"{row['budget']:.3f} ± {row['budget_std']:.3f}"
