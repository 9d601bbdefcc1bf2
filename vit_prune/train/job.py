"""Everything that one training run needs, built and checked before its first batch."""

import math
from dataclasses import dataclass, field, replace

import torch
from timm.data.loader import PrefetchLoader
from timm.utils import ModelEmaV3, random_seed
from torch import nn
from torch.utils.data import Dataset

from vit_prune.train import build
from vit_prune.train.board import check_tensorboard
from vit_prune.train.config import TrainConfig
from vit_prune.train.data import augmentation, check_same_classes, create_dataset
from vit_prune.train.distributed import from_primary
from vit_prune.train.engine import Training
from vit_prune.train.loaders import data_config, eval_loader, train_loader
from vit_prune.train.losses import create_loss
from vit_prune.train.run_config import RunConfig
from vit_prune.train.state import new_name


@dataclass
class Job:
    """A run that is ready for its first batch."""

    config: RunConfig  # resolved: what was left to the data and the machine is filled in
    training: Training
    train_loader: PrefetchLoader
    eval_loader: PrefetchLoader
    train_set: Dataset
    eval_set: Dataset
    files: dict[str, str] = field(default_factory=dict)  # name: text, of what belongs beside each saved model

    @property
    def evaluated(self) -> nn.Module:
        """The model that is judged and saved: the average where there is one."""
        return self.training.model if self.training.ema is None else self.training.ema.module


def prepare(config: TrainConfig, device: torch.device, *, fresh: bool = True) -> Job:
    """Build everything. Raises: ValueError or OSError for whatever can be refused before the first batch.

    Args: fresh: with the weights that the run starts from; a resumed one has its own, and those may be gone.
    """
    if config.tensorboard:
        check_tensorboard()
    train, val = (dataset(config, split) for split in ("train", "val"))
    check_same_classes(train, val)
    config = resolve(config, train)
    random_seed(config.seed)
    start = config if fresh else replace(config, pretrained=False, initial_checkpoint=None)
    model = build.create_model(start, config.num_classes).to(device)
    model.pretrained_cfg = {**model.pretrained_cfg, "label_names": tuple(train.classes)}  # saved with the model, compared when it is evaluated
    build.check_saveable(model)
    data = data_config(model)
    loader = train_loader(train, config, data, device)
    training = create_training(config, model, device, len(loader))
    if config.experiment is None and config.resume is None:
        config = replace(config, experiment=from_primary(new_name(config.model, data["input_size"][-1])))
    val_loader = eval_loader(val, batch_size=config.batch_size, workers=config.workers, data=data, device=device)
    return Job(config, training, loader, val_loader, train, val)


def dataset(config: TrainConfig, split: str) -> Dataset:
    """The split "train" or "val" of the config's data. Raises: as `create_dataset`."""
    return create_dataset(
        config.dataset, config.data_dir, split, class_map=config.class_map, skip_broken=config.skip_broken, batch_size=config.batch_size, seed=config.seed
    )


def create_training(config: TrainConfig, model: nn.Module, device: torch.device, batches: int) -> Training:
    """What trains the model, which is on the device already. Args: batches: per epoch of this process. Raises: ValueError, OSError."""
    optimizer = build.create_optimizer(config, model)
    updates_per_epoch = math.ceil(batches / config.grad_accum_steps)
    loss = create_loss(config, model, device)  # a teacher may switch the model's second head on
    ema = ModelEmaV3(model, decay=config.model_ema_decay, use_warmup=config.model_ema_warmup) if config.model_ema else None
    return Training(
        model=model,
        optimizer=optimizer,
        scheduler=build.create_scheduler(config, optimizer, updates_per_epoch),
        loss=loss,
        device=device,
        epochs=config.epochs,
        update=build.create_update(config, optimizer, device),
        updates_per_epoch=updates_per_epoch,
        ema=ema,
        wrapped=build.wrap(model, config, device),
        mixup=build.create_mixup(config, config.num_classes),
        accumulate=config.grad_accum_steps,
        autocast_dtype=None if config.autocast_dtype is None else getattr(torch, config.autocast_dtype),
        max_skipped_steps=config.max_skipped_steps,
        log_interval=config.log_interval,
    )


def resolve(config: TrainConfig, train: Dataset) -> TrainConfig:
    """Fill in what depends on the data set and the machine. Raises: ValueError for a head with fewer outputs than the data has classes."""
    num_classes = len(train.classes)
    if config.num_classes is not None and config.num_classes < num_classes:
        raise ValueError(f"num_classes is {config.num_classes}, the data has {num_classes} classes")
    defaults = {"num_classes": num_classes, "device": str(build.pick_device(None))}
    if not config.no_aug:
        defaults |= augmentation(config.dataset)._asdict()
    return replace(config, **{name: value for name, value in defaults.items() if getattr(config, name) is None})
