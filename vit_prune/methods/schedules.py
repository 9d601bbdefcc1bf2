"""Keep schedules: one keep ratio per block, in one grammar for Python, YAML and flags.

0.5                the same in every block
linear:1.0:0.3     from the first block to the last
cosine:1.0:0.3     the same ends, flat at both
step:1.0:0.5:6     1.0 in blocks 0 to 5, 0.5 from block 6 on
1,1,.9,.7          one ratio per block
"""

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

ARGUMENTS = {"linear": ("START", "END"), "cosine": ("START", "END"), "step": ("START", "END", "BLOCK")}


@dataclass(frozen=True)
class Keep:
    """A keep schedule. `str` of it is the grammar above; `ratios(depth)` is one float per block."""

    kind: str  # constant, linear, cosine, step, list
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        for ratio in self.values[:2] if self.kind == "step" else self.values:
            check_ratio(ratio)
        if self.kind == "step" and not (isinstance(self.values[2], Real) and self.values[2] >= 0 and self.values[2] % 1 == 0):
            raise ValueError(f"step:START:END:BLOCK takes a block number, got {self.values[2]}")

    def ratios(self, depth: int) -> tuple[float, ...]:
        """One keep ratio per block. Raises: ValueError where a list has another length than the model, or a step lies outside."""
        if self.kind == "list" and len(self.values) != depth:
            raise ValueError(f"keep lists {len(self.values)} ratios, the model has {depth} blocks")
        if self.kind == "step" and self.values[2] > depth:
            raise ValueError(f"keep steps at block {self.values[2]:g}, the model has {depth} blocks")
        return self.values if self.kind == "list" else tuple(self._ratio(block, depth) for block in range(depth))

    def _ratio(self, block: int, depth: int) -> float:
        if self.kind == "constant":
            return self.values[0]
        start, end = self.values[:2]
        if self.kind == "step":
            return end if block >= self.values[2] else start
        share = block / max(1, depth - 1)
        if self.kind == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return start + (end - start) * share

    def __str__(self) -> str:
        values = [_shortest(value) for value in self.values]
        if self.kind == "list":
            return ",".join(values) + ("," if len(values) == 1 else "")
        return values[0] if self.kind == "constant" else ":".join([self.kind, *values])


def _shortest(value: float) -> str:
    """The shortest text that reads back as the same float."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(float(value))


def check_ratio(ratio: float) -> None:
    """Raises: ValueError unless 0 < ratio <= 1."""
    if isinstance(ratio, bool) or not isinstance(ratio, Real) or not 0 < ratio <= 1:
        raise ValueError(f"keep must be in (0, 1], got {ratio!r}")


def constant(ratio: float) -> Keep:
    """The same keep ratio in every block."""
    return Keep("constant", (ratio,))


def linear(start: float, end: float) -> Keep:
    """`start` in the first block, `end` in the last, in equal steps between."""
    return Keep("linear", (start, end))


def cosine(start: float, end: float) -> Keep:
    """`start` in the first block, `end` in the last, along half a cosine."""
    return Keep("cosine", (start, end))


def step(start: float, end: float, block: int) -> Keep:
    """`start` before `block`, `end` from it on."""
    return Keep("step", (start, end, block))


def parse_keep(value: "Keep | float | str | Sequence[float]") -> Keep:
    """A schedule from whatever a user types: a Keep, a number, the grammar's text, or a list with one ratio per block.

    Raises: ValueError that names what was given and what is valid.
    """
    if isinstance(value, Keep):
        return value
    if isinstance(value, Real):
        return constant(value)
    if isinstance(value, str):
        return _parse_text(value.strip())
    if isinstance(value, Sequence) and value:
        return Keep("list", tuple(_number(part, str(value)) if isinstance(part, str) else part for part in value))
    raise ValueError(f"keep must be a ratio, a schedule or a list of ratios, got {value!r}")


def _parse_text(text: str) -> Keep:
    if ":" in text:
        kind, *arguments = text.split(":")
        if kind not in ARGUMENTS:
            near = difflib.get_close_matches(kind, ARGUMENTS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"unknown keep schedule {kind!r}; there are {', '.join(ARGUMENTS)}{hint}")
        if len(arguments) != len(ARGUMENTS[kind]):
            raise ValueError(f"{kind} takes {':'.join((kind, *ARGUMENTS[kind]))}, got {text!r}")
        return Keep(kind, tuple(_number(argument, text) for argument in arguments))
    if "," in text:
        return Keep("list", tuple(_number(part, text) for part in text.rstrip(",").split(",")))
    return constant(_number(text, text))


def _number(part: str, text: str) -> float:
    try:
        return float(part)
    except ValueError:
        raise ValueError(f"keep must be a ratio, a list such as 1,1,.9 or one of {', '.join(ARGUMENTS)} with its ends; got {text!r}") from None
