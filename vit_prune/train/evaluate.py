"""Evaluate a checkpoint at one or several keep schedules."""

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from vit_prune import checkpoint
from vit_prune.measure.macs import macs
from vit_prune.patch import set_keep
from vit_prune.train import build
from vit_prune.train.checks import check_device, check_name, check_ranges, conform_fields, keep_text
from vit_prune.train.config import DATASETS
from vit_prune.train.data import create_dataset
from vit_prune.train.engine import evaluate
from vit_prune.train.loaders import data_config, eval_loader
from vit_prune.train.state import write_atomically

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluate a checkpoint, at one keep schedule or several.

    Args:
        checkpoint: folder of vp.save (best/ or last/ of a run), or any file of weights together with --model
        model: name in timm's registry, where the checkpoint does not say it
        img_size: pixels per side, together with --model (None: the model's own)
        eval_keep: schedules to evaluate, e.g. 1 0.5 linear:1.0:0.3 (none: the one that the model has)
        dataset: folder, fashion-mnist or digits
        data_dir: where folder and fashion-mnist lie
        batch_size: images per step
        workers: processes that load images; 0 loads in this one
        device: e.g. cpu, cuda, cuda:1 (None: cuda where there is one)
        json: write the results to this file too
    """

    checkpoint: str
    model: str | None = None
    img_size: int | None = None
    eval_keep: tuple[str, ...] = ()
    dataset: str = "folder"
    data_dir: str | None = None
    batch_size: int = 256
    workers: int = 4
    device: str | None = None
    json: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "eval_keep", tuple(keep_text("eval_keep", keep) for keep in self.eval_keep))
        conform_fields(self)
        check_ranges(self)
        check_name("dataset", self.dataset, DATASETS)
        check_device(self.device)
        if self.json is not None and not Path(self.json).parent.is_dir():
            raise FileNotFoundError(f"no folder {Path(self.json).parent} to write {self.json} in")
        path = Path(self.checkpoint)
        if not path.exists():
            raise FileNotFoundError(f"no checkpoint {path}")
        if self.model is None and self.img_size is not None:
            raise ValueError("img_size goes with --model: a folder of vp.save says itself what size its model has")
        if self.model is None and path.is_file() and path.suffix != ".safetensors":
            raise ValueError(f"{path} is a file of weights: say what model it is for with --model")


def run_evaluation(config: EvaluateConfig) -> list[dict]:
    """One row per schedule: {"keep", "loss", "top1" and "top5" in percent, "macs" per image or None}.

    Raises: ValueError or OSError before the first batch for what can be known then.
    """
    dataset = create_dataset(config.dataset, config.data_dir, "val")
    model = load_model(config, len(dataset.classes))
    if model.num_classes != len(dataset.classes):
        raise ValueError(f"the checkpoint has {model.num_classes} classes, the data has {len(dataset.classes)}")
    for keep in config.eval_keep:
        set_keep(model, keep)  # refuses a schedule that does not fit before the first is evaluated
    device = build.pick_device(config.device)
    loader = eval_loader(dataset, batch_size=config.batch_size, workers=config.workers, data=data_config(model), device=device)
    rows = [evaluate_at(model.to(device), keep, loader, device) for keep in config.eval_keep or (None,)]
    if config.json is not None:
        write_atomically(config.json, json.dumps(report(config, dataset, next(model.parameters()), rows), indent=2) + "\n")
    return rows


def load_model(config: EvaluateConfig, num_classes: int) -> nn.Module:
    """Raises: ValueError or OSError for a checkpoint that is broken, or of another model."""
    if config.model is None:
        return checkpoint.load(config.checkpoint)
    kwargs = {"keep": "1"} if config.eval_keep else {}
    if config.img_size is not None:
        kwargs["img_size"] = config.img_size
    model = build.build_model(config.model, num_classes=num_classes, **kwargs)
    log.info(checkpoint.load_weights(model, config.checkpoint, purpose="evaluate"))
    return model


def evaluate_at(model: nn.Module, keep: str | None, loader: DataLoader, device: torch.device) -> dict:
    if keep is not None:
        set_keep(model, keep)
    result = evaluate(model, loader, device)
    if not math.isfinite(result["loss"]):
        raise ValueError(f"the loss at keep {keep or 'as saved'} is {result['loss']}: the checkpoint's weights give no finite outputs on this data")
    return {"keep": keep or "as saved", **result, "macs": macs_or_none(model)}


def macs_or_none(model: nn.Module) -> int | None:
    """MACs per image; None, with the reason in the log, where there is no closed form."""
    try:
        return macs(model).total
    except (TypeError, ValueError, NotImplementedError) as error:
        log.warning("no MACs: %s", error)
        return None


def report(config: EvaluateConfig, dataset: Dataset, parameter: Tensor, rows: list[dict]) -> dict:
    """The results with what they depend on."""
    return {
        "checkpoint": config.checkpoint,
        "model": config.model,
        "dataset": config.dataset,
        "images": len(dataset),
        "device": str(parameter.device),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "batch_size": config.batch_size,
        "units": {"top1": "percent", "top5": "percent", "loss": "nats per image", "macs": "multiply-accumulates per image"},
        "results": rows,
    }
