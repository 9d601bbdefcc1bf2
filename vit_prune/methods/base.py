"""The contract of a method: what it may do inside one block, and what the block hands to it.

B batch, N tokens, M kept columns, H heads, D width.  x [B, N, D] is the normed block input.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor, nn

from vit_prune.methods.state import Tokens
from vit_prune.ops.heads import HeadGroup

Readouts = Mapping[str, Tensor]
NOTHING: Readouts = MappingProxyType({})
PROVIDERS = ("columns", "gate", "span", "merge")  # one method at most answers each of these


class BlockCalibration(NamedTuple):
    """What `vp.calibrate` measured in one block: q_mean [H, d], the mean query; directions [D, r], principal directions of x."""

    q_mean: Tensor
    directions: Tensor


@dataclass(frozen=True)
class Host:
    """The block that a method is built for."""

    name: str  # "blocks.3.attn"
    index: int
    depth: int
    dim: int
    num_heads: int
    head_dim: int
    num_prefix_tokens: int
    has_class_token: bool = True
    has_key_norm: bool = False
    calibration: BlockCalibration | None = None


class HeadGate(NamedTuple):
    """What each head's output is scaled by, and which heads run.

    weight: [B, H] float32. groups: the heads that run, by image; the others are not computed (None: all run).
    budget: s [B], the share of the heads that each image asks for. relevance: p [B, H], what it expects of each head; they sum to 1.
    """

    weight: Tensor
    groups: tuple[HeadGroup, ...] | None
    budget: Tensor
    relevance: Tensor


class KeptColumns(NamedTuple):
    """The columns that attention sees: x [B, M, D], bias [B, H or 1, M] (contiguous) or None, index [B, M] into the tokens (None: all N in order).

    gate: of the heads; None leaves them as they are.
    """

    x: Tensor
    bias: Tensor | None
    index: Tensor | None
    gate: HeadGate | None = None


class Method(nn.Module):
    """One method in one block. Every hook does nothing until a subclass answers it.

    `bias` may be answered by any number of methods: their biases add. Each hook in PROVIDERS may be answered by one.
    """

    query_key_free = False  # True: attention in this block is softmax(bias) v
    reads = False  # True: the method has `readouts`, and `bias` and `columns` take one more keyword, `read`
    needs_bias = ""  # what the method calls itself where it cannot work without a bias
    config: "MethodConfig"

    @property
    def keeps_all(self) -> bool:
        """False: fewer columns may stay than there are tokens."""
        return not self.answers("columns")

    def readouts(self, attn: nn.Module) -> dict[str, Tensor]:
        """Linear maps of x that `bias` and `columns` read, name -> weight [rows, D].

        In a fused model their rows ride in the query projection, and the two hooks get the results as `read`: name -> [B, N, rows].
        """
        return {}

    def bias(self, x: Tensor) -> Tensor | None:
        """[B, H or 1, N], added to the logits of each column after scaling."""

    def columns(self, x: Tensor, bias: Tensor | None, *, attn: nn.Module, mask: Tensor | None) -> KeptColumns | None:
        """The columns to attend to; None keeps all. `mask` is the host's, [B or 1, H or 1, N or 1, N]."""

    def gate(self, x: Tensor, *, mask: Tensor | None, sizes: Tensor | None) -> HeadGate | None:
        """Weights of the heads, and which of them run. sizes [B, N]: tokens that each one holds, hidden ones not counted, where tokens merge."""

    def losses(self, gate: HeadGate) -> dict[str, Tensor]:
        """Auxiliary losses by name, each a mean over the batch, of what `gate` returned; collected by `vp.losses`."""
        return {}

    def span(self, x: Tensor, *, mask: Tensor | None):
        """How far each head looks."""

    def merge(self, x: Tensor, metric: Tensor, tokens: Tokens):
        """Merged tokens [B, N - r, D] and what they stand for, between attention and MLP; metric [B, N, d] is the head-mean key."""

    def step(self, progress: float) -> None:
        """Called by the trainer before each batch, with the share of training that is done, in [0, 1]."""

    def macs(self, num_tokens: int) -> int:
        """Multiply-accumulates that this method adds to its block, for a batch of one image."""
        return 0

    @classmethod
    def answers(cls, hook: str) -> bool:
        return getattr(cls, hook) is not getattr(Method, hook)


class MethodConfig:
    """Base of the frozen dataclasses that users write; `name` is the child's name in the state dict and the config file."""

    name: str

    def build(self, host: Host) -> Method | None:
        """The module for one block; None where the method leaves this block alone."""
        raise NotImplementedError

    def expand(self) -> tuple["MethodConfig", ...]:
        """The configs that this one is short for."""
        return (self,)

    def to_dict(self) -> dict:
        """JSON-able: {"name": ..., field: value, ...}."""
        return {"name": self.name, **asdict(self)}


def check_providers(methods: Sequence[Method]) -> None:
    """Raises: ValueError that names both methods where two answer the same hook."""
    for hook in PROVIDERS:
        names = [type(method).__name__ for method in methods if method.answers(hook)]
        if len(names) > 1:
            raise ValueError(f"{' and '.join(names)} both provide `{hook}`; a block takes one")


def set_progress(model: nn.Module, progress: float) -> None:
    """Tell every method the share of training that is done, in [0, 1]: before each batch, as tools/train.py does. Raises: ValueError outside."""
    if not isinstance(progress, Real) or not 0 <= progress <= 1:
        raise ValueError(f"progress must be in [0, 1], the share of the training that is done, got {progress!r}")
    for module in model.modules():
        if isinstance(module, Method):
            module.step(progress)
