"""Turn the dials of a method until the model costs a share of what it cost."""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from vit_prune.calibrate import calibrate
from vit_prune.measure.macs import macs
from vit_prune.methods.l1 import CHANNEL_GROUP, HEAD_GROUP
from vit_prune.methods.units import num_channels
from vit_prune.patch import patch
from vit_prune.prune import prune
from vit_prune.sweep.config import AUTO, DIALS, Entry, configured, is_method

BISECTIONS = 14
LEAST_KEEP = 0.02  # of the patches' columns
MOST_MERGED = 0.98  # of the patches, over all blocks
MOST_CUT = 0.9  # of the heads and channels


class OutOfReach(ValueError):
    """At full strength the method still costs more than the share."""


def turned(entry: Entry, strength: float, model: nn.Module, num_patches: int) -> dict[str, object]:
    """The dials of an entry at a strength from 0 to 1, times its weight."""
    strength = min(1.0, strength * float(entry.get("weight", 1.0)))
    values = {
        "keep": round(1 - strength * (1 - LEAST_KEEP), 4),
        "r": round(strength * MOST_MERGED * num_patches / len(model.blocks)),
        "heads": whole_share(strength * MOST_CUT, model.blocks[0].attn.num_heads, HEAD_GROUP),
        "mlp": whole_share(strength * MOST_CUT, num_channels(model.blocks[0].mlp), CHANNEL_GROUP),
    }
    return {dial: values[dial] for dial in DIALS.get(str(entry["name"]), ()) if entry.get(dial) == AUTO}


def whole_share(share: float, units: int, group: int) -> float:
    """The share rounded down to whole groups: `vp.prune` refuses one that removes none."""
    return int(share * units / group) * group / units if units else 0.0


def pruned(model: nn.Module, entries: Sequence[Entry], dials: Sequence[Mapping[str, object]], loader: Sequence | None = None) -> nn.Module:
    """A copy with the methods at these dials; what is cut goes first. The loader calibrates what was cut.

    Where both dials of a cut are at 0 nothing is cut.
    """
    changed = copy.deepcopy(model)
    configs = [configured(entry, given) for entry, given in zip(entries, dials, strict=True) if does_something(entry, given)]
    cuts = [config for config in configs if not is_method(config)]
    for config in cuts:
        if getattr(changed, "calibration", None):
            del changed.calibration
        prune(changed, config)
    methods = [config for config in configs if is_method(config)]
    if cuts and methods and loader is not None:
        calibrate(changed, loader)
    return patch(changed, methods) if methods else changed


def does_something(entry: Entry, given: Mapping[str, object]) -> bool:
    """False of a cut with both dials at 0, which is no config."""
    values = {**entry, **given}
    return entry["name"] != "l1" or bool(values.get("heads") or values.get("mlp"))


def share_at(model: nn.Module, entries: Sequence[Entry], strength: float, img_size: tuple[int, int], whole: int) -> float:
    """Of the unpruned model's MACs."""
    num_patches = macs(model, img_size).num_tokens - model.num_prefix_tokens
    dials = [turned(entry, strength, model, num_patches) for entry in entries]
    blank = torch.zeros(1, getattr(model, "in_chans", 3), *img_size)  # what a calibration holds changes no MACs
    return macs(pruned(model, entries, dials, [blank]), img_size).total / whole


def strength_for(model: nn.Module, entries: Sequence[Entry], share: float, img_size: tuple[int, int]) -> list[dict[str, object]]:
    """The dials of each entry, as weak as they can be with the MACs at or below the share. Raises: OutOfReach."""
    whole = macs(model, img_size).total
    num_patches = macs(model, img_size).num_tokens - model.num_prefix_tokens
    weak, strong = 0.0, 1.0
    reached = share_at(model, entries, strong, img_size, whole)
    if reached > share:
        raise OutOfReach(f"at full strength it comes to {reached:.3f} of the MACs")
    for _ in range(BISECTIONS):
        middle = (weak + strong) / 2
        over = share_at(model, entries, middle, img_size, whole) > share
        weak, strong = (middle, strong) if over else (weak, middle)
    return [turned(entry, strong, model, num_patches) for entry in entries]
