"""Which columns are kept when: the schedules of training, of its warm-up and of evaluation."""

import warnings
from collections.abc import Sequence

from torch import nn

from vit_prune.methods.schedules import parse_keep
from vit_prune.methods.stack import columns_methods
from vit_prune.patch import set_keep
from vit_prune.train.run_config import RunConfig


def apply_keep(model: nn.Module, keep: str | Sequence[float]) -> None:
    """`vp.set_keep`, without its warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the token bias is all zero")  # at the start of training it is, and learns from there
        set_keep(model, keep)


def keep_for_training(model: nn.Module, config: RunConfig, epoch: int) -> None:
    """Set the ratios of one epoch, counted from 0: during the warm-up in equal steps from 1 to those of `keep`."""
    if not switches(config):
        return
    target = parse_keep(config.keep or "1").ratios(len(columns_methods(model)))
    share = min(1.0, epoch / config.keep_warmup_epochs) if config.keep_warmup_epochs else 1.0
    apply_keep(model, target if share == 1 else [1 - share * (1 - ratio) for ratio in target])


def keep_for_evaluation(model: nn.Module, config: RunConfig) -> None:
    if switches(config):
        apply_keep(model, config.eval_keep or config.keep)


def switches(config: RunConfig) -> bool:
    """Whether the ratios change at all after the model is built."""
    return config.eval_keep is not None or config.keep_warmup_epochs > 0
