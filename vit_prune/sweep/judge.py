"""How good a model is: fidelity to the unpruned one on sample photographs, or accuracy on a data set."""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from vit_prune.analysis.fidelity import mean_cosines
from vit_prune.analysis.photographs import TWELVE, photograph_batches
from vit_prune.sweep.config import PHOTOGRAPHS, SweepConfig
from vit_prune.train.data import create_dataset
from vit_prune.train.evaluation.accuracy import evaluate
from vit_prune.train.loaders import data_config, eval_loader, loader, prefetch

CROPS = 2  # of each photograph
COLUMNS = ("patch_cosine", "prefix_cosine", "top1", "top5")


class Half(NamedTuple):
    """calibration, searched: batches to calibrate, and to search on. judged: batches that a model is judged by."""

    calibration: Sequence
    searched: Sequence
    judged: Sequence


class Photographs:
    """Mean cosine of the features with the unpruned model's, on twelve photographs: one half calibrates, the other is judged, both ways round.

    Two crops of each photograph calibrate; the first of them is searched on, or judged.
    """

    def __init__(self, model: nn.Module, size: tuple[int, int]) -> None:
        batches = photograph_batches(model, size[0], CROPS, names=TWELVE)
        firsts = [images[:1] for images in batches]
        judged = [(images, self.features(model, images)) for images in firsts]
        self.halves = [Half(batches[here::2], firsts[here::2], judged[1 - here :: 2]) for here in (0, 1)]
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
        validation = create_dataset(config.data, config.data_dir, "val", batch_size=config.batch_size)
        settings = {"batch_size": config.batch_size, "workers": config.workers, "data": self.data, "device": self.device}
        calibration = self.spread_out() if config.methods else []
        self.halves = [Half(calibration, calibration, eval_loader(validation, **settings))]
        self.count = len(validation)

    def spread_out(self) -> list[tuple[Tensor, Tensor]]:
        """Batches of images from all over the training split."""
        config = self.config
        whole = create_dataset(config.data, config.data_dir, "train", batch_size=config.batch_size)
        settings = {"batch_size": config.batch_size, "workers": 0, "data": self.data, "device": self.device}
        eval_loader(whole, **settings)  # which gives it its transform
        number = min(config.calibration_images, len(whole))
        chosen = Subset(whole, [index * len(whole) // number for index in range(number)])
        return list(prefetch(loader(chosen, range(number), drop_last=False, **settings), self.data, self.device))

    def __call__(self, model: nn.Module, half: Half) -> dict[str, float]:
        result = evaluate(model.to(self.device), half.judged, self.device)
        return {"top1": result["top1"], "top5": result["top5"]}


def judge_for(config: SweepConfig, model: nn.Module, size: tuple[int, int]) -> Photographs | Labelled:
    return Photographs(model, size) if config.data == PHOTOGRAPHS else Labelled(model, config)
