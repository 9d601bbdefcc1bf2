"""What reading, fitting and saving share."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

Purpose = Literal["finetune", "evaluate", "resume"]


@dataclass
class Fit:
    """Weights on their way into a model; nothing touches the model until all of them fit."""

    path: Path
    purpose: Purpose
    weights: dict[str, Tensor]
    target: dict[str, Tensor]  # the model's state dict
    dropped: list[str]
    fresh: list[str] = field(default_factory=list)
    resampled: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def drop(self, names: Iterable[str]) -> None:
        for name in list(names):
            del self.weights[name]
            self.dropped.append(name)

    def under(self, prefix: str) -> tuple[list[str], list[str]]:
        """Names of one module in the file and in the model."""
        return [name for name in self.weights if name.startswith(prefix)], [name for name in self.target if name.startswith(prefix)]


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside torch.compile, DDP, DataParallel and ModelEma wrappers."""
    while isinstance(inner := getattr(model, "_orig_mod", getattr(model, "module", None)), nn.Module):
        model = inner
    return model


def listing(names: Iterable[str], limit: int = 10, separator: str = ", ") -> str:
    """The first few and how many more."""
    names = list(names)
    return separator.join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def nearest(name: str, names: Sequence[str] | Mapping) -> str:
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def misfits(weights: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> str:
    """What keeps the weights from being the target's, in words; empty where they fit."""
    missing = [name for name in target if name not in weights]
    unexpected = [name for name in weights if name not in target]
    reshaped = [
        f"{name} ({tuple(value.shape)} in the file, {tuple(target[name].shape)} in the model)"
        for name, value in weights.items()
        if name in target and value.shape != target[name].shape
    ]
    kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
    return "; ".join(f"{len(names)} {kind}: {listing(names)}" for kind, names in kinds if names)


def is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def tuples(value: object) -> object:
    """JSON has lists only; timm's arguments and configs compare as tuples."""
    return tuple(map(tuples, value)) if isinstance(value, (list, tuple)) else value
