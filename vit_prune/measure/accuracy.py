"""Accuracy beside latency: top-1 and top-5 of the models that have weights of their own."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from vit_prune.measure.candidates import Candidate, build, is_folder
from vit_prune.measure.config import LatencyConfig
from vit_prune.measure.plan import checkpoints_of
from vit_prune.train.data import create_dataset
from vit_prune.train.evaluation.accuracy import evaluate
from vit_prune.train.labels import check_classes, label_names
from vit_prune.train.loaders import data_config, eval_loader, worker_deaths_explained

SPLIT = "val"
BATCH_SIZE = 64  # changes no accuracy


def accuracies(config: LatencyConfig, candidates: Sequence[Candidate], device: torch.device) -> dict[str, tuple[float, float]]:
    """Label -> (top-1, top-5) in percent, of folders of vp.save and of names with a checkpoint; empty without data. In float32.

    Raises: ValueError or OSError for data that is not there, and for a model of other classes.
    """
    if config.data_dir is None and config.dataset == "folder":
        return {}
    dataset = create_dataset(config.dataset, config.data_dir, SPLIT, batch_size=BATCH_SIZE)
    classes = tuple(map(str, dataset.classes))
    models = list(trained(config, candidates))
    for label, model in models:
        check_classes(label, model, classes, label_names(model))
    found = {}
    with worker_deaths_explained():
        for label, model in models:
            loader = eval_loader(dataset, batch_size=BATCH_SIZE, workers=config.workers, data=data_config(model), device=device)
            result = evaluate(model.to(device), loader, device)
            found[label] = (result["top1"], result["top5"])
            model.to("cpu")
    return found


def trained(config: LatencyConfig, candidates: Sequence[Candidate]) -> Iterator[tuple[str, nn.Module]]:
    """(label, model) where there are weights. An unpruned copy has those of the pruned model: what counts is a checkpoint of its own name."""
    weights = checkpoints_of(config)
    names = {name: name for name in config.against} | {config.label(name): name for name in config.model}
    for candidate in candidates:
        name = names.get(candidate.label, candidate.label)
        if candidate.label in names and (is_folder(name) or name in weights):
            yield candidate.label, candidate.model
        elif name in weights:
            yield candidate.label, build(name, checkpoint=weights[name], num_classes=config.num_classes)
