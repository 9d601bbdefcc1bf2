"""timm's loaders and transforms, for a model's own image size and normalisation."""

import torch
from timm.data import create_loader, resolve_model_data_config
from torch import nn
from torch.utils.data import DataLoader, Dataset

from vit_prune.train.config import TrainConfig


def data_config(model: nn.Module) -> dict:
    """timm's data config of a model: input_size [3, height, width] as it was built, mean, std, interpolation, crop_pct, crop_mode."""
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    return resolve_model_data_config(model, args={} if size is None else {"input_size": (3, *size)})


def train_loader(dataset: Dataset, config: TrainConfig, data: dict, device: torch.device) -> DataLoader:
    """Shuffled and augmented batches; the last, smaller one is left out.

    Raises: ValueError where not even one batch is there.
    """
    if len(dataset) < config.batch_size:
        raise ValueError(f"{len(dataset)} images to train on are fewer than one batch of {config.batch_size}: lower --batch-size")
    return create_loader(
        dataset,
        data["input_size"],
        config.batch_size,
        is_training=True,
        no_aug=config.no_aug,
        scale=config.scale,
        ratio=config.ratio,
        hflip=config.hflip,
        color_jitter=config.color_jitter or None,
        auto_augment=config.aa,
        re_prob=config.reprob,
        re_mode="pixel",
        num_workers=config.workers,
        **shared(data, device),
    )


def eval_loader(dataset: Dataset, *, batch_size: int, workers: int, data: dict, device: torch.device) -> DataLoader:
    """All images, in order, as the model's data config says."""
    return create_loader(
        dataset, data["input_size"], batch_size, num_workers=workers, crop_pct=data["crop_pct"], crop_mode=data["crop_mode"], **shared(data, device)
    )


def shared(data: dict, device: torch.device) -> dict:
    return {
        "interpolation": data["interpolation"],
        "mean": data["mean"],
        "std": data["std"],
        "use_prefetcher": False,
        "pin_memory": device.type == "cuda",
    }
