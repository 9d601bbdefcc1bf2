"""The image that a model is measured on: its size in pixels and in tokens."""

from torch import nn


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside torch.compile, DistributedDataParallel or DataParallel."""
    model = getattr(model, "_orig_mod", model)
    return unwrap(model.module) if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)) else model


def takes_texts(model: nn.Module) -> bool:
    """True for a model of token numbers, which has no image size and as many tokens as its text."""
    return hasattr(model, "vocab_size")


def image_size(model: nn.Module, img_size: int | tuple[int, int] | None = None) -> tuple[int, int]:
    """(height, width) in pixels. Raises: ValueError for what is no size, for None where the model has no size of its own, and for a model of texts."""
    if takes_texts(model):
        raise ValueError(f"a {type(model).__name__} takes texts, not images: tools/evaluate_text.py and macs(model, num_tokens=...) count it")
    if img_size is None:
        return own_image_size(model)
    size = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
    if len(size) != 2 or not all(isinstance(side, int) and side > 0 for side in size):
        raise ValueError(f"img_size must be a positive number of pixels or (height, width), got {img_size}")
    return size


def own_image_size(model: nn.Module) -> tuple[int, int]:
    """The size that the model was built for; that of its pretrained weights where it takes any."""
    embeds = getattr(model, "patch_embed", None) or getattr(model, "embeds", None)
    built_for = getattr(embeds, "img_size", None) or getattr(embeds, "default_img_size", None)
    pretrained = (getattr(model, "pretrained_cfg", None) or {}).get("input_size", ())[-2:]
    if not built_for and not pretrained:
        raise ValueError(f"{type(model).__name__} has no image size of its own: give img_size")
    return tuple(built_for or pretrained)


def patch_grid(embeds: nn.Module, size: tuple[int, int], *, fixed: bool) -> tuple[int, int]:
    """Patches per column and per row. fixed: the model takes one size only. Raises: ValueError for a size that it does not take."""
    pixels = f"{size[0]} x {size[1]}"
    if fixed and size != tuple(embeds.img_size):
        own = " x ".join(map(str, embeds.img_size))
        raise ValueError(f"the model takes {own} pixels only, got {pixels}: build it with img_size={size} or dynamic_img_size=True")
    grid = embeds.dynamic_feat_size(size)
    uneven = any(side % patch for side, patch in zip(size, embeds.patch_size, strict=True))
    if 0 in grid or (uneven and not fixed and not embeds.dynamic_img_pad):
        patch = " x ".join(map(str, embeds.patch_size))
        raise ValueError(f"{pixels} pixels cannot be cut into patches of {patch}: change img_size, or build the model with dynamic_img_pad=True")
    return grid
