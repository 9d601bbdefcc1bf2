"""MACs of timm ViTs, dense and pruned: `python tools/flops.py --model deit_small_patch16_224 --keep 0.5 --per-block`.

Closed form, checked with PyTorch's counter and, for the dense model, with fvcore. No weights are loaded; FLOPs are 2 x MACs.
"""

import importlib.util
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import nn

from vit_prune.measure.candidates import ZERO_BIAS, add_methods, create
from vit_prune.measure.counter import CountMismatch, cross_check
from vit_prune.measure.macs import macs
from vit_prune.measure.report import block_table, macs_table, write_json


@dataclass(frozen=True)
class Flags:
    model: tuple[str, ...]  # timm names, ours among them
    img_size: tuple[int, ...] | None = None  # one side, or height and width, in pixels; the model's own if left out
    keep: str | None = None  # 0.5, linear:1.0:0.3, cosine:..., step:1.0:0.5:6, or one ratio per block: 1,1,.9
    dropped: Literal["drop", "merge"] | None = None  # what becomes of the other columns
    importance: Literal["logit", "prob", "column_mean", "class_attention", "value_norm", "grid", "random"] | None = None
    sampling: Literal["topk", "gumbel", "systematic"] | None = None
    merge_rank: int | None = None  # directions in which merge compares; all of x if left out
    query_key_free: int | None = None  # that many last blocks attend by the bias alone
    tome_r: str | None = None  # tokens merged per block (ToMe): 8, decreasing:8, or one number per block
    heads: str | None = None  # heads that run (BudgetFormer): 2, or one number per block: 6,4,2,...
    per_block: bool = False
    fvcore: bool = True  # check the dense count with fvcore too: one forward on the CPU
    json: Path | None = None

    def methods(self) -> dict:
        names = ("keep", "dropped", "importance", "merge_rank", "query_key_free", "sampling", "tome_r", "heads")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def size(self) -> int | tuple[int, ...] | None:
        if self.img_size is not None and len(self.img_size) not in (1, 2):
            raise ValueError(f"img-size takes one side, or height and width, got {len(self.img_size)} numbers")
        return self.img_size[0] if self.img_size and len(self.img_size) == 1 else self.img_size


def build(name: str, flags: Flags) -> nn.Module:
    """On `meta`: only shapes count."""
    with torch.device("meta"):
        model = create(name, **({} if flags.img_size is None else {"img_size": flags.size()}))
    if flags.methods():
        add_methods(name, model, flags.methods())
    return model


def run(flags: Flags) -> None:
    results, counted = {}, {}
    fvcore = flags.fvcore and importlib.util.find_spec("fvcore") is not None
    if flags.fvcore and not fvcore:
        print("check: fvcore is not installed; PyTorch's counter checks alone")
    for name in flags.model:
        model = build(name, flags)
        results[name] = macs(model, flags.size())
        counted[name] = cross_check(model, results[name], name=name, fvcore=fvcore)
        print(f"check: {name}: counted as in closed form: " + "; ".join(f"{found:,} MACs {what}" for what, found in counted[name].items()))
        if flags.per_block:
            print(f"\n{name}\n{block_table(results[name])}\n")
    print(macs_table(results))
    if flags.json is not None:
        write_json(flags.json, {name: result.to_dict() | {"counted": counted[name]} for name, result in results.items()})


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=ZERO_BIAS)  # the weights do not matter here
    try:
        run(tyro.cli(Flags, description=__doc__))
    except (ValueError, TypeError, NotImplementedError, OSError, CountMismatch) as error:
        raise SystemExit(f"flops: {error}") from error
