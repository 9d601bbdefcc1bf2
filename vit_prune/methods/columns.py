"""Column pruning: keys and values are computed for the kept tokens only; all queries stay.

Legend: B batch, N tokens = P prefix + n patches, M kept columns, H heads, d head dim, D width, r directions.
"""

from dataclasses import asdict, dataclass
from numbers import Real
from typing import ClassVar

import torch
from torch import Tensor, nn

from vit_prune.methods.base import NOTHING, Host, KeptColumns, Method, MethodConfig, Readouts
from vit_prune.methods.importance import BIAS, IMPORTANCES, KEYS, PROBABILITIES, class_query, key_map, value_norm
from vit_prune.methods.schedules import Keep, check_ratio, parse_keep
from vit_prune.ops import columns as ops
from vit_prune.ops import noise, sampling
from vit_prune.ops.precision import full_precision
from vit_prune.ops.rows import gather_tokens

CHOICES = {
    "rule": ("topk", "mass", "threshold"),
    "importance": IMPORTANCES,
    "dropped": ("drop", "merge"),
    "sampling": ("topk", "gumbel", "systematic"),
}


@dataclass(frozen=True)
class Columns(MethodConfig):
    """Which key/value columns each block keeps, and what becomes of the others.

    Args:
        keep: keep schedule of the rule "topk": M = P + max(1, ceil(keep * n)). Prefix tokens are kept outside the budget.
        rule: "topk"; "mass", the smallest set of patches that holds the share `tau` of the patches' probability; "threshold", the
            patches with probability >= tau / N. With the last two M varies per image and the batch is padded to its largest.
        tau: for the rules "mass", in (0, 1], and "threshold", > 0.
        importance: a mean over heads. "logit": of the bias b; "prob": of softmax_j b; "column_mean": of softmax_j(b + scale * q_mean . k),
            q_mean from `vp.calibrate`. Others use, to compare with: "class_attention", softmax_j(b + scale * q_class . k) of each image (EViT, arXiv
            2202.07800); "value_norm", the length of v; "grid", every so many patches; "random". None is "logit" for "topk" and "prob" for the other rules.
        dropped: "drop", or "merge": fold each dropped patch into the kept patch nearest to it.
        merge_rank: dimensions in which nearness is measured: that many calibrated principal directions of x. None takes all that the
            calibration holds, or x itself where there is none.
        sampling: "topk" takes the most important; "gumbel" draws without replacement by importance (Gumbel-top-k); "systematic" spreads the kept
            over the image by the geometric mean of importance (prob or column_mean) and novelty, 1 - cosine similarity to the nearest patch of the
            other half: it draws nothing at random, and is the best of the three where nothing was trained for pruning.
        seed: of the random numbers, which leave PyTorch's generators alone. In evaluation they depend on the seed and the block alone, so that
            an image gets the same columns in any batch; in training also on the place in the batch and on `vp.set_progress(model, progress)`.
    """

    name: ClassVar[str] = "columns"
    keep: Keep | float | str | tuple[float, ...] = 1.0
    rule: str = "topk"
    tau: float | None = None
    importance: str | None = None
    dropped: str = "drop"
    merge_rank: int | None = None
    sampling: str = "topk"
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", parse_keep(self.keep))
        if self.importance is None:
            object.__setattr__(self, "importance", "logit" if self.rule == "topk" else "prob")
        for field, choices in CHOICES.items():
            if getattr(self, field) not in choices:
                raise ValueError(f"{field} must be one of {', '.join(choices)}, got {getattr(self, field)!r}")
        self._check_rule()
        if self.sampling == "systematic" and self.importance not in PROBABILITIES:
            raise ValueError(f"sampling systematic needs a probability: importance {', '.join(PROBABILITIES)}, got {self.importance}")
        if self.sampling == "gumbel" and self.importance in ("value_norm", "grid"):
            raise ValueError(f"sampling gumbel draws by a probability or its logarithm, and importance {self.importance} is neither")
        if self.merge_rank is not None and (not self.needs_features or not isinstance(self.merge_rank, int) or self.merge_rank < 1):
            raise ValueError(f"merge_rank is a number of directions >= 1 for dropped='merge' or sampling='systematic', got {self.merge_rank}")

    @property
    def needs_features(self) -> bool:
        """True where patches are compared with each other."""
        return self.dropped == "merge" or self.sampling == "systematic"

    def _check_rule(self) -> None:
        if self.rule == "topk":
            if self.tau is not None:
                raise ValueError(f"tau belongs to the rules mass and threshold; the rule topk takes keep, got tau={self.tau}")
            return
        if not isinstance(self.tau, Real) or not 0 < self.tau <= (1 if self.rule == "mass" else float("inf")):
            raise ValueError(f"rule {self.rule} takes tau {'in (0, 1]' if self.rule == 'mass' else '> 0'}, got {self.tau}")
        if self.importance not in PROBABILITIES:
            raise ValueError(f"rule {self.rule} needs a probability: importance {', '.join(PROBABILITIES)}, got {self.importance}")
        if self.sampling != "topk" or self.keep != parse_keep(1.0):
            raise ValueError(f"keep and sampling belong to the rule topk; the rule {self.rule} takes tau")

    def build(self, host: Host) -> "ColumnsMethod":
        return ColumnsMethod(self, host)

    def to_dict(self) -> dict:
        return {"name": self.name, **asdict(self), "keep": str(self.keep)}


