"""The rows of an evaluation: what one model gives at one keep schedule, and the mean of several seeds."""

import logging
import math
import statistics
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import DataLoader

from vit_prune.measure.energy import ENERGY, ENERGY_UNITS, metered
from vit_prune.measure.macs import ModelMacs, macs
from vit_prune.methods.budgetformer import budget_decides
from vit_prune.methods.stack import prune_stacks
from vit_prune.patch import set_heads, set_keep
from vit_prune.train.evaluation.accuracy import evaluate
from vit_prune.train.evaluation.candidates import Candidate, describe
from vit_prune.train.evaluation.kept import KeptCounter

log = logging.getLogger(__name__)

ACCURACY = ("top1", "top5", "loss")
MACS = ("macs", "dense_macs", "saved", "macs_spread", "macs_all_projected")
COST = (*MACS, "columns", "columns_spread", "heads", *ENERGY)
PER_BLOCK = ("columns_per_block", "heads_per_block")
UNITS = {
    "top1": "percent",
    "top5": "percent",
    "loss": "nats per image",
    "macs": "multiply-accumulates per image",
    "dense_macs": "multiply-accumulates per image",
    "saved": "percent of dense_macs",
    "macs_spread": "standard deviation of macs over the images, as far as the heads that run make it, where heads are gated",
    "macs_all_projected": "macs if the heads that do not run were projected all the same, as BudgetFormer's paper counts",
    "heads": "heads that run, mean over blocks and images, where heads are gated",
    "heads_per_block": "heads that run, mean over the images",
    "columns": "kept columns, prefix tokens included, mean over blocks and images",
    "columns_spread": "standard deviation of columns over the images",
    "columns_per_block": "kept columns, mean over the images",
    "top1_std, top5_std, loss_std": "standard deviation over the seeds",
    "top1_difference": "percentage points to the first row",
    **ENERGY_UNITS,
}


def measure(
    path: str,
    model: nn.Module,
    keep: str | None,
    loader: DataLoader,
    device: torch.device,
    *,
    autocast_dtype: torch.dtype | None,
    country: str | None = None,
) -> dict:
    """One model at one schedule (None: the one that it has): ACCURACY, COST, "images", "columns_per_block", and what `describe` and `metered` say.

    Args: country: whose electricity it is; None: the energy is not metered.
    Raises: ValueError where the outputs are not finite, or no image could be read.
    """
    if keep is not None:
        set_keep(model, keep)
    model.to(device)
    with metered(country, device) as used, KeptCounter(model, loader, device) as counted:
        accuracy = evaluate(model, counted, device, autocast_dtype=autocast_dtype)
    model.to("cpu")
    settings = describe(model)
    settings["keep"] = keep or settings["keep"]
    if not accuracy["images"]:
        raise ValueError("none of the images could be read: there is nothing to evaluate on")
    check_loss(f"{path} at keep {settings['keep']}", accuracy["loss"])
    return {**settings, **accuracy, **used, **cost(model, counted.result(), by_mean=settings["rule"] in ("mass", "threshold"))}


def check_loss(source: str, loss: float) -> None:
    """Raises: ValueError for one that is not finite."""
    if not math.isfinite(loss):
        raise ValueError(f"the loss of {source} is {loss}: its weights give no finite outputs on this data")


def cost(model: nn.Module, kept: dict, *, by_mean: bool) -> dict:
    """MACs of one image beside the dense model's, None where there is no closed form, with the reason in the log; the kept columns and the heads that run.

    by_mean: M depends on the image: the MACs are those of the mean M of each block, rounded.
    """
    kept = dict(kept)
    heads, covariance = kept.pop("heads_per_block"), kept.pop("heads_covariance")
    columns = [round(count) for count in kept["columns_per_block"]] if by_mean else None
    running = {"heads": None, "heads_per_block": None} if heads is None else {"heads": mean(heads), "heads_per_block": heads}
    try:
        decided = heads is not None and budget_decides(model)
        counts = None if decided else macs(model, num_columns=columns)
        counted = gated_macs(model, heads, covariance, columns) if decided else figures(counts, gated=heads is not None)
    except (TypeError, ValueError, NotImplementedError) as error:
        log.warning("no MACs: %s", error)
        return dict.fromkeys(MACS) | kept | running
    if kept["columns"] is None:  # nothing is patched: each block sees every token
        per_block = [float(counts.num_tokens)] * len(counts.blocks)
        kept = {"columns": per_block[0], "columns_spread": 0.0, "columns_per_block": per_block}
    return counted | kept | running


def figures(counts: ModelMacs, *, gated: bool) -> dict:
    """gated: of a model whose heads are gated, the same number in each image."""
    of_gates = {"macs_spread": 0, "macs_all_projected": counts.total_all_projected} if gated else dict.fromkeys(("macs_spread", "macs_all_projected"))
    return {"macs": counts.total, "dense_macs": counts.dense, "saved": 100 * counts.saved, **of_gates}


def gated_macs(model: nn.Module, heads: Sequence[float], covariance: Sequence[Sequence[float]], columns: Sequence[int] | None) -> dict:
    """Mean and spread over the images of what is linear in the heads that run; heads: mean k per block, and its covariance between blocks."""
    price = torch.tensor(head_prices(model, num_columns=columns)[1], dtype=torch.float64)
    spread = price @ torch.tensor(covariance, dtype=torch.float64) @ price
    return figures(macs(model, num_columns=columns, num_heads=heads), gated=True) | {"macs_spread": round(max(0.0, spread.item()) ** 0.5)}


def head_prices(model: nn.Module, **sizes) -> tuple[ModelMacs, list[int], list[int]]:
    """The MACs with one head in each block; what one more head costs in each, and what it does where all heads are projected in any case.

    Args: sizes: as `macs` takes them.
    """
    gates = [gate for stack in prune_stacks(model) for gate in stack.gaters]
    before = [gate.heads for gate in gates]
    try:
        set_heads(model, 1)
        one = macs(model, **sizes)
        set_heads(model, [min(2, gate.num_heads) for gate in gates])
        two = macs(model, **sizes)
    finally:
        set_heads(model, before)
    pairs = list(zip(one.blocks, two.blocks, strict=True))
    return one, [b.total - a.total for a, b in pairs], [b.total_all_projected - a.total_all_projected for a, b in pairs]


def combine(
    candidate: Candidate,
    models: Sequence[nn.Module],
    measured: Sequence[dict],
    *,
    costs: Sequence[str] = COST,
    per_block: Sequence[str] = PER_BLOCK,
) -> dict:
    """One row of several seeds, or of one: means, and for ACCURACY the value of each seed and their standard deviation (n - 1; None of one).

    Args: costs: the numbers beside ACCURACY. per_block: the lists of numbers. What else is measured is the first seed's.
    """
    first = measured[0]
    row = {"checkpoint": candidate.name, "paths": list(candidate.paths), "dtype": dtype_of(models[0])}
    row |= {key: value for key, value in first.items() if key not in (*ACCURACY, *costs, *per_block)}
    row |= {key: mean([one[key] for one in measured]) for key in (*ACCURACY, *costs)}
    for key in per_block:
        blocks = [one[key] for one in measured]
        row[key] = None if None in blocks else [mean(block) for block in zip(*blocks, strict=True)]
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
