"""From a TrainConfig to what trains: the model and its wrappers, its optimizer, the schedule of its learning rate, and mixup."""

import inspect
import logging
import warnings
from pathlib import Path

import timm
import torch
from timm.data import Mixup
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from vit_prune import checkpoint
from vit_prune.methods.stack import prune_stacks
from vit_prune.methods.tome import ToMe
from vit_prune.patch import patch, unpatch
from vit_prune.train.checks import check_name, few
from vit_prune.train.config import TrainConfig
from vit_prune.train.distributed import world_size
from vit_prune.train.keeping import apply_keep
from vit_prune.train.run_config import RunConfig
from vit_prune.train.update import Update

log = logging.getLogger(__name__)

NEW_NAME, OLD_NAME = "forward_sync_buffers", "broadcast_buffers"  # of one argument of DDP, in newer and older versions of torch
SYNC_BUFFERS = NEW_NAME if NEW_NAME in inspect.signature(DistributedDataParallel).parameters else OLD_NAME

OF_A_NEW_MODEL = (
    "pretrained", "initial_checkpoint", "img_size", "drop", "pos_drop", "proj_drop", "attn_drop", "drop_path", "model_kwargs",
    "rule", "tau", "importance", "dropped", "sampling", "per_head", "query_key_free", "tome_r",
)  # fmt: skip


def build_model(name: str, **kwargs) -> nn.Module:
    """timm.create_model. Raises: ValueError for an unknown name, with the nearest ones, and for arguments that the model does not take;
    FileNotFoundError for a path."""
    if ":" not in name:  # hf-hub:OWNER/NAME and its like are not in the list
        if "/" in name:
            raise FileNotFoundError(f"no folder of vp.save {name}")
        check_name("model", name.split(".")[0], timm.list_models())
    try:
        return timm.create_model(name, **kwargs)
    except (TypeError, RuntimeError, AssertionError) as error:  # what timm raises for arguments and tags that do not fit
        given = ", ".join(f"{key}={value!r}" for key, value in kwargs.items())
        raise ValueError(f"{name} cannot be built with {given}: {error}") from error


def create_model(config: TrainConfig, num_classes: int, arguments: dict | None = None) -> nn.Module:
    """The model of a recipe, with the weights that it starts from. arguments: others of a new model. Raises: ValueError, OSError."""
    model = saved_model(config, num_classes) if Path(config.model).is_dir() else named_model(config, num_classes, arguments or {})
    if config.eval_keep is not None:
        apply_keep(model, config.eval_keep)  # a list of the wrong length is refused now
    if config.train_only:
        freeze(model, config)
    if config.grad_checkpointing:
        model.set_grad_checkpointing(True)
    return model


def saved_model(config: TrainConfig, num_classes: int) -> nn.Module:
    """What vp.save wrote into the folder `model`, with a fresh head for another number of classes. Raises: ValueError for what only a new model takes."""
    if given := [name for name in OF_A_NEW_MODEL if getattr(config, name, {}) != getattr(type(config), name, {})]:
        raise ValueError(f"{config.model} is a saved model, which is built as it was saved: leave out {', '.join(given)}, or name a model of timm")
    if config.eval_keep is not None and config.keep is None:
        raise ValueError("eval_keep with a saved model needs keep too, the columns kept in training")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the token bias is all zero")
        model = checkpoint.load(config.model, keep=config.keep)
    if model.num_classes != num_classes:
        log.info(f"{config.model} has {model.num_classes} classes, {num_classes} are wanted: its head starts afresh")
        model.reset_classifier(num_classes)
    return model


def named_model(config: TrainConfig, num_classes: int, arguments: dict) -> nn.Module:
    """timm's or ours, from random numbers, timm's weights or a checkpoint. Raises: ValueError, OSError."""
    kwargs = config.pruning_kwargs() | arguments | config.model_kwargs
    if config.importance == "random" or config.sampling == "gumbel":
        kwargs = {"seed": config.seed, **kwargs}
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
    if config.tome_r is not None:
        add_merging(model, ToMe(r=config.tome_r))
    if config.initial_checkpoint is not None:
        log.info(checkpoint.load_weights(model, config.initial_checkpoint, purpose="finetune"))
    return model


