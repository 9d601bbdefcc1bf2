"""The class names that a model was trained with, in its pretrained_cfg, and their comparison with the data's."""

from torch import nn

from vit_prune.train.checks import few


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
    if names == classes:
        return
    here, there = set(names), set(classes)
    if here != there:
        only = [few(name for name in one if name not in other) for one, other in ((names, there), (classes, here))]
        raise ValueError(f"the classes of {path} are not the data's: only in the checkpoint {only[0]}; only in the data {only[1]}")
    moved = few(f"{name} ({index} and {classes.index(name)})" for index, name in enumerate(names) if classes[index : index + 1] != (name,))
    raise ValueError(f"{path} numbers the data's classes in another order: {moved}; a folder takes the checkpoint's order from --class-map")
