"""Fit a checkpoint into a timm model, patched or not: what may be dropped, what may stay fresh, and what is refused."""

import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vit_prune.checkpoint.common import Fit, Purpose, listing, misfits, unwrap
from vit_prune.checkpoint.pos_embed import fit_pos_embed
from vit_prune.checkpoint.reader import Grid, open_checkpoint

HEADS = ("head", "head_dist")
PURPOSES = ("finetune", "evaluate", "resume")
ENOUGH = 0.9  # share of the encoder's weights below which the file is another model's


@dataclass(frozen=True)
class LoadedWeights:
    """What `load_weights` did. `fresh` weights keep the values that the model had; `resampled` is e.g. "pos_embed 14x14 -> 24x24"."""

    path: str
    matched: int
    dropped: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    resampled: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"{self.path}: {self.matched} weights loaded", *(f"resampled {text}" for text in self.resampled)]
        parts += [f"{word} {listing(names)}" for word, names in (("dropped", self.dropped), ("fresh", self.fresh)) if names]
        return "; ".join(parts)


def load_weights(model: nn.Module, path: str | Path, *, ema: bool = False, purpose: Purpose = "finetune", source_grid: Grid | None = None) -> LoadedWeights:
    """Read a checkpoint and fit it into a timm model, patched or not.

    Args:
        purpose: "finetune" takes pretraining files and leaves a head of another number of classes fresh; "evaluate" and "resume" need the head.
            "resume" needs our `prune.*` weights too where the model is patched; the others leave them as they are in dense files.
        source_grid: (h, w) of the patches in the file, where it is neither square nor the model's.

    Raises: as `read_checkpoint`; ValueError for whatever does not fit. The model is unchanged then.
    """
    if purpose not in PURPOSES:
        raise ValueError(f"purpose must be one of {', '.join(PURPOSES)}, got {purpose!r}")
    content = open_checkpoint(path, ema)
    model = unwrap(model)
    fit = Fit(content.path, purpose, rename(content.weights), model.state_dict(), dropped=list(content.outside))
    refuse_another_model(fit, type(model).__name__)
    drop_pretraining(fit)
    fit_prune(fit)
    fit_head(fit)
    fit_pos_embed(fit, model, content.grid if source_grid is None else tuple(source_grid))
    if misfit := misfits(fit.weights, {name: value for name, value in fit.target.items() if name not in fit.fresh}):
        raise ValueError(f"{fit.path} does not fit this {type(model).__name__}: {misfit}")
    if fit.notes:
        warnings.warn(f"{fit.path}: {'; '.join(fit.notes)}", stacklevel=2)
    model.load_state_dict(fit.target | fit.weights, strict=True)
    return LoadedWeights(str(fit.path), len(fit.weights), tuple(fit.dropped), tuple(fit.fresh), tuple(fit.resampled))


def rename(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """DeiT III's own files call layer scale gamma_1 and gamma_2."""
    return {re.sub(r"\.gamma_([12])$", r".ls\1.gamma", name): value for name, value in weights.items()}


def is_ours(name: str) -> bool:
    return "prune" in name.split(".")


def refuse_another_model(fit: Fit, model_name: str) -> None:
    """Raises: ValueError where less than 90 % of the encoder is in the file. A position embedding may still be resampled."""
    rest = tuple(f"{part}." for part in (*HEADS, "fc_norm"))
    encoder = {name: value for name, value in fit.target.items() if not is_ours(name) and not name.startswith(rest)}
    matched = [name for name, value in encoder.items() if name in fit.weights and comparable(name, fit.weights[name]) == comparable(name, value)]
    if len(matched) < ENOUGH * len(encoder):
        raise ValueError(
            f"{fit.path} matched {len(matched)} of {len(encoder)} encoder weights of this {model_name}: is this another model? {misfits(fit.weights, encoder)}"
        )


def comparable(name: str, value: Tensor) -> torch.Size:
    return value.shape[-1:] if name.endswith("pos_embed") else value.shape


def drop_pretraining(fit: Fit) -> None:
    """Raises: ValueError for a MAE pretraining file where a classifier is wanted."""
    names = (*fit.weights, *fit.dropped)
    decoder = any(name.startswith("decoder_" if "mask_token" not in names else "decoder") for name in names)
    if decoder and fit.purpose != "finetune" and not fit.under("head.")[0]:
        raise ValueError(f"{fit.path} is a MAE pretraining file with no classification head: fine-tune from it (purpose='finetune') before you {fit.purpose}")
    fit.drop(name for name in fit.weights if name not in fit.target and (name.startswith("decoder_") or name == "mask_token"))


def fit_prune(fit: Fit) -> None:
    """Dense weights leave what we added as it is. Raises: ValueError for our weights in a model that is not patched."""
    held, wanted = [name for name in fit.weights if is_ours(name)], [name for name in fit.target if is_ours(name)]
    if held and not wanted:
        raise ValueError(
            f"{fit.path} holds {len(held)} prune.* weights ({held[0]}, ...) and the model is not patched: vp.patch it with the same methods first, or vp.load"
        )
    if wanted and not held:
        if fit.purpose == "resume":
            raise ValueError(f"{fit.path} holds none of the model's {len(wanted)} prune.* weights, so it is not this run's: use purpose='finetune'")
        fit.fresh += wanted


def fit_head(fit: Fit) -> None:
    """A head of another number of classes stays fresh for finetune. Raises: ValueError for the other purposes."""
    for head in HEADS:
        held, wanted = fit.under(f"{head}.")
        in_file, in_model = (
            next((weights[name].shape[0] for name in names if weights[name].ndim), 0) for weights, names in ((fit.weights, held), (fit.target, wanted))
        )
        if in_file == in_model:
            continue
        what = f"{head} has {in_file or 'no'} classes in the file, {in_model or 'none'} in the model"
        if fit.purpose != "finetune":
            raise ValueError(f"{fit.path}: {what}; purpose={fit.purpose!r} needs the same (purpose='finetune' starts a fresh head)")
        fit.drop(held)
        fit.fresh += wanted
        fit.notes.append(f"{what}: {'the fresh head stays' if wanted else 'it is dropped'}")
    if fit.purpose == "finetune" and not fit.under("head.")[0]:
        fit_final_norm(fit)


def fit_final_norm(fit: Fit) -> None:
    """A model that pools before its norm (fc_norm) cannot use the norm of one that pools after: it belongs to the head, which is fresh."""
    norm, fc_norm = fit.under("norm."), fit.under("fc_norm.")
    if norm[0] and fc_norm[1] and not norm[1] and not fc_norm[0]:
        fit.drop(norm[0])
        fit.fresh += fc_norm[1]
        fit.notes.append("norm.* is dropped and fc_norm.* stays fresh: the model averages the tokens before its norm")