def add_merging(model: nn.Module, merging: ToMe) -> None:
    """Patch it in, beside the methods that the model came with, which keep their weights. Raises: as `vp.patch`."""
    stacks = prune_stacks(model)
    if not stacks:
        patch(model, merging)
        return
    weights = {name: value for name, value in model.state_dict().items() if ".prune." in name}
    unpatch(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the token bias is all zero")
        patch(model, [*stacks[0].configs, merging], impl=stacks[0].impl)
    model.load_state_dict(weights, strict=False)


def freeze(model: nn.Module, config: TrainConfig) -> None:
    """Only the token bias, the head, or both learn. Raises: ValueError where the model has no such weights."""
    heads = tuple(f"{name}." for name in ("head", "head_dist", "fc_norm"))
    parts = {
        "bias": [name for name, _ in model.named_parameters() if name.endswith("prune.token_bias.weight")],
        "head": [name for name, _ in model.named_parameters() if name.startswith(heads)],
    }
    for part in config.train_only:
        if not parts[part]:
            raise ValueError(f"train_only {part}: {config.model} has no {part}{'; deit_s_bias and its like have one' if part == 'bias' else ''}")
    learning = {name for part in config.train_only for name in parts[part]}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in learning)


def wrap(model: nn.Module, config: RunConfig, device: torch.device) -> nn.Module:
    """The model inside DDP where there are several processes, and inside torch.compile where that is asked for."""
    if world_size() > 1:
        has_statistics = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
        settings = {SYNC_BUFFERS: has_statistics}  # other buffers are each process's own
        model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None, **settings)
    if config.torchcompile is not None:
        check_name("backend of torchcompile", config.torchcompile, torch.compiler.list_backends(exclude_tags=()))
        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, 8 + config.keep_warmup_epochs)  # each step of keep is a graph of its own
        model = torch.compile(model, backend=config.torchcompile)
    return model


def check_saveable(model: nn.Module) -> None:
    """Raises: ValueError where `vp.save` would refuse the model, which is better known before the training than after an epoch of it."""
    checkpoint.describe(model, {}, model.state_dict())


def create_optimizer(config: TrainConfig, model: nn.Module) -> Optimizer:
    """Raises: ValueError for an optimizer that this machine cannot run."""
    settings = {"lr": peak_lr(config), "weight_decay": config.weight_decay, "momentum": config.momentum, "layer_decay": config.layer_decay}
    try:
        optimizer = create_optimizer_v2(model, opt=config.opt, **settings)
    except (AssertionError, ImportError) as error:  # apex and bitsandbytes, where they are missing
        raise ValueError(f"opt {config.opt} cannot be had here: {error}") from error
    check_optimizer(optimizer, model)
    return optimizer


def peak_lr(config: TrainConfig) -> float:
    """lr, or lr_base for as many images as one update sees."""
    images = config.batch_size * config.grad_accum_steps * world_size()
    return config.lr_base * images / config.lr_base_size if config.lr is None else config.lr


def create_update(config: RunConfig, optimizer: Optimizer, device: torch.device) -> Update:
    scaler = torch.amp.GradScaler(device.type, enabled=config.autocast_dtype == "float16")
    return Update(optimizer, clip_grad=config.clip_grad, clip_mode=config.clip_mode, scaler=scaler)


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Raises: ValueError that names a parameter that trains and is not the optimizer's: it was built before `vp.patch` added it."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    lost = [name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in held]
    if lost:
        raise ValueError(f"the optimizer does not hold {few(lost)}, which train: build it after vp.patch")


def create_scheduler(config: RunConfig, optimizer: Optimizer, updates_per_epoch: int) -> Scheduler:
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


def pick_device(name: str | None) -> torch.device:
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
