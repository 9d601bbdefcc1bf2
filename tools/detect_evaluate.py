"""Average precision of a detector: `python tools/detect_evaluate.py --checkpoint output/detect/last --data-dir COCO`.

Prints a table, and writes one JSON with --output; --results keeps what was found in COCO's result format.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

from vit_prune.detection.checkpoint import load_detector, load_weights
from vit_prune.detection.data.coco import CocoImages
from vit_prune.detection.evaluate import detect
from vit_prune.detection.metrics import coco_metrics, metrics_table
from vit_prune.detection.train.config import LAYOUT
from vit_prune.train.build import pick_device
from vit_prune.train.cli import main
from vit_prune.train.distributed import is_primary, process_group
from vit_prune.train.state import write_atomically


@dataclass(frozen=True)
class Flags:
    checkpoint: Path  # a folder of tools/detect_train.py
    data_dir: Path | None = None  # COCO's layout: annotations/instances_val2017.json, val2017/
    annotations: Path | None = None  # a file instead of the layout's
    images: Path | None = None  # its folder of images
    weights: Path | None = None  # other weights for the same detector, e.g. detectron2's model_final.pth
    batch_size: int = 1  # changes no figure where images are padded to a square
    workers: int = 2  # processes that load images
    amp: Literal["bfloat16", "float16"] | None = None  # compute in it where that is safe (None: float32)
    device: str | None = None  # e.g. cpu, cuda (None: cuda where there is one)
    output: Path | None = None  # a JSON of all figures
    results: Path | None = None  # a JSON of all detections, in COCO's result format


def place(flags: Flags, what: str) -> Path:
    """Raises: ValueError where neither data_dir nor the place itself is given."""
    given = getattr(flags, what)
    if given is None and flags.data_dir is None:
        raise ValueError("give --data-dir, a folder in COCO's layout, or --annotations and --images")
    return given if given is not None else flags.data_dir / LAYOUT[what].format(split="val")


def evaluate() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    model, config, categories = load_detector(flags.checkpoint)
    if flags.weights is not None:
        load_weights(model, flags.weights)
    data = CocoImages(place(flags, "annotations"), place(flags, "images"))
    if data.categories != categories:
        raise ValueError(f"{data.path} has other categories than the detector in {flags.checkpoint}")
    with process_group(str(pick_device(flags.device))) as device:
        settings = {"batch_size": flags.batch_size, "workers": flags.workers, "autocast_dtype": flags.amp and getattr(torch, flags.amp)}
        results = detect(model.to(device), data, config.image_size, device, **settings)
        if is_primary():
            report(flags, coco_metrics(data, results), results)


def report(flags: Flags, metrics: dict, results: list[dict]) -> None:
    print(metrics_table(metrics))
    for path, content in ((flags.output, metrics), (flags.results, results)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(content))
            print(f"written: {path}")


if __name__ == "__main__":
    main(evaluate)
