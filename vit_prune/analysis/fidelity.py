"""Training-free pruning: how near do the pruned model's features stay to its own unpruned ones?

Half of the photographs calibrate, the other half is evaluated, both ways round: nothing is measured on what was calibrated on.
"""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from vit_prune.analysis.photographs import photograph_batches
from vit_prune.calibrate import calibrate
from vit_prune.measure.macs import macs
from vit_prune.methods.columns import Columns
from vit_prune.methods.schedules import Keep, parse_keep
from vit_prune.patch import patched


@dataclass(frozen=True)
class Fidelity:
    """Mean cosine similarity to the unpruned model's features, the share of its MACs, and the two ways round of the patch cosine."""

    way: str
    patch_cosine: float
    prefix_cosine: float | None  # None where the model has no prefix token
    macs_share: float
    patch_cosine_by_half: tuple[float, ...]
    crops_by_half: tuple[int, ...]

    def to_dict(self) -> dict:
        return asdict(self)


def ways(keep: Keep, seed: int = 0) -> dict[str, Columns]:
    """What is compared, by name."""
    calibrated = {"keep": keep, "importance": "column_mean"}
    return {
        "drop": Columns(**calibrated),
        "merge": Columns(**calibrated, dropped="merge"),
        "merge, kept set by Gumbel-top-k": Columns(**calibrated, dropped="merge", sampling="gumbel", seed=seed),
        "merge, kept set by systematic sampling": Columns(**calibrated, dropped="merge", sampling="systematic"),
        "random, drop": Columns(keep=keep, importance="random", seed=seed),
        "random, merge": Columns(keep=keep, importance="random", dropped="merge", seed=seed),
    }


@torch.no_grad()
def fidelity(model: nn.Module, *, keep: Keep | float | str = 0.5, size: int = 224, crops: int = 2, rank: int = 32, seed: int = 0) -> list[Fidelity]:
    """Compare the ways of `ways` on the sample photographs.

    Args:
        model: an unpatched timm ViT in eval mode, built for `size` pixels.
        keep: keep schedule. crops: per photograph. rank: principal directions for the assignment. seed: of the random kept sets.
    """
    batches = photograph_batches(model, size, crops)
    halves = batches[0::2], batches[1::2]
    cosines: dict[str, list[tuple[float, float | None]]] = {}
    for calibration, evaluation in (halves, halves[::-1]):
        calibrate(model, calibration, rank=rank)
        images = torch.cat(evaluation)
        expected = model.forward_features(images)
        for name, columns in ways(parse_keep(keep), seed).items():
            with patched(model, columns):
                cosines.setdefault(name, []).append(mean_cosines(model, model.forward_features(images), expected))
    counts = tuple(len(torch.cat(half)) for half in halves[::-1])
    return [summary(model, name, columns, cosines[name], counts) for name, columns in ways(parse_keep(keep), seed).items()]


def mean_cosines(model: nn.Module, actual: Tensor, expected: Tensor) -> tuple[float, float | None]:
    """Of the patch tokens and of the prefix tokens: features [B, N, D] -> two means over images and tokens."""
    P = model.num_prefix_tokens
    cosine = torch.cosine_similarity(actual, expected, dim=-1)  # [B, N]
    return cosine[:, P:].mean().item(), cosine[:, :P].mean().item() if P else None


def summary(model: nn.Module, name: str, columns: Columns, cosines: list[tuple[float, float | None]], counts: tuple[int, ...]) -> Fidelity:
    dense = macs(model).total
    with patched(model, columns):
        share = macs(model).total / dense
    patch, prefix = zip(*cosines, strict=True)
    mean_prefix = None if prefix[0] is None else sum(prefix) / len(prefix)
    return Fidelity(name, sum(patch) / len(patch), mean_prefix, share, patch, counts)


def fidelity_table(rows: list[Fidelity]) -> str:
    """Aligned text for people."""
    lines = [f"{'kept and dropped':38s} {'patch cosine':>12s} {'(each half)':>15s} {'prefix cosine':>13s} {'MACs':>6s}"]
    for row in rows:
        halves = " ".join(f"{value:.3f}" for value in row.patch_cosine_by_half)
        prefix = "-" if row.prefix_cosine is None else f"{row.prefix_cosine:.4f}"
        lines.append(f"{row.way:38s} {row.patch_cosine:12.4f} {halves:>15s} {prefix:>13s} {row.macs_share:6.3f}")
    return "\n".join(lines)
