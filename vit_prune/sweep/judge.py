"""How good a model is: fidelity to the unpruned one on sample photographs, or accuracy on a data set."""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from vit_prune.analysis.fidelity import mean_cosines
from vit_prune.analysis.photographs import TWELVE, photograph_batches
from vit_prune.sweep.config import PHOTOGRAPHS, SweepConfig
from vit_prune.train.data import create_dataset
from vit_prune.train.evaluation.accuracy import evaluate
from vit_prune.train.labels import check_classes, label_names
from vit_prune.train.loaders import data_config, eval_loader, loader, prefetch

CROPS = 2  # of each photograph
COLUMNS = ("patch_cosine", "prefix_cosine", "top1", "top5")


class Half(NamedTuple):
    """Batches to calibrate and search on, and what a model is judged by: batches with the features that are expected, or a labelled data set."""

    calibration: Sequence
    judged: Sequence | Dataset


class Photographs:
    """Mean cosine of the features with the unpruned model's, on twelve photographs: one half calibrates, the other is judged, both ways round.

    Two crops of each photograph calibrate and are searched on; the first of them is judged.
    """

    def __init__(self, model: nn.Module, size: tuple[int, int]) -> None:
        batches = photograph_batches(model, size[0], CROPS, names=TWELVE)
        judged = [(images[:1], self.features(model, images[:1])) for images in batches]
        self.halves = [Half(batches[here::2], judged[1 - here :: 2]) for here in (0, 1)]
        self.count = len(batches)

    @staticmethod
    @torch.no_grad()
    def features(model: nn.Module, images: Tensor) -> Tensor:
        return model.eval().forward_features(images)

    def __call__(self, model: nn.Module, half: Half) -> dict[str, float | None]:
        cosines = [mean_cosines(model, self.features(model, images), expected) for images, expected in half.judged]
        patch, prefix = zip(*cosines, strict=True)
        return {"patch_cosine": fmean(patch), "prefix_cosine": None if prefix[0] is None else fmean(prefix)}


class Labelled:
    """Top-1 and top-5 in percent on the validation images of a data set; images of its training split calibrate."""

    def __init__(self, model: nn.Module, config: SweepConfig) -> None:
        self.config, self.device, self.data = config, torch.device(config.device), data_config(model)
        self.validation = create_dataset(config.data, config.data_dir, "val", batch_size=config.batch_size)
        self.halves = [Half(self.spread_out() if config.methods else [], self.validation)]
        self.count = len(self.validation)

    def spread_out(self) -> list[tuple[Tensor, Tensor]]:
        """Batches of images from all over the training split."""
        config = self.config
        whole = create_dataset(config.data, config.data_dir, "train", batch_size=config.batch_size)
        settings = {"batch_size": config.batch_size, "workers": 0, "data": self.data, "device": self.device}
        eval_loader(whole, **settings)  # which gives it its transform
        number = min(config.calibration_images, len(whole))
        chosen = Subset(whole, [index * len(whole) // number for index in range(number)])
        return list(prefetch(loader(chosen, range(number), drop_last=False, **settings), self.data, self.device))

    def check(self, name: str, model: nn.Module) -> None:
        """Raises: ValueError for a model of other classes than the data's."""
        check_classes(name, model, tuple(map(str, self.validation.classes)), label_names(model))

    def __call__(self, model: nn.Module, half: Half) -> dict[str, float]:
        settings = {"batch_size": self.config.batch_size, "workers": self.config.workers, "data": data_config(model), "device": self.device}
        result = evaluate(model.to(self.device), eval_loader(half.judged, **settings), self.device)
        return {"top1": result["top1"], "top5": result["top5"]}


def judge_for(config: SweepConfig, model: nn.Module, size: tuple[int, int]) -> Photographs | Labelled:
    return Photographs(model, size) if config.data == PHOTOGRAPHS else Labelled(model, config)


def search_batches(config: SweepConfig, model: nn.Module, size: int, *, by_labels: bool) -> list:
    """What a model is searched on: photographs, a crop of each, or images of the training split.

    Raises: ValueError where labels count that are not the model's.
    """
    if config.data == PHOTOGRAPHS:
        return photograph_batches(model, size, 1, names=TWELVE)[: config.calibration_images]
    data = Labelled(model, config)
    if by_labels:
        data.check(config.model, model)
    return data.spread_out()
