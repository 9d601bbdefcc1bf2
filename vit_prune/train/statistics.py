"""What the token bias, the selection and the gates do in each block: a row per block, for layers.csv and TensorBoard.

Legend: B batch, N tokens, M kept columns, H heads.
"""

import torch
from torch import Tensor, nn

from vit_prune.methods.base import HeadGate, KeptColumns
from vit_prune.methods.stack import Prune, columns_methods, prune_stacks
from vit_prune.ops.columns import visible_tokens


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

    def measure(stack: Prune, args: tuple[Tensor], given: dict, kept: KeptColumns) -> None:
        x, mask = args[0], given.get("mask")
        visible = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else visible_tokens(mask).expand(x.shape[0], -1)
        rows.append({"block": len(rows)} | columns_row(stack, visible, kept) | bias_row(stack, x, visible, kept) | gate_row(kept.gate))

    handles = [stack.register_forward_hook(measure, with_kwargs=True) for stack in stacks]
    try:
        model.eval()(images)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return rows


def columns_row(stack: Prune, visible: Tensor, kept: KeptColumns) -> dict:
    """visible [B, N]: tokens that are no padding. Their number, the keep ratio, and mean and extremes of M over the batch."""
    tokens = visible.sum(-1)
    columns = tokens if kept.index is None else num_columns(kept, len(visible))
    ratios = [method.keep_ratio for method in columns_methods(stack)]
    return {
        "tokens": int(tokens[0]) if bool((tokens == tokens[0]).all()) else tokens.float().mean().item(),
        "keep": ratios[0] if ratios else None,
        "columns": columns.float().mean().item(),
        "columns_min": int(columns.min()),
        "columns_max": int(columns.max()),
    }


def bias_row(stack: Prune, x: Tensor, visible: Tensor, kept: KeptColumns) -> dict:
    """x [B, N, D] is the block's normed input: what its bias of all visible [B, N] tokens is like, before the selection."""
    biases = [bias for method in stack.biases if (bias := method.bias(x)) is not None]
    if not biases:
        return dict.fromkeys(("bias_std", "bias_max", "kept_mass", "weight_norm"))
    bias = sum(biases).float()  # [B, H or 1, N]
    weights = [method.weight for method in stack.biases if hasattr(method, "weight")]
    return {
        "bias_std": torch.stack([spread(one[:, seen]) for one, seen in zip(bias, visible, strict=True)]).mean().item(),
        "bias_max": (bias.abs() * visible[:, None]).max().item(),
        "kept_mass": kept_mass(bias.masked_fill(~visible[:, None], -torch.inf), kept),
        "weight_norm": torch.stack([weight.norm() for weight in weights]).norm().item() if weights else None,
    }


def spread(bias: Tensor) -> Tensor:
    """Standard deviation over the tokens, mean over the heads, of one image: [H or 1, n]; 0 of a single token."""
    return bias.std(-1, correction=min(1, bias.shape[-1] - 1)).mean()


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
