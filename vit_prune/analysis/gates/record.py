"""What every gate gave to every input, beside what the model made of it.

n inputs, B batch, L gated blocks, H heads, s budget, p relevance of the heads, k heads that run.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_prune.methods.base import KeptColumns
from vit_prune.methods.stack import Prune, prune_stacks
from vit_prune.train.evaluation.kept import KeptCounter
from vit_prune.train.progress import progress_bar
from vit_prune.train.statistics import num_heads

NO_GATES = "the model has no gates: there is nothing to analyse; models with BudgetFormer have them (vit_mini28_budget, deit_s_budget, text_4l8h_budget, ...)"


@dataclass(frozen=True)
class GateRecord:
    """One row per input, on the CPU.

    budget: s [n, L]. entropy: of p in nats [n, L]. heads: k [n, L] int64. label [n] int64. loss: cross-entropy in nats [n]. right [n] bool.
    blocks: number of each of the L gated blocks among all. num_heads: H of each. counted: what `KeptCounter.result` gives.
    """

    budget: Tensor
    entropy: Tensor
    heads: Tensor
    label: Tensor
    loss: Tensor
    right: Tensor
    blocks: tuple[int, ...]
    num_heads: tuple[int, ...]
    counted: dict

    def __len__(self) -> int:
        return len(self.label)


def gated_blocks(model: nn.Module) -> dict[int, Prune]:
    """The blocks with gates, by their number among all. Raises: ValueError where there is none."""
    gated = {block: stack for block, stack in enumerate(prune_stacks(model)) if stack.gaters}
    if not gated:
        raise ValueError(NO_GATES)
    return gated


@torch.no_grad()
def collect(model: nn.Module, loader: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> GateRecord:
    """Every input of the loader through the model in eval mode; the model is on `device`.

    Args: loader: (inputs, targets [B]) of any kind that the model takes; targets below zero are left out: what could not be read.
    Raises: ValueError for a model without gates, where no input is left, and for outputs that are not finite.
    """
    gated, training = gated_blocks(model), model.training
    seen: dict[int, Tensor] = {}  # of the batch that is under way: s, entropy of p, k of each input, [B, 3] by block
    handles = [stack.register_forward_hook(watch(seen, block)) for block, stack in gated.items()]
    rows = []
    try:
        model.eval()
        with KeptCounter(model, loader, device) as counted, progress_bar("gates", loader) as bar:
            for inputs, targets in counted:
                logits = model(placed(inputs, model, device)).float()
                rows.append(batch_rows(torch.stack([seen[block] for block in gated], 1), logits, targets.to(device)))
                bar.update(len(targets))
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return joined(rows, gated, counted.result())


def watch(seen: dict[int, Tensor], block: int) -> Callable:
    """A forward hook for the block's stack."""

    def hook(_stack: Prune, _args: tuple[Tensor], kept: KeptColumns) -> None:
        gate = kept.gate
        entropy = torch.special.entr(gate.relevance).sum(-1)
        seen[block] = torch.stack([gate.budget, entropy, num_heads(gate).to(entropy)], -1).double()

    return hook


def placed(inputs: Tensor, model: nn.Module, device: torch.device) -> Tensor:
    """On the device; images in the model's dtype, numbers of words as they are."""
    dtype = next(model.parameters()).dtype if inputs.is_floating_point() else inputs.dtype
    return inputs.to(device, dtype, non_blocking=True)


def batch_rows(gates: Tensor, logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """gates [B, L, 3], label, loss and right [B], of the inputs whose target is a class; on the CPU."""
    keep = targets >= 0
    gates, logits, targets = gates[keep], logits[keep], targets[keep]
    loss = F.cross_entropy(logits, targets, reduction="none").double()
    return gates.cpu(), targets.cpu(), loss.cpu(), (logits.argmax(-1) == targets).cpu()


def joined(rows: list[tuple[Tensor, ...]], gated: dict[int, Prune], counted: dict) -> GateRecord:
    if not sum(len(label) for _, label, *_ in rows):
        raise ValueError("none of the inputs could be read: there is nothing to analyse")
    gates, label, loss, right = map(torch.cat, zip(*rows, strict=True))
    if not loss.isfinite().all():
        raise ValueError(f"{int((~loss.isfinite()).sum())} of {len(loss)} losses are not finite: the weights give no finite outputs on this data")
    budget, entropy, heads = gates.unbind(-1)
    num_heads = tuple(stack.gaters[0].num_heads for stack in gated.values())
    return GateRecord(budget, entropy, heads.long(), label, loss, right, tuple(gated), num_heads, counted)
