"""How long each text is, and what its gates gave it, noted while a model is evaluated.  n texts, B batch, L gated blocks, s budget, k heads that run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vit_prune.methods.base import KeptColumns
from vit_prune.methods.stack import Prune, prune_stacks
from vit_prune.text.encoder import visible_ids
from vit_prune.train.statistics import num_heads


@dataclass
class TextRecord:
    """One entry per batch; in `gates` one per gated block of each batch, in order."""

    blocks: int  # L
    batches: list[Tensor] = field(default_factory=list)  # tokens of each text, [B]
    gates: list[Tensor] = field(default_factory=list)  # s and k of each text, [B, 2] float64

    def note_ids(self, _model: nn.Module, args: tuple[Tensor]) -> None:
        self.batches.append(visible_ids(args[0]).sum(1).cpu())

    def note_gate(self, _stack: Prune, _args: tuple[Tensor], kept: KeptColumns) -> None:
        self.gates.append(torch.stack([kept.gate.budget.double(), num_heads(kept.gate).double()], -1).cpu())

    @property
    def lengths(self) -> Tensor:
        """Tokens of each text, padding not counted, [n] int64."""
        return torch.cat(self.batches)

    @property
    def budget_and_heads(self) -> tuple[Tensor, Tensor] | None:
        """s [n, L] and k [n, L], each float64; None where no heads are gated."""
        if not self.blocks:
            return None
        starts = range(0, len(self.gates), self.blocks)
        return torch.cat([torch.stack(self.gates[start : start + self.blocks], 1) for start in starts]).unbind(-1)

    def summary(self) -> dict:
        """Means over the texts: {"tokens", "budget", "heads", "heads_spread": standard deviation over the texts of a text's mean over the blocks,
        "heads_per_block"}; all but the tokens None where no heads are gated."""
        tokens = {"tokens": self.lengths.double().mean().item()}
        if self.budget_and_heads is None:
            return tokens | dict.fromkeys(("budget", "heads", "heads_spread", "heads_per_block"))
        budget, heads = self.budget_and_heads
        of_texts = heads.mean(1)
        means = {"budget": budget.mean().item(), "heads": heads.mean().item(), "heads_per_block": heads.mean(0).tolist()}
        return tokens | means | {"heads_spread": of_texts.std(correction=0).item()}


@contextmanager
def recorded(model: nn.Module) -> Iterator[TextRecord]:
    """Hooks watch the model for that long."""
    gated = [stack for stack in prune_stacks(model) if stack.gaters]
    record = TextRecord(len(gated))
    handles = [model.register_forward_pre_hook(record.note_ids), *(stack.register_forward_hook(record.note_gate) for stack in gated)]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()
