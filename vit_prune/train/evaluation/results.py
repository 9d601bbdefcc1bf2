"""The rows of an evaluation: what one model gives at one keep schedule, and the mean of several seeds."""

import logging
import math
import statistics
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import DataLoader

from vit_prune.measure.macs import macs
from vit_prune.patch import set_keep
from vit_prune.train.evaluation.accuracy import evaluate
from vit_prune.train.evaluation.candidates import Candidate, describe
from vit_prune.train.evaluation.kept import KeptCounter

log = logging.getLogger(__name__)

ACCURACY = ("top1", "top5", "loss")
COST = ("macs", "dense_macs", "saved", "columns", "columns_spread")
UNITS = {
    "top1": "percent",
    "top5": "percent",
    "loss": "nats per image",
    "macs": "multiply-accumulates per image",
    "dense_macs": "multiply-accumulates per image",
    "saved": "percent of dense_macs",
    "columns": "kept columns, prefix tokens included, mean over blocks and images",
    "columns_spread": "standard deviation of columns over the images",
    "columns_per_block": "kept columns, mean over the images",
    "top1_std, top5_std, loss_std": "standard deviation over the seeds",
    "top1_difference": "percentage points to the first row",
}


def measure(path: str, model: nn.Module, keep: str | None, loader: DataLoader, device: torch.device, *, autocast_dtype: torch.dtype | None) -> dict:
    """One model at one schedule (None: the one that it has): ACCURACY, COST, "images", "columns_per_block", and what `describe` says.

    Raises: ValueError where the outputs are not finite, or no image could be read.
    """
    if keep is not None:
        set_keep(model, keep)
    model.to(device)
    with KeptCounter(model, loader, device) as counted:
        accuracy = evaluate(model, counted, device, autocast_dtype=autocast_dtype)
    model.to("cpu")
    settings = describe(model)
    settings["keep"] = keep or settings["keep"]
    if not accuracy["images"]:
        raise ValueError("none of the images could be read: there is nothing to evaluate on")
    if not math.isfinite(accuracy["loss"]):
        raise ValueError(f"the loss of {path} at keep {settings['keep']} is {accuracy['loss']}: its weights give no finite outputs on this data")
    return {**settings, **accuracy, **cost(model, counted.result(), by_mean=settings["rule"] in ("mass", "threshold"))}


def cost(model: nn.Module, kept: dict, *, by_mean: bool) -> dict:
    """MACs of one image beside the dense model's, None where there is no closed form, with the reason in the log; and the kept columns.

    by_mean: M depends on the image: the MACs are those of the mean M of each block, rounded.
    """
    try:
        counts = macs(model, num_columns=[round(columns) for columns in kept["columns_per_block"]] if by_mean else None)
    except (TypeError, ValueError, NotImplementedError) as error:
        log.warning("no MACs: %s", error)
        return dict.fromkeys(("macs", "dense_macs", "saved")) | kept
    if kept["columns"] is None:  # nothing is patched: each block sees every token
        per_block = [float(counts.num_tokens)] * len(counts.blocks)
        kept = {"columns": per_block[0], "columns_spread": 0.0, "columns_per_block": per_block}
    return {"macs": counts.total, "dense_macs": counts.dense, "saved": 100 * counts.saved, **kept}


def combine(candidate: Candidate, models: Sequence[nn.Module], measured: Sequence[dict]) -> dict:
    """One row of several seeds, or of one: means, and for ACCURACY the value of each seed and their standard deviation (n - 1; None of one)."""
    first = measured[0]
    row = {"checkpoint": candidate.name, "paths": list(candidate.paths), "dtype": dtype_of(models[0])}
    row |= {key: value for key, value in first.items() if key not in (*ACCURACY, *COST, "columns_per_block")}
    row |= {key: mean([one[key] for one in measured]) for key in (*ACCURACY, *COST)}
    blocks = [one["columns_per_block"] for one in measured]
    row["columns_per_block"] = None if None in blocks else [mean(block) for block in zip(*blocks, strict=True)]
    for key in ACCURACY:
        values = [one[key] for one in measured]
        row |= {f"{key}_seeds": values, f"{key}_std": statistics.stdev(values) if len(values) > 1 else None}
    return row


def mean(values: Sequence[float | None]) -> float | None:
    """None where one is not known; equal values stay what they are."""
    if None in values:
        return None
    return values[0] if len(set(values)) == 1 else statistics.fmean(values)


def dtype_of(model: nn.Module) -> str:
    return str(next(model.parameters()).dtype).removeprefix("torch.")
