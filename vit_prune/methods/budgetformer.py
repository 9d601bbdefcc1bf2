"""Head gating: each input gets a budget and a relevance of the heads; only the most relevant run.  *Adaptive Head Budgeting* (arXiv 2604.22583).

Legend: B batch, N tokens, H heads, D width, t/T share of training that is done.

    h = mean_i x_i        s = sigmoid(f(h))        z = g(h) + eps sigma_max (1 - t/T)        p = softmax(z / tau(t))        w = s H p

f is a two-layer ReLU MLP D -> D -> 1, g is linear D -> H, eps is standard normal in training. Head i's output is scaled by w_i. In training all heads
run; in evaluation the k = max(1, floor(s H)) heads of largest p, and the others are not computed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_prune.methods.base import HeadGate, Host, Method, MethodConfig
from vit_prune.ops import noise
from vit_prune.ops.columns import visible_tokens
from vit_prune.ops.heads import HeadGroup, group_by_count, strongest
from vit_prune.ops.precision import at_least_float32, full_precision

ENTROPY, SELECTION = ("explore", "literal"), ("relevance", "random")
ROUNDING = 1e-9  # of a fixed s H: .29 * 100 is 28.999999999999996
UNTRAINED, WHOLE = -1, 2**30  # of the buffer `progress`, which counts t/T in units of 1 / WHOLE
KEY_CHANNELS, KEY_STEP = 8, 2**-8  # channels of the mean token, and their rounding, that tell an image from others where heads are drawn
NOT_NEGATIVE = ("alpha_base", "alpha_max", "beta_max", "sigma_max", "gamma")
POSITIVE = ("tau_min", "tau_max")


@dataclass(frozen=True)
class BudgetFormer(MethodConfig):
    """Gates for the heads of every block. The defaults are the paper's, where it gives one.

    Args:
        s_min, s_max: the interval that the budget s is held in by its loss (a soft bound: nothing pushes s down inside it).
        alpha_base, alpha_max: weight of the budget loss, min(alpha_max, alpha_base + v) v^2 with v the distance from the interval.
        beta_max: the entropy loss is weighted by beta_max (2t/T - 1).
        entropy: "explore" rewards a high entropy of p early and a low one late, as the paper's text says; "literal" is the paper's formula,
            beta sum p log p, which does the opposite.
        sigma_max: standard deviation of the noise on z at t = 0; it falls to 0 linearly.
        tau_min, tau_max, gamma: the temperature tau_min + (tau_max - tau_min) exp(-gamma t/T).
        initial_budget: s of a fresh gate. Near 1, and p nearly uniform: w is near 1, the model nearly the function that it was.
        budget: a fixed s instead of a learnt one; f does not exist then.
        selection: "random" replaces p by a draw of the k heads, in training too, w = s H / k: the ablation.
        heads: k heads run in every image, whatever s says: static shapes, for torch.compile and ONNX; one number, or one per block. None: s decides.
        seed: of the heads that selection="random" draws in evaluation.
    """

    name: ClassVar[str] = "budgetformer"
    s_min: float = 0.1
    s_max: float = 0.9
    alpha_base: float = 0.001
    alpha_max: float = 0.05
    beta_max: float = 0.05
    entropy: str = "explore"
    sigma_max: float = 0.5
    tau_min: float = 0.1
    tau_max: float = 2.0
    gamma: float = 5.0
    initial_budget: float = 0.95
    budget: float | None = None
    selection: str = "relevance"
    heads: int | tuple[int, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.heads is not None:
            object.__setattr__(self, "heads", parse_heads(self.heads))
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed must be a whole number, got {self.seed!r}")
        for name in ("s_min", "s_max", "initial_budget", *NOT_NEGATIVE, *POSITIVE):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value!r}")
            object.__setattr__(self, name, float(value))  # JSON knows no numpy
        if not 0 <= self.s_min <= self.s_max <= 1:
            raise ValueError(f"the budget lies in 0 <= s_min <= s_max <= 1, got s_min={self.s_min}, s_max={self.s_max}")
        for names, valid, text in ((NOT_NEGATIVE, lambda value: value >= 0, ">= 0"), (POSITIVE, lambda value: value > 0, "> 0")):
            for name in names:
                if not valid(getattr(self, name)):
                    raise ValueError(f"{name} must be {text}, got {getattr(self, name)}")
        if not 0 < self.initial_budget < 1:
            raise ValueError(f"initial_budget must be in (0, 1), got {self.initial_budget}")
        if self.budget is not None and (isinstance(self.budget, bool) or not isinstance(self.budget, Real) or not 0 < self.budget <= 1):
            raise ValueError(f"budget must be in (0, 1], or None to learn it, got {self.budget!r}")
        if self.budget is not None:
            object.__setattr__(self, "budget", float(self.budget))
        for name, choices in (("entropy", ENTROPY), ("selection", SELECTION)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be {' or '.join(choices)}, got {getattr(self, name)!r}")

    def build(self, host: Host) -> "BudgetFormerMethod":
        return BudgetFormerMethod(self, host)

    def temperature(self, done: float | Tensor) -> float | Tensor:
        """tau at `done` = t/T."""
        decay = torch.exp(-self.gamma * done) if isinstance(done, Tensor) else math.exp(-self.gamma * done)
        return self.tau_min + (self.tau_max - self.tau_min) * decay

    def noise_scale(self, done: float | Tensor) -> float | Tensor:
        """Standard deviation of the noise on z at `done` = t/T."""
        return self.sigma_max * (1 - done)

    def entropy_weight(self, done: float | Tensor) -> float | Tensor:
        """beta at `done` = t/T."""
        return self.beta_max * (2 * done - 1)


class BudgetFormerMethod(Method):
    """The gate of one block. `heads` may be set at any time (`vp.set_heads`).

    A gate that no training has been told of (`vp.set_progress`) leaves all heads running in evaluation, with weight 1, unless `heads` or `budget`
    says how many run: floor(s H) is below H for every s < 1. Its buffer `progress` says so; it is in the state dict, whole (an average of weights copies it).
    """

    def __init__(self, config: BudgetFormer, host: Host) -> None:
        super().__init__()
        self.config, self.num_heads, self.dim = config, host.num_heads, host.dim
        self.heads = heads_in(config.heads, host.index, host.depth, host.num_heads)
        self.key = noise.block_key(config.seed, host.index)
        self.register_buffer("progress", torch.tensor(UNTRAINED))
        if config.budget is None:
            self.f1, self.f2 = nn.Linear(host.dim, host.dim), nn.Linear(host.dim, 1)
            nn.init.trunc_normal_(self.f1.weight, std=0.02)
            nn.init.zeros_(self.f1.bias)
            nn.init.zeros_(self.f2.weight)
            nn.init.constant_(self.f2.bias, math.log(config.initial_budget / (1 - config.initial_budget)))
        if config.selection == "relevance":
            self.g = nn.Linear(host.dim, host.num_heads)
            nn.init.trunc_normal_(self.g.weight, std=0.02)  # p is nearly uniform at tau_max; from exactly there no entropy loss would find a way out
            nn.init.zeros_(self.g.bias)

    def step(self, progress: float) -> None:
        self.progress.fill_(round(progress * WHOLE))

    @property
    def done(self) -> float | Tensor:
        """t/T, as good as 0 before any training: a number where reading it costs nothing, and a tensor in graphs and on devices that would have to wait."""
        progress = self.progress
        return (progress.item() if progress.is_cpu and not torch.compiler.is_compiling() else progress) / WHOLE

    @property
    def fixed_heads(self) -> int | None:
        """k where it is the same for every image, by `heads` or by a fixed budget."""
        if self.heads is not None or self.config.budget is None:
            return self.heads
        return max(1, math.floor(self.config.budget * self.num_heads + ROUNDING))

    @property
    def known_heads(self) -> int | None:
        """k where no image has to be seen for it: `fixed_heads`, or H where no training has been told of; None otherwise, and on `meta`."""
        untrained = self.fixed_heads is None and not self.progress.is_meta and self.progress < 0
        return self.num_heads if untrained else self.fixed_heads

    def gate(self, x: Tensor, *, mask: Tensor | None, sizes: Tensor | None) -> HeadGate:
        with full_precision(x):
            pooled = mean_token(x, mask, sizes)
            budget = self._budget(pooled)
            relevance = self._relevance(pooled) if self.config.selection == "relevance" else self._drawn(budget.squeeze(1), pooled)
            weight = relevance * (budget * self.num_heads)
        budget = budget.squeeze(1)
        if self.training:
            return HeadGate(weight, None, budget, relevance)
        k = self.fixed_heads
        return self._counted(weight, budget, relevance) if k is None else self._fixed(weight, budget, relevance, k)

    def _fixed(self, weight: Tensor, budget: Tensor, relevance: Tensor, k: int) -> HeadGate:
        groups = None if k == self.num_heads else (HeadGroup(None, strongest(relevance, k)),)
        return HeadGate(weight, groups, budget, relevance)

    def _counted(self, weight: Tensor, budget: Tensor, relevance: Tensor) -> HeadGate:
        """Each image's own k, which the host has to know: how much is computed depends on it."""
        untrained = self.progress < 0
        counts = torch.where(untrained, self.num_heads, self._count(budget)).tolist()
        weight = torch.where(untrained, torch.ones_like(weight), weight)
        groups = None if min(counts, default=self.num_heads) == self.num_heads else group_by_count(relevance, counts)
        return HeadGate(weight, groups, budget, relevance)

    def _count(self, budget: Tensor) -> Tensor:
        """k = max(1, floor(s H)) [B] int64."""
        return (budget * self.num_heads).floor().long().clamp(1, self.num_heads)  # a budget that is not finite gives some k too

    def _budget(self, pooled: Tensor) -> Tensor:
        """s [B, 1]."""
        if self.config.budget is not None:
            return pooled.new_full((pooled.shape[0], 1), self.config.budget)
        return wide_linear(self.f2, wide_linear(self.f1, pooled).relu()).sigmoid()

    def _relevance(self, pooled: Tensor) -> Tensor:
        """p [B, H]."""
        z, done = wide_linear(self.g, pooled), self.done
        if self.training:
            z = z + torch.randn_like(z) * self.config.noise_scale(done)
        return (z / self.config.temperature(done)).softmax(-1)

    def _drawn(self, budget: Tensor, pooled: Tensor) -> Tensor:
        """1 / k for k heads drawn at random, 0 for the others, [B, H]. In evaluation an image's draw is the same in every batch, in float32."""
        B, H = budget.shape[0], self.num_heads
        order = torch.rand(B, H, device=budget.device) if self.training else noise.uniform(self._keys(pooled), H)
        k = self._count(budget.detach())[:, None] if self.fixed_heads is None else torch.full_like(order[:, :1], self.fixed_heads)
        return (order.argsort(-1).argsort(-1) < k) / k

    def _keys(self, pooled: Tensor) -> Tensor:
        """[B] int64, of the image's own content, rounded more coarsely than a batch changes it."""
        keys = torch.full(pooled.shape[:1], self.key, device=pooled.device)
        for channel in (pooled[:, :KEY_CHANNELS].nan_to_num() / KEY_STEP).round().long().unbind(1):
            keys = noise.mix((keys + channel) & noise.LOW_32_BITS)
        return keys

    def losses(self, gate: HeadGate) -> dict[str, Tensor]:
        """ "budget": min(alpha_max, alpha_base + v) v^2; "entropy": beta(t) Entropy(p), or beta(t) sum p log p; what cannot learn has none."""
        config, losses = self.config, {}
        if config.budget is None:
            v = (config.s_min - gate.budget).clamp(min=0) + (gate.budget - config.s_max).clamp(min=0)
            losses["budget"] = ((config.alpha_base + v).clamp(max=config.alpha_max) * v**2).mean()
        if config.selection == "relevance":
            entropy = entropy_of(gate.relevance).mean()
            losses["entropy"] = config.entropy_weight(self.done) * (entropy if config.entropy == "explore" else -entropy)
        return losses

    def macs(self, num_tokens: int) -> int:
        """f and g, of one mean token."""
        learnt_budget = self.dim * self.dim + self.dim if self.config.budget is None else 0
        return learnt_budget + (self.dim * self.num_heads if self.config.selection == "relevance" else 0)


