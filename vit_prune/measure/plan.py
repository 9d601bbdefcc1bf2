"""What a recipe compares, and with what."""

from dataclasses import replace
from pathlib import Path

from vit_prune.measure.candidates import Candidate, build, own_name, unpruned
from vit_prune.measure.config import LatencyConfig
from vit_prune.methods.stack import prune_stacks
from vit_prune.train.checks import check_name


def candidates_of(config: LatencyConfig, img_size: int | None) -> list[Candidate]:
    """What a recipe compares, at one size. Each baseline stands before what is compared with it.

    The rule: with `against`, its first is the baseline of all. Without, a pruned model has its own unpruned copy as its baseline, and among
    models that are not pruned the first is that of the others.
    """
    weights = checkpoints_of(config)
    how = {"num_classes": config.num_classes, "img_size": img_size, "seed": config.seed}
    built = [Candidate(name, build(name, checkpoint=weights.get(name), **how), None) for name in config.against]
    candidates = [replace(one, baseline=built[0].label if place else None) for place, one in enumerate(built)]
    for name in config.model:
        model = build(name, methods=config.methods, checkpoint=weights.get(name), **how)
        candidates += with_baseline(Candidate(config.label(name), model, None), candidates, against=bool(built))
    labels = [candidate.label for candidate in candidates]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(f"{twice[0]} would be compared with itself: leave it out of --against, or give it another --keep")
    for name in weights:
        check_name("name in checkpoint", name, [*config.model, *labels])
    return candidates


def with_baseline(candidate: Candidate, before: list[Candidate], *, against: bool) -> list[Candidate]:
    """The candidate with its baseline's label; its own unpruned copy goes ahead of it where that is the baseline."""
    if against:
        return [replace(candidate, baseline=before[0].label)]
    if prune_stacks(candidate.model):
        name = own_name(candidate.model)
        label = f"{candidate.label}, unpruned" if name is None or any(one.label == name for one in before) else name
        return [Candidate(label, unpruned(candidate.model), None), replace(candidate, baseline=label)]
    others = [one.label for one in before if not prune_stacks(one.model)]
    return [replace(candidate, baseline=others[0] if others else None)]


def checkpoints_of(config: LatencyConfig) -> dict[str, str]:
    """Weights by the name of the model. Raises: ValueError for a PATH that could be of several models; FileNotFoundError."""
    found = {}
    for text in config.checkpoint:
        name, sign, path = text.partition("=")
        if not sign or Path(text).exists():
            if len(config.model) > 1:
                raise ValueError(f"checkpoint must be NAME=PATH where there are several models, got {text!r}")
            name, path = config.model[0], text
        if not Path(path).exists():
            raise FileNotFoundError(f"no checkpoint {path}")
        found[name] = path
    return found
