"""Position embeddings, from the grid and the prefix count that they have to those that the model has.

P prefix tokens (class, distillation, registers), h x w patches, D width.  pos_embed [1, P' + h w, D], P' of the P tokens in it; NaFlexVit's [1, h, w, D].
"""

import math
from collections.abc import Iterable, Mapping

from timm.layers import resample_abs_pos_embed, resample_abs_pos_embed_nhwc
from torch import Tensor, nn

from vit_prune.checkpoint.common import Fit
from vit_prune.checkpoint.reader import Grid


def fit_pos_embed(fit: Fit, model: nn.Module, known_grid: Grid | None) -> None:
    """Resample from the grid that the file has to the model's. What cannot be resampled is left to the list of misfits."""
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    for name in ("pos_embed", "embeds.pos_embed"):
        held, wanted = fit.weights.get(name), fit.target.get(name)
        if held is None or wanted is None or held.ndim != wanted.ndim or held.shape[-1] != wanted.shape[-1]:
            continue
        if held.ndim == 4:
            source, target = tuple(held.shape[1:3]), tuple(wanted.shape[1:3])
            if known_grid not in (None, source):
                raise ValueError(f"{name} in {fit.path} is {shown(source)}, not source_grid={shown(known_grid)}")
            value = resample_abs_pos_embed_nhwc(held, new_size=list(target))
        elif grid is not None:
            target = tuple(grid)
            prefix, source = source_layout(fit, held.shape[1], wanted, target, known_grid)
            value = resample_abs_pos_embed(held, new_size=list(target), old_size=list(source), num_prefix_tokens=prefix)
        else:
            continue
        if source != target:
            fit.weights[name] = value
            fit.resampled.append(f"{name} {shown(source)} -> {shown(target)}")


def source_layout(fit: Fit, length: int, wanted: Tensor, grid: Grid, known_grid: Grid | None) -> tuple[int, Grid]:
    """P' and (h, w) of the file's pos_embed. Raises: ValueError where no layout or more than one explains its length, or P' is not the model's."""
    prefix_in_model = wanted.shape[1] - grid[0] * grid[1]
    if fit.purpose == "resume" and known_grid is None and length == wanted.shape[1]:
        return prefix_in_model, grid  # the same run has the same grid
    layouts = possible_layouts(fit.weights, length, grid, known_grid)
    if not layouts:
        tried = "the model's" if known_grid is None else shown(known_grid)
        square = "a square or " if known_grid is None else ""
        raise ValueError(
            f"pos_embed in {fit.path} holds {length} entries, which is not {square}{tried} grid with its prefix tokens ({shown(grid)} in the model): "
            "give the true source_grid=(height, width)"
        )
    if len(layouts) > 1:
        readings = " or ".join(f"{shown(source)} with {prefix} prefix tokens" for prefix, source in layouts)
        raise ValueError(f"pos_embed in {fit.path} holds {length} entries, {readings}: give source_grid=(height, width)")
    prefix, source = layouts[0]
    if prefix != prefix_in_model:
        doubt = "" if known_grid else f" (read as {shown(source)} patches: where that is wrong, give source_grid=(height, width))"
        count = f"{prefix} prefix token{'' if prefix == 1 else 's'}, the model has {prefix_in_model}"
        raise ValueError(f"pos_embed in {fit.path} has {count}{'' if prefix == num_prefix_tokens(fit.weights)[0] else doubt}")
    return prefix, source


def possible_layouts(weights: Mapping[str, Tensor], length: int, grid: Grid, known_grid: Grid | None) -> list[tuple[int, Grid]]:
    """Every (P', (h, w)) of that length: with all prefix tokens of the file, the class token alone, or none; square, or the model's grid."""
    layouts = []
    for prefix in sorted({*num_prefix_tokens(weights), 0}, reverse=True):
        side = math.isqrt(max(length - prefix, 0))
        grids = {(side, side), grid} if known_grid is None else {known_grid}
        layouts += [(prefix, (h, w)) for h, w in sorted(grids) if h * w == length - prefix > 0]
    return layouts


def num_prefix_tokens(weights: Mapping[str, Tensor]) -> tuple[int, int]:
    """All prefix tokens of the file, and the class token alone."""
    tokens = [weights[name].shape[1] if name in weights else 0 for name in ("cls_token", "dist_token", "reg_token")]
    return sum(tokens), tokens[0]


def shown(grid: Iterable[int]) -> str:
    return "x".join(map(str, grid))