def entropy_of(relevance: Tensor) -> Tensor:
    """Of p [B, H] in nats, [B]; where p is 0 its gradient is large, not infinite."""
    return -(relevance * relevance.clamp(min=torch.finfo(relevance.dtype).tiny).log()).sum(-1)


def mean_token(x: Tensor, mask: Tensor | None, sizes: Tensor | None) -> Tensor:
    """[B, D]: the mean of the tokens that are visible, a merged one counted as often as it holds others. x [B, N, D], at least float32."""
    wide = at_least_float32(x)
    if mask is None and sizes is None:
        return x.mean(1, dtype=wide)
    share = (visible_tokens(mask) if sizes is None else sizes).to(wide).expand(x.shape[0], -1)
    return (share[:, :, None] * x).sum(1) / share.sum(1, keepdim=True).clamp(min=torch.finfo(wide).tiny)


def wide_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer in x's dtype."""
    weight, bias = layer.weight, layer.bias
    return F.linear(x, weight, bias) if weight.dtype == x.dtype else F.linear(x, weight.to(x.dtype), bias.to(x.dtype))


def heads_in(heads: int | Sequence[int] | None, block: int, depth: int, num_heads: int) -> int | None:
    """k of one block. Raises: ValueError for a list of another length than the model is deep, and for k outside 1..H."""
    if isinstance(heads, Sequence) and not isinstance(heads, str):
        if len(heads) != depth:
            raise ValueError(f"heads lists {len(heads)} numbers, the model has {depth} blocks")
        heads = heads[block]
    if heads is not None and (isinstance(heads, bool) or not isinstance(heads, int) or not 1 <= heads <= num_heads):
        raise ValueError(f"heads must be a number of heads in 1..{num_heads}, one per block, or None, got {heads!r}")
    return heads


def parse_heads(value: int | str | Sequence[int]) -> int | tuple[int, ...]:
    """k from whatever a user types: 2, "2", "6,4,2,2", or a list. Raises: ValueError that says what is valid."""
    if isinstance(value, str):
        parts = value.strip().rstrip(",").split(",")
        if all(part.strip().isdecimal() for part in parts):
            value = int(value) if "," not in value else tuple(map(int, parts))
    numbers = value if isinstance(value, Sequence) and not isinstance(value, str) and value else [value]
    if any(isinstance(number, bool) or not isinstance(number, int) or number < 1 for number in numbers):
        raise ValueError(f"heads must be a number of heads >= 1, or one per block (6,4,2,...), got {value!r}")
    return value if isinstance(value, int) else tuple(value)


def budget_decides(model: nn.Module) -> bool:
    """True where as many heads run as each image asks for, or would after a training."""
    return any(isinstance(module, BudgetFormerMethod) and module.fixed_heads is None for module in model.modules())
