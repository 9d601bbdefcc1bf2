"""Evaluate a checkpoint: `python tools/evaluate.py --checkpoint output/train/RUN/best --data-dir DIR --eval-keep 1 0.5 linear:1.0:0.3`."""

from vit_prune.train.cli import main, parse_flags
from vit_prune.train.evaluate import EvaluateConfig, run_evaluation

MILLION = 1_000_000


def table(rows: list[dict]) -> str:
    """One line per schedule."""
    cells = [("keep", "top-1 %", "top-5 %", "loss", "MMACs per image")]
    for row in rows:
        macs = "unknown" if row["macs"] is None else f"{row['macs'] / MILLION:,.1f}"
        cells.append((row["keep"], f"{row['top1']:.2f}", f"{row['top5']:.2f}", f"{row['loss']:.4f}", macs))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join([f"{line[0]:{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))]) for line in cells)


def evaluate() -> None:
    print(table(run_evaluation(parse_flags(EvaluateConfig))))


if __name__ == "__main__":
    main(evaluate)
