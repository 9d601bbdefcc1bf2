"""What the token bias, the selection and the gates do in each block: a row per block, for layers.csv and TensorBoard.

Legend: B batch, N tokens, M kept columns, H heads.
"""

import torch
from torch import Tensor, nn

from vit_prune.methods.base import HeadGate, KeptColumns
from vit_prune.methods.stack import Prune, columns_methods, prune_stacks


@torch.inference_mode()
def layer_statistics(model: nn.Module, images: Tensor) -> list[dict]:
    """One row per patched block, measured in one forward of a batch; none where nothing is patched.

    Returns: {"block", "keep": its ratio or None, "columns", "columns_min", "columns_max": M, mean and extremes over the batch, "tokens": N,
        "bias_std": over the tokens, mean over images and heads, "bias_max": largest magnitude, "kept_mass": share of softmax(bias) that the
        kept columns hold, "weight_norm": of W_b, "heads": that run, mean over the batch, "budget": s, mean over the batch, "budget_std": over
        the batch, "entropy": of p in nats, mean over the batch}. What a block has not is None.
    """
    stacks, rows = prune_stacks(model), []
    if not stacks:
        return []
    training = model.training

    def measure(stack: Prune, args: tuple[Tensor], kept: KeptColumns) -> None:
        rows.append({"block": len(rows)} | columns_row(stack, args[0], kept) | bias_row(stack, args[0], kept) | gate_row(kept.gate))

    handles = [stack.register_forward_hook(measure) for stack in stacks]
    try:
        model.eval()(images)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return rows


def columns_row(stack: Prune, x: Tensor, kept: KeptColumns) -> dict:
    """x [B, N, D] is the block's normed input: N, the keep ratio, and mean and extremes of M over the batch."""
    columns = num_columns(kept, x.shape[0])
    ratios = [method.keep_ratio for method in columns_methods(stack)]
    return {
        "tokens": x.shape[1],
        "keep": ratios[0] if ratios else None,
        "columns": columns.float().mean().item(),
        "columns_min": int(columns.min()),
        "columns_max": int(columns.max()),
    }


def bias_row(stack: Prune, x: Tensor, kept: KeptColumns) -> dict:
    """x [B, N, D] is the block's normed input: what its bias of all N tokens is like, before the selection."""
    biases = [bias for method in stack.biases if (bias := method.bias(x)) is not None]
    if not biases:
        return dict.fromkeys(("bias_std", "bias_max", "kept_mass", "weight_norm"))
    bias = sum(biases).float()  # [B, H or 1, N]
    weights = [method.weight for method in stack.biases if hasattr(method, "weight")]
    return {
        "bias_std": bias.std(-1).mean().item(),
        "bias_max": bias.abs().max().item(),
        "kept_mass": kept_mass(bias, kept),
        "weight_norm": torch.stack([weight.norm() for weight in weights]).norm().item() if weights else None,
    }


def gate_row(gate: HeadGate | None) -> dict:
    if gate is None:
        return dict.fromkeys(("heads", "budget", "budget_std", "entropy"))
    return {
        "heads": num_heads(gate).float().mean().item(),
        "budget": gate.budget.mean().item(),
        "budget_std": gate.budget.std(correction=0).item(),
        "entropy": torch.special.entr(gate.relevance).sum(-1).mean().item(),
    }


def kept_mass(bias: Tensor, kept: KeptColumns) -> float:
    """Share of softmax(bias), mean over heads and images, in the kept columns."""
    if kept.index is None:
        return 1.0
    mass = bias.softmax(-1).mean(1).gather(1, kept.index)  # [B, M]
    if kept.bias is not None:
        mass = mass.masked_fill(kept.bias.isneginf().all(1), 0)
    return mass.sum(-1).mean().item()


def num_columns(kept: KeptColumns, batch: int) -> Tensor:
    """M of each image, [B]: all columns of the padded batch but those that a bias of -inf hides."""
    if kept.bias is None:
        return torch.full((batch,), kept.x.shape[1], device=kept.x.device)
    return (~kept.bias.isneginf()).all(1).sum(-1).expand(batch)


def num_heads(gate: HeadGate) -> Tensor:
    """Heads that run in each image, [B]."""
    B, H = gate.weight.shape
    counts = torch.full((B,), H, device=gate.weight.device)
    for images, heads in gate.groups or ():
        counts[slice(None) if images is None else images] = heads.shape[1]
    return counts
