"""From a TrainConfig to what trains: the model, its optimizer, the schedule of its learning rate, mixup and the loss."""

import logging
import warnings

import timm
import torch
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn
from torch.optim import Optimizer

from vit_prune import checkpoint
from vit_prune.patch import set_keep
from vit_prune.train.checks import check_name, few
from vit_prune.train.config import TrainConfig

log = logging.getLogger(__name__)


def build_model(name: str, **kwargs) -> nn.Module:
    """timm.create_model. Raises: ValueError for an unknown name, with the nearest ones, and for arguments that the model does not take."""
    if ":" not in name:  # hf-hub:OWNER/NAME and its like are not in the list
        check_name("model", name.split(".")[0], timm.list_models())
    try:
        return timm.create_model(name, **kwargs)
    except (TypeError, RuntimeError, AssertionError) as error:  # what timm raises for arguments and tags that do not fit
        given = ", ".join(f"{key}={value!r}" for key, value in kwargs.items())
        raise ValueError(f"{name} cannot be built with {given}: {error}") from error


def create_model(config: TrainConfig, num_classes: int) -> nn.Module:
    """The model of a recipe, with the weights that it starts from. Raises: ValueError, OSError."""
    kwargs = config.pruning_kwargs() | config.model_kwargs
    if config.eval_keep is not None:
        kwargs = {"keep": "1", **kwargs}  # a model without Columns says here that it takes no keep
    if config.img_size is not None:
        kwargs["img_size"] = config.img_size
    if config.drop:
        kwargs["drop_rate"] = config.drop
    if config.drop_path:
        kwargs["drop_path_rate"] = config.drop_path
    model = build_model(config.model, pretrained=config.pretrained, num_classes=num_classes, **kwargs)
    if getattr(getattr(model, "patch_embed", None), "num_patches", 1) < 1:
        raise ValueError(f"img_size {config.img_size} is smaller than one patch of {config.model}")
    if config.initial_checkpoint is not None:
        log.info(checkpoint.load_weights(model, config.initial_checkpoint, purpose="finetune"))
    if config.eval_keep is not None:
        apply_keep(model, config.eval_keep)  # a list of the wrong length is refused now
    return model


def check_saveable(model: nn.Module) -> None:
    """Raises: ValueError where `vp.save` would refuse the model, which is better known before the training than after an epoch of it."""
    checkpoint.describe(model, {}, model.state_dict())


def apply_keep(model: nn.Module, keep: str) -> None:
    """`vp.set_keep`, without its warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the token bias is all zero")  # at the start of training it is, and learns from there
        set_keep(model, keep)


def keeps(config: TrainConfig) -> tuple[str | None, str | None]:
    """The schedules to switch between for training and evaluation; None, None where there is one for both."""
    return (None, None) if config.eval_keep is None else (config.keep or "1", config.eval_keep)


def create_optimizer(config: TrainConfig, model: nn.Module) -> Optimizer:
    optimizer = create_optimizer_v2(model, opt=config.opt, lr=config.lr, weight_decay=config.weight_decay, momentum=config.momentum)
    check_optimizer(optimizer, model)
    return optimizer


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Raises: ValueError that names a parameter that trains and is not the optimizer's: it was built before `vp.patch` added it."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    lost = [name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in held]
    if lost:
        raise ValueError(f"the optimizer does not hold {few(lost)}, which train: build it after vp.patch")


def create_scheduler(config: TrainConfig, optimizer: Optimizer, updates_per_epoch: int) -> Scheduler:
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=config.sched,
        num_epochs=config.epochs,
        warmup_epochs=config.warmup_epochs,
        warmup_lr=config.warmup_lr,
        min_lr=config.min_lr,
        step_on_epochs=not config.sched_on_updates,
        updates_per_epoch=updates_per_epoch,
    )
    return scheduler


def create_mixup(config: TrainConfig, num_classes: int) -> Mixup | None:
    if not config.mixup and not config.cutmix:
        return None
    return Mixup(mixup_alpha=config.mixup, cutmix_alpha=config.cutmix, label_smoothing=config.smoothing, num_classes=num_classes)


def create_loss(config: TrainConfig) -> nn.Module:
    """The training loss: mixup smooths its targets itself."""
    if config.mixup or config.cutmix:
        return SoftTargetCrossEntropy()
    return LabelSmoothingCrossEntropy(config.smoothing) if config.smoothing else nn.CrossEntropyLoss()


def pick_device(name: str | None) -> torch.device:
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
