"""Plain text tables of counts. MACs and FLOPs never share a column."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from vit_prune.measure.result import ModelMacs

GIGA = 1e9
MEGA = 1e6


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (headers, *rows)) for column in range(len(headers))]
    lines = [headers, ["-" * width for width in widths], *rows]
    return "\n".join("  ".join(_cell(text, width, column) for column, (text, width) in enumerate(zip(line, widths, strict=True))).rstrip() for line in lines)


def _cell(text: str, width: int, column: int) -> str:
    return text.rjust(width) if column else text.ljust(width)


def macs_table(results: Mapping[str, ModelMacs]) -> str:
    """One line per model: dense, pruned, saved, and the ceiling that no choice of columns gets beyond."""
    headers = ("model", "px", "tokens", "dense GMACs", "pruned GMACs", "pruned GFLOPs", "saved", "speedup", "ceiling saved", "ceiling speedup")
    rows = [
        (
            name,
            "x".join(map(str, result.img_size)),
            str(result.num_tokens),
            f"{result.dense / GIGA:.3f}",
            f"{result.total / GIGA:.3f}",
            f"{result.flops / GIGA:.3f}",
            f"{result.saved:.1%}",
            f"{result.speedup:.3f}x",
            f"{result.ceiling_saved:.1%}",
            f"{result.ceiling_speedup:.3f}x",
        )
        for name, result in results.items()
    ]
    return text_table(headers, rows)


def block_table(result: ModelMacs) -> str:
    """One line per block and per part outside the blocks. `overhead` is bias + selection; saved and ceiling are shares of the dense block.

    Where not all heads run, the last line says what the accounting of BudgetFormer's paper would give.
    """
    headers = ("part", "tokens", "columns", "heads", "MMACs", "MFLOPs", "share", "overhead MMACs", "saved", "ceiling saved")
    rows = [
        (
            block.name,
            str(block.num_tokens),
            str(block.num_columns),
            f"{block.num_heads:.4g}",
            *_cost(block.total, result.total),
            f"{block.overhead / MEGA:.1f}",
            f"{block.saved:.1%}",
            f"{block.ceiling_saved:.1%}",
        )
        for block in result.blocks
    ]
    outside = {"patch embedding": result.patch_embed, "attention pooling": result.pool, "head": result.head}
    rows += [(name, "", "", "", *_cost(macs, result.total), "", "", "") for name, macs in outside.items() if macs]
    overhead = sum(block.overhead for block in result.blocks)
    total = ("total", "", "", "", *_cost(result.total, result.total), f"{overhead / MEGA:.1f}", f"{result.saved:.1%}", f"{result.ceiling_saved:.1%}")
    table = text_table(headers, [*rows, total])
    whole = result.total_all_projected
    if whole == result.total:
        return table
    return f"{table}\nif the heads that do not run were projected all the same, as BudgetFormer's paper counts: {whole / MEGA:.1f} MMACs"


def _cost(macs: int, of: int) -> tuple[str, str, str]:
    return f"{macs / MEGA:.1f}", f"{2 * macs / MEGA:.1f}", f"{macs / of:.1%}"


def write_json(path: Path, data: Mapping) -> None:
    """Under another name first, then renamed: a reader never meets half a file."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(json.dumps(data, indent=2) + "\n")
    os.replace(unfinished, path)
