"""What detectors cost, dense beside pruned, the backbone beside the whole:

python tools/detect_cost.py --model deit_small_patch16_224 deit_s_bias --keep linear:1.0:0.0853 --latency --dtype float32 bfloat16 --output cost.json

Prints GFLOPs (2 x MACs) in the layout of the paper's Table 2, and with --latency the time of each in turn with the first one, one image at a time.
"""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

from vit_prune.detection.build import build_detector
from vit_prune.detection.config import DetectorConfig
from vit_prune.detection.cost import cost_rows, detector_macs
from vit_prune.detection.model import MaskRCNN
from vit_prune.detection.timing import time_cells, times
from vit_prune.measure.environment import environment
from vit_prune.measure.report import text_table
from vit_prune.methods.stack import columns_methods
from vit_prune.patch import set_keep
from vit_prune.train.build import pick_device
from vit_prune.train.checks import check_positive
from vit_prune.train.cli import main
from vit_prune.train.state import write_atomically

HEADERS = ("detector", "dtype", "backbone GFLOPs", "share", "detector GFLOPs", "share", "backbone ms", "speedup", "eff.", "detector ms", "speedup", "eff.")
CELLS = {
    "backbone_gflops": ".2f", "backbone_share": ".3f", "detector_gflops": ".2f", "detector_share": ".3f",
    "backbone_ms": ".0f", "backbone_speedup": ".3f", "backbone_efficiency": ".3f",
    "detector_ms": ".0f", "detector_speedup": ".3f", "detector_efficiency": ".3f",
}  # fmt: skip


@dataclass(frozen=True)
class Flags:
    model: tuple[str, ...] = ("deit_small_patch16_224", "deit_s_bias")  # names of timm's registry; the first is what the others are compared with
    keep: str = "linear:1.0:0.0853"  # columns kept by those of ours
    window: int | None = None  # tokens per side of windows (None: every block sees the whole image)
    global_blocks: tuple[int, ...] = ()  # blocks that see the whole image among windows
    image_size: int = 1024  # pixels per side
    num_classes: int = 80  # of the heads
    latency: bool = False  # measure time too
    dtype: tuple[Literal["float32", "bfloat16", "float16"], ...] = ("float32",)  # that are timed
    runs: int = 11  # rounds that are timed
    threads: int = 1  # of the CPU
    device: str | None = None  # e.g. cpu, cuda (None: cuda where there is one)
    output: Path | None = None  # a JSON of all figures


def build(flags: Flags, model: str) -> MaskRCNN:
    """With random weights; one that has columns keeps what is asked for."""
    same = {"window": flags.window, "global_blocks": flags.global_blocks, "image_size": flags.image_size, "num_classes": flags.num_classes}
    detector = build_detector(DetectorConfig(model=model, score_thresh=0.0, **same)).eval()
    if columns_methods(detector):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the token bias is all zero")  # which columns stay changes no cost
            set_keep(detector, flags.keep)
    return detector


def run() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    check_positive("threads", flags.threads)
    torch.set_num_threads(flags.threads)
    torch.manual_seed(0)
    device = torch.device(pick_device(flags.device))
    models = {name: build(flags, name) for name in flags.model}
    costs = {name: detector_macs(model, (flags.image_size,) * 2) for name, model in models.items()}
    rows = []
    for dtype in flags.dtype if flags.latency else ("",):
        settings = {"dtype": getattr(torch, dtype, None), "device": device, "runs": flags.runs}
        timed = times(models, flags.image_size, **settings) if flags.latency else None
        rows += [{"dtype": dtype} | row for row in cost_rows(costs, timed and {name: time_cells(timed, costs, name) for name in models})]
    lines = [(row["detector"], row["dtype"], *(format(row[cell], form) if cell in row else "" for cell, form in CELLS.items())) for row in rows]
    print(text_table(HEADERS, lines))
    if flags.output is not None:
        settings = {name: value for name, value in vars(flags).items() if name != "output"}
        found = {"rows": rows, "settings": settings, "environment": environment(device, threads=flags.threads, dtypes=flags.dtype)}
        flags.output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(flags.output, json.dumps(found, indent=1))


if __name__ == "__main__":
    main(run)
