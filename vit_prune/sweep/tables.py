"""A sweep as text."""

from collections.abc import Mapping, Sequence

from vit_prune.measure.report import text_table

HEADERS = (
    "method", "px", "target", "M MACs", "MACs", "M params", "patch cosine", "prefix cosine",
    "top-1", "std", "top-5", "time", "ms", "peak MiB", "training", "note",
)  # fmt: skip


def sweep_table(rows: Sequence[Mapping]) -> str:
    """One line per point; time and MACs are shares of the unpruned model's. Columns that are empty throughout are left out."""
    lines = [
        (
            str(row["method"]),
            str(row["img_size"]),
            number(row["target_share"], "g"),
            millions(row["macs"], ",.1f"),
            number(row["macs_share"], ".3f"),
            millions(row["parameters"], ".3f"),
            number(row["patch_cosine"], ".5f"),
            number(row["prefix_cosine"], ".5f"),
            number(row["top1"], ".2f"),
            number(row["top1_std"], ".2f"),
            number(row["top5"], ".2f"),
            number(row["latency_share"], ".3f"),
            number(row["latency_ms"], ".1f"),
            number(row["peak_mib"], ".0f"),
            str(row["training"]),
            str(row["note"] or row["noise"] or ""),
        )
        for row in rows
    ]
    shown = [column for column in range(len(HEADERS)) if any(line[column] for line in lines)]
    return text_table([HEADERS[column] for column in shown], [[line[column] for column in shown] for line in lines])


def millions(value: object, form: str) -> str:
    return "" if value in (None, "") else number(float(value) / 1e6, form)


def number(value: object, form: str) -> str:
    return "" if value in (None, "") else format(float(value), form)
