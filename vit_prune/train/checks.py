"""Checks of what users type: each raises a ValueError that says what was wrong, what is valid and what was given."""

import ast
import difflib
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields
from types import UnionType
from typing import get_args, get_origin, get_type_hints

import torch
from timm.data import create_transform

from vit_prune.methods.budgetformer import parse_heads
from vit_prune.methods.schedules import Keep, parse_keep
from vit_prune.methods.tome import parse_r

MIXED = "mixed"  # each image has heads of its own, and a number of its own
FEW, SHORT_LIST = 5, 12  # names in one message
Values = dict[str, bool | int | float | str]
POSITIVE = (
    "batch_size", "epochs", "lr", "lr_base", "lr_base_size", "log_interval", "num_classes", "img_size", "clip_grad", "grad_accum_steps",
    "max_skipped_steps", "checkpoint_interval", "kd_temperature", "vocab_size", "max_length",
)  # fmt: skip
NOT_NEGATIVE = (
    "workers", "weight_decay", "momentum", "warmup_epochs", "warmup_lr", "min_lr", "mixup", "cutmix", "color_jitter", "seed", "aug_repeats",
    "keep_warmup_epochs", "distill_loss_weight", "task_loss_weight",
)  # fmt: skip
PROBABILITIES = ("hflip", "reprob", "model_ema_decay")  # 1 is fine
SHARES = ("drop", "pos_drop", "proj_drop", "attn_drop", "drop_path", "smoothing")  # 1 leaves nothing
FACTORS = ("layer_decay", "fraction")  # 0 leaves nothing
PAIRS = ("scale", "ratio")
NAMES = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple[float, float]: "two numbers",
    tuple[str, ...]: "a list of texts",
    tuple[int, ...]: "a list of whole numbers",
    Values: "a mapping of names to numbers, text, true or false",
}


def check_name(what: str, name: str, valid: Collection[str]) -> None:
    """Raises: ValueError for a name that is not valid, with the nearest valid ones, or all where there are few."""
    if name in valid:
        return
    near = difflib.get_close_matches(name, valid, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(valid)}" if len(valid) <= SHORT_LIST else ""
    raise ValueError(f"unknown {what} {name!r}{hint}")


def check_positive(name: str, value: object) -> None:
    """Raises: ValueError for anything but a whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")


def few(names: Iterable[str]) -> str:
    """The first names, and how many more."""
    names = list(names)
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return (", ".join(names[:FEW]) or "none") + more


def check_ranges(config) -> None:
    """Raises: ValueError that names the field, what is valid and what was given."""
    limits = (
        (POSITIVE, lambda value: 0 < value < math.inf, "> 0"),
        (NOT_NEGATIVE, lambda value: 0 <= value < math.inf, ">= 0"),
        (PROBABILITIES, lambda value: 0 <= value <= 1, "in [0, 1]"),
        (SHARES, lambda value: 0 <= value < 1, "in [0, 1)"),
        (FACTORS, lambda value: 0 < value <= 1, "in (0, 1]"),
        (PAIRS, lambda value: 0 < value[0] <= value[1] < math.inf, "two numbers > 0, the smaller one first"),
    )
    for names, is_valid, text in limits:
        for name in names:
            value = getattr(config, name, None)
            if value is not None and not is_valid(value):
                raise ValueError(f"{name} must be {text}, got {value}")


def keep_text(name: str, value: Keep | float | str | list | tuple | None) -> str | None:
    """A schedule in the grammar of `parse_keep`, as text. Raises: ValueError that names the field."""
    if value is None:
        return None
    try:
        return str(parse_keep(value))
    except ValueError as error:
        raise ValueError(str(error) if name == "keep" else f"{name}: {error}") from None


def merges_text(value: int | str | list | tuple | None) -> str | None:
    """r in the grammar of `parse_r`, as text. Raises: ValueError that names the field."""
    if value is None:
        return None
    try:
        r = parse_r(value)
    except ValueError as error:
        raise ValueError(f"tome_r: {error}") from None
    return ",".join(map(str, r)) if isinstance(r, tuple) else str(r)


def heads_text(value: int | str | list | tuple | None) -> str | None:
    """Heads that run, in the grammar of `parse_heads`, as text; or "mixed". Raises: ValueError."""
    if value is None or value == MIXED:
        return value
    k = parse_heads(value)
    return ",".join(map(str, k)) if isinstance(k, tuple) else str(k)


def check_device(device: str | None) -> None:
    """Raises: ValueError for what is no device, or is not there."""
    if device is None:
        return
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"device must be cpu, cuda or cuda:NUMBER, got {device!r}") from None
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu, cuda or cuda:NUMBER, got {device!r}")
    index = torch.device(device).index or 0
    if kind == "cuda" and torch.cuda.is_available() and index >= torch.cuda.device_count():
        raise ValueError(f"device is {device}, and there are {torch.cuda.device_count()} CUDA devices here, from cuda:0")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device}, and there is no CUDA device here; use --device cpu")


def check_augmentation(policy: str) -> None:
    """Raises: ValueError where timm cannot read the policy."""
    try:
        create_transform(224, is_training=True, auto_augment=policy)
    except (AssertionError, KeyError, ValueError) as error:
        raise ValueError(f"aa must be a policy of timm such as rand-m9-mstd0.5-inc1, got {policy!r} ({error})") from None


def conform_fields(config) -> None:
    """Check the type of every field; an int becomes a float and a list a tuple where that is what the field holds."""
    hints = get_type_hints(type(config))
    for item in fields(config):
        value = conform(item.name, getattr(config, item.name), hints[item.name])
        object.__setattr__(config, item.name, value)


def conform(name: str, value: object, hint: object) -> object:
    """The value in the type of the hint. Raises: ValueError that names the field and the type."""
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    for option in options:
        if is_of(value, option):
            return convert(value, option)
    wanted = " or ".join(NAMES[option] for option in options if option in NAMES)
    raise ValueError(f"{name} must be {wanted}, got {value!r}")


def convert(value: object, option: object) -> object:
    if option is float:
        return float(value)
    return tuple(convert(part, get_args(option)[0]) for part in value) if get_origin(option) is tuple else value


def is_of(value: object, option: object) -> bool:
    """bool is no number here, and an int is a float."""
    if get_origin(option) is tuple:
        kind, second = get_args(option)
        return isinstance(value, (list, tuple)) and (second is ... or len(value) == 2) and all(is_of(part, kind) for part in value)
    if get_origin(option) is dict:
        return isinstance(value, dict) and all(isinstance(key, str) and isinstance(part, (bool, int, float, str)) for key, part in value.items())
    if option in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if option is float else option)


def parse_pairs(words: Sequence[str]) -> Values:
    """name=value, with the value as Python reads it, or text. Raises: ValueError for a word without a name or a sign of equality."""
    pairs = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not name or not sign:
            raise ValueError(f"expected NAME=VALUE, got {word!r}")
        pairs[name] = literal(value)
    return pairs


def literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # a plain word
