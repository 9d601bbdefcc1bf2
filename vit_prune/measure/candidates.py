"""The models that are compared: built from what a user names, and each with what it is compared with."""

import copy
import difflib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
from torch import nn

import vit_prune.models  # noqa: F401  registers ours with timm
from vit_prune.checkpoint import load, load_weights
from vit_prune.measure.gates import randomise_gates
from vit_prune.measure.inputs import image_size
from vit_prune.methods.base import BlockCalibration, MethodConfig
from vit_prune.methods.budgetformer import BudgetFormer, parse_heads
from vit_prune.methods.columns import Columns
from vit_prune.methods.stack import prune_stacks
from vit_prune.methods.token_bias import TokenBias, TokenBiasMethod
from vit_prune.methods.tome import ToMe
from vit_prune.patch import patch, set_heads, set_keep, unpatch
from vit_prune.patch.check import check_host
from vit_prune.train.checks import MIXED

ZERO_BIAS = "the token bias is all zero"  # no matter here: where the kept columns lie changes no time


@dataclass(frozen=True)
class Candidate:
    """A model by its label; `baseline` is the label of what it is compared with, None for a baseline itself and where there is none."""

    label: str
    model: nn.Module
    baseline: str | None


def build(
    name: str,
    *,
    methods: Mapping | None = None,
    checkpoint: str | None = None,
    num_classes: int | None = None,
    img_size: int | None = None,
    seed: int = 0,
) -> nn.Module:
    """A name of timm's registry or a folder of vp.save, in evaluation mode, with methods and at a size of its own.

    Args:
        methods: fields of TokenBias and Columns, tome_r of ToMe, and heads of BudgetFormer, for a plain model of timm, calibrated by random
            numbers; a model that comes pruned takes `keep`, and heads where it has gates.
        checkpoint: weights for a name; None is timm's random start.
        num_classes: outputs of the head, for a name. img_size: pixels per side. None is the model's own.

    Raises: ValueError for an unknown name (with the nearest ones), methods or a size that do not fit; OSError for files.
    """
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=ZERO_BIAS)
        model = load(name) if is_folder(name) else create(name, **({} if num_classes is None else {"num_classes": num_classes}))
        if checkpoint is not None:
            load_weights(model, checkpoint, purpose="evaluate")
        if img_size is not None:
            resize(name, model, img_size)
        if methods:
            add_methods(name, model, dict(methods))
    randomise_zero_biases(model)
    return model.eval()


def is_folder(name: str) -> bool:
    return Path(name).is_dir()


def create(name: str, **args) -> nn.Module:
    """A name of timm's registry; args are timm's. Raises: ValueError with the nearest names."""
    known = timm.list_models(include_tags="." in name)
    if name not in known:
        raise ValueError(f"unknown model {name!r}; nearest: {', '.join(difflib.get_close_matches(name, known, cutoff=0)) or 'none'}")
    return timm.create_model(name, **args)


def resize(name: str, model: nn.Module, img_size: int) -> None:
    """Give the model its size, where it has one. Raises: ValueError for pixels that cannot be cut into its patches."""
    embeds = getattr(model, "patch_embed", None)
    patch_size = getattr(embeds, "patch_size", None)
    if patch_size is not None and any(img_size % side for side in patch_size):
        raise ValueError(f"{img_size} pixels cannot be cut into the patches of {name}, {' x '.join(map(str, patch_size))}: choose a multiple")
    if hasattr(model, "set_input_size") and image_size(model) != (img_size, img_size):
        model.set_input_size(img_size=(img_size, img_size))


def add_methods(name: str, model: nn.Module, fields: dict) -> None:
    """TokenBias and Columns, ToMe, BudgetFormer, or all of them, for a plain model.

    Raises: ValueError for a pruned one that is given more than `keep` and heads; TypeError as `patch`.
    """
    if prune_stacks(model):
        if other := sorted(set(fields) - {"keep", "heads"}):
            raise ValueError(f"{name} is pruned already and takes keep and heads alone; give {', '.join(other)} with timm's own model")
        if "keep" in fields:
            set_keep(model, fields["keep"])
        if "heads" in fields:
            set_heads(model, heads_to_set(name, fields["heads"]))
        return
    check_host(model)
    merging = [ToMe(r=fields.pop("tome_r"))] if "tome_r" in fields else []
    heads = fields.pop("heads", None)
    gates = [] if heads is None else [BudgetFormer(heads=None if heads == MIXED else parse_heads(heads))]
    patch(model, [*columns_of(name, model, fields), *merging, *gates])
    if gates:
        randomise_gates(model, mixed=heads == MIXED)


def heads_to_set(name: str, heads: str) -> int | tuple[int, ...]:
    """Raises: ValueError for "mixed", which makes gates up, for a model that has its own."""
    if heads == MIXED:
        raise ValueError(f"{name} has gates of its own: leave heads out, and its budgets decide; mixed makes gates up for a plain model of timm")
    return parse_heads(heads)


def columns_of(name: str, model: nn.Module, fields: dict) -> list[MethodConfig]:
    """TokenBias and Columns where fields are given; the model gets the calibration that they read. Raises: ValueError for a rank that it does not have."""
    if not fields:
        return []
    rank = fields.get("merge_rank") or 0
    if not 0 <= rank <= model.embed_dim:
        raise ValueError(f"merge-rank must be in 1..{model.embed_dim}, the width of {name}, got {rank}")
    if rank or fields.get("importance") == "column_mean":
        shapes = [(block.attn.num_heads, block.attn.head_dim) for block in model.blocks]
        model.calibration = [BlockCalibration(torch.randn(shape), torch.randn(model.embed_dim, rank)) for shape in shapes]
    bias = TokenBias(query_key_free=fields.pop("query_key_free", 0))
    return [bias, Columns(**fields)]


def randomise_zero_biases(model: nn.Module) -> None:
    """A bias that was never trained is zero, and its ties keep the top of each image: random ones keep columns from everywhere, as trained ones do."""
    for module in model.modules():
        if isinstance(module, TokenBiasMethod) and not module.weight.is_meta and not torch.count_nonzero(module.weight):
            nn.init.normal_(module.weight)


def unpruned(model: nn.Module) -> nn.Module:
    """A copy without its methods: the same weights."""
    return unpatch(copy.deepcopy(model))


def own_name(model: nn.Module) -> str | None:
    """The architecture in timm's registry that a patched model was made from; None where it was cut, and is that no more."""
    return None if getattr(model, "prune_plan", None) else (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
