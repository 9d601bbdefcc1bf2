"""The class names that a model was trained with, in its pretrained_cfg, and their comparison with the data's."""

from torch import nn

from vit_prune.train.checks import few
from vit_prune.train.data.classes import class_differences


def label_names(model: nn.Module) -> tuple[str, ...] | None:
    """The class names in training order; None where the checkpoint has none, or more than outputs, which are another head's."""
    names = (getattr(model, "pretrained_cfg", None) or {}).get("label_names")
    known = isinstance(names, (list, tuple)) and 0 < len(names) <= model.num_classes
    return tuple(map(str, names)) if known else None


def check_classes(path: str, model: nn.Module, classes: tuple[str, ...], names: tuple[str, ...] | None) -> None:
    """Raises: ValueError for other classes in the checkpoint than in the data, or, where it lists none, another number of them."""
    if names is None:
        if model.num_classes != len(classes):
            raise ValueError(f"{path} has {model.num_classes} classes, the data has {len(classes)}")
        return
    only_here, only_data, moved = class_differences(*({name: number for number, name in enumerate(listed)} for listed in (names, classes)))
    if only_here or only_data:
        raise ValueError(f"the classes of {path} are not the data's: only in the checkpoint {few(only_here)}; only in the data {few(only_data)}")
    if moved:
        raise ValueError(f"{path} numbers the data's classes in another order: {few(moved)}; a folder takes the checkpoint's order from --class-map")