class ColumnsMethod(Method):
    """Column selection in one block. `keep_ratio` may be set at any time (`vp.set_keep`)."""

    reads = True

    def __init__(self, config: Columns, host: Host) -> None:
        super().__init__()
        self.config = config
        self.keep_ratio = config.keep.ratios(host.depth)[host.index]
        self.num_prefix_tokens = host.num_prefix_tokens
        self.dim, self.num_heads, self.head_dim = host.dim, host.num_heads, host.head_dim
        self.block = host.index
        self.key = noise.block_key(config.seed, host.index)
        self.register_buffer("training_key", torch.tensor(self.key), persistent=False)  # a tensor: a new number compiles nothing anew
        self.needs_bias = f"importance={config.importance!r}" if config.importance in BIAS else ""
        self.register_buffer("q_mean", self._calibrated_q_mean(host))
        self.register_buffer("directions", self._calibrated_directions(host))

    def _calibrated_q_mean(self, host: Host) -> Tensor | None:
        importance = self.config.importance
        if importance == "column_mean" and (host.calibration is None or not host.calibration.q_mean.numel()):
            raise ValueError("importance='column_mean' needs the mean queries: run vp.calibrate(model, loader) before vp.patch")
        if importance == "class_attention" and not host.has_class_token:
            raise ValueError("importance='class_attention' needs a class token, and this model has none: use another importance")
        if importance in KEYS and host.has_key_norm:
            raise ValueError(f"importance={importance!r} reads keys as a linear map of x; {host.name} normalises its keys: use another importance")
        return host.calibration.q_mean.clone() if importance == "column_mean" else None

    def _calibrated_directions(self, host: Host) -> Tensor | None:
        if not self.config.needs_features:
            return None
        rank = self.config.merge_rank
        held = 0 if host.calibration is None else host.calibration.directions.shape[1]
        if rank is not None and rank > held:
            raise ValueError(
                f"merge_rank={rank} needs that many principal directions, the calibration holds {held}: run vp.calibrate(model, loader, rank={rank})"
            )
        return None if held == 0 else host.calibration.directions[:, :rank].clone()

    @property
    def keeps_all(self) -> bool:
        return self.config.rule == "topk" and self.keep_ratio == 1.0

    @property
    def spreads(self) -> bool:
        """True where the kept patches are a systematic sample."""
        return self.config.sampling == "systematic" or self.config.importance == "grid"

    def readouts(self, attn: nn.Module) -> dict[str, Tensor]:
        """The anticipated logits' map [H, D] and the principal directions [r, D], where this method has them."""
        maps = {}
        if self.q_mean is not None and not attn.prune.query_key_free:
            maps["anticipated"] = key_map(self.q_mean, attn)
        if self.directions is not None:
            maps["features"] = self.directions.mT
        return maps

    def columns(self, x: Tensor, bias: Tensor | None, *, attn: nn.Module, mask: Tensor | None, read: Readouts = NOTHING) -> KeptColumns | None:
        if self.keeps_all:
            return None
        B, visible = x.shape[0], None if mask is None else ops.visible_tokens(mask).expand(x.shape[0], -1)
        anticipated = read["anticipated"].detach().mT if "anticipated" in read else self._anticipated_logits(x.detach(), attn)
        features = None
        if self.config.needs_features:
            features = read["features"] if "features" in read else self._features(x.detach())
        selection = self._select(x.detach(), None if bias is None else bias.detach(), anticipated, visible, features, attn)
        if self.config.dropped == "merge":
            columns, bias = self._merge(x, bias, anticipated, selection, visible, features)
        else:
            columns = gather_tokens(x, selection.kept)
            bias = None if bias is None else ops.gather_bias(for_each(bias, B), selection.kept)
        return KeptColumns(columns, bias if selection.valid is None else self._hide(bias, selection, x), selection.kept)

    def _anticipated_logits(self, x: Tensor, attn: nn.Module) -> Tensor | None:
        """scale * q . k [B, H, N] of the query that the importance asks for, without computing k."""
        if self.config.importance not in KEYS or attn.prune.query_key_free:
            return None
        q = class_query(x, attn).detach() if self.q_mean is None else self.q_mean
        weight = key_map(q, attn)
        with full_precision(x):
            return weight @ x.to(weight.dtype).mT

    def _features(self, x: Tensor) -> Tensor:
        """What nearness is measured in, [B, N, r or D]."""
        return x if self.directions is None else x @ self.directions.to(x.dtype)

    def _select(
        self, x: Tensor, bias: Tensor | None, anticipated: Tensor | None, visible: Tensor | None, features: Tensor | None, attn: nn.Module
    ) -> ops.Selection:
        P = self.num_prefix_tokens
        importance = self._importance(x, bias, anticipated, visible, attn)  # [B, N]
        patches, seen = importance[:, P:], None if visible is None else visible[:, P:]
        if self.config.rule == "topk":
            width = ops.num_kept(x.shape[1], P, self.keep_ratio) - P
            count = None if seen is None else ops.num_kept_visible(seen, self.keep_ratio)
            ranked = self._spread(patches, features, seen, count, width) if self.spreads else self._draw(patches, x)
        else:
            ranked, count = patches, self._count(importance, visible)
            width = int(count.max())  # the largest of the batch
        if seen is not None:
            ranked = ranked.masked_fill(~seen, float("-inf"))
        return ops.select(ranked, num_prefix=P, width=width, count=count)

    def _importance(self, x: Tensor, bias: Tensor | None, anticipated: Tensor | None, visible: Tensor | None, attn: nn.Module) -> Tensor:
        """[B, N] float32; of PROBABILITIES a probability, or H times it where only the ranking counts."""
        if self.config.importance == "random":
            return noise.uniform(self._keys(x), x.shape[1])
        if self.config.importance == "grid":
            return torch.ones(x.shape[:2], device=x.device, dtype=torch.float32)
        if self.config.importance == "value_norm":
            return value_norm(x, attn)
        logits = for_each(sum_of(bias, anticipated), x.shape[0]).float()
        if self.config.importance != "logit":
            hidden = logits if visible is None else logits.masked_fill(~visible[:, None], torch.finfo(logits.dtype).min)
            logits = hidden.softmax(-1)
        ranks_alone = self.config.rule == "topk" and self.config.sampling == "topk"
        return logits.sum(1) if ranks_alone else logits.mean(1)  # the same ranking, with an operation less

    def _draw(self, importance: Tensor, x: Tensor) -> Tensor:
        """Gumbel-top-k: the largest of log p + Gumbel noise are a draw without replacement. A logit is a log p already."""
        if self.config.sampling == "topk" or self.config.importance == "random":
            return importance
        log_p = importance if self.config.importance == "logit" else importance.log()
        return log_p + noise.gumbel(self._keys(x), importance.shape[1])

    def _spread(self, importance: Tensor, features: Tensor, seen: Tensor | None, count: Tensor | None, width: int) -> Tensor:
        """Systematic sampling, of a grid or by the geometric mean of importance and novelty, [B, n]."""
        weight = importance
        if self.config.sampling == "systematic":
            weight = (sampling.above_zero(importance) * sampling.novelty(features[:, self.num_prefix_tokens :], seen)).sqrt()
        if count is None:
            return sampling.systematic(weight, torch.full((weight.shape[0], 1), width, device=weight.device))
        return sampling.systematic(weight * seen, count[:, None])

    def _keys(self, x: Tensor) -> Tensor:
        """[B], one key of the noise per image."""
        if not self.training:
            return torch.full((x.shape[0],), self.key, device=x.device)
        return noise.mix((self.training_key + torch.arange(x.shape[0], device=x.device)) & noise.LOW_32_BITS)

    def step(self, progress: float) -> None:
        self.training_key.fill_(noise.block_key(self.config.seed, self.block, round(progress * noise.LOW_32_BITS)))

    def _count(self, probability: Tensor, visible: Tensor | None) -> Tensor:
        """[B], kept patches per image by the rules mass and threshold, at least 1."""
        patches = probability[:, self.num_prefix_tokens :]
        if self.config.rule == "mass":
            return ops.smallest_mass(patches, self.config.tau)
        num_tokens = probability.shape[1] if visible is None else visible.sum(-1, keepdim=True)
        above = patches * num_tokens >= self.config.tau - ops.ROUNDING
        return above.sum(-1).clamp(min=1)

    def _merge(
        self, x: Tensor, bias: Tensor | None, anticipated: Tensor | None, selection: ops.Selection, visible: Tensor | None, features: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Members of a cluster weigh by the logit that is expected of them: b, and the anticipated part where it is calibrated."""
        bias, expected = None if bias is None else for_each(bias, x.shape[0]), sum_of(bias, anticipated)
        weight = x.new_zeros(x.shape[:2]) if expected is None else for_each(expected, x.shape[0]).mean(1)
        return ops.merge(x, bias, selection, features=features, num_prefix=self.num_prefix_tokens, weight=weight, visible=visible)

    @staticmethod
    def _hide(bias: Tensor | None, selection: ops.Selection, x: Tensor) -> Tensor:
        bias = x.new_zeros(x.shape[0], 1, selection.kept.shape[1]) if bias is None else bias
        return bias.masked_fill(~selection.valid[:, None], float("-inf"))

    def macs(self, num_tokens: int, num_columns: int | None = None, *, query_key_free: bool = False, riding: bool = False) -> int:
        """What the selection costs for one image: the anticipated logits of column_mean and the assignment of merge.

        num_columns: M under the rules mass and threshold, where it depends on the image. query_key_free: no keys to anticipate.
        riding: the `readouts` are computed, and counted, with the queries.
        """
        by_topk = self.config.rule == "topk"
        if by_topk and self.keep_ratio == 1.0:
            return 0
        importance, A, total = self.config.importance, self.num_heads * self.head_dim, 0
        if importance in KEYS and not query_key_free and not (riding and importance == "column_mean"):
            total += A * self.dim + num_tokens * self.num_heads * self.dim  # W_k^T q, and its product with each x
            total += A * self.dim if importance == "class_attention" else 0  # its query
        if importance == "value_norm":
            total += num_tokens * A * self.dim
        P, rank = self.num_prefix_tokens, self.dim if self.directions is None else self.directions.shape[1]
        if self.config.needs_features and self.directions is not None and not riding:
            total += num_tokens * self.dim * rank
        if self.config.sampling == "systematic":
            total += ((num_tokens - P) // 2) * (num_tokens - P - (num_tokens - P) // 2) * rank
        if self.config.dropped == "merge":
            M = ops.num_kept(num_tokens, P, self.keep_ratio) if by_topk else num_columns
            sources = num_tokens - (M if by_topk else P)  # where M varies, kept patches are compared too
            total += sources * (M - P) * rank
        return total

    def set_keep_ratio(self, ratio: float) -> None:
        """Raises: ValueError outside (0, 1] or where the rule has no keep ratio."""
        check_ratio(ratio)
        if self.config.rule != "topk":
            raise ValueError(f"the rule {self.config.rule} takes tau, not keep; patch again to change it")
        self.keep_ratio = ratio


def sum_of(bias: Tensor | None, anticipated: Tensor | None) -> Tensor:
    """The logits that are known before the queries are, [B, H or 1, N]."""
    if bias is None or anticipated is None:
        return anticipated if bias is None else bias
    return bias + anticipated


def for_each(bias: Tensor, batch: int) -> Tensor:
    """[B or 1, H, N] -> [B, H, N]."""
    return bias if bias.shape[0] == batch else bias.expand(batch, -1, -1)
