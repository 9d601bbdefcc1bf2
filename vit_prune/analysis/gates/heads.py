"""What each head of one block looks at, those that do not run included.

B batch, N tokens (queries), M kept columns, H heads, d head dim, P prefix tokens, n patches.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vit_prune.analysis.gates.record import gated_blocks
from vit_prune.methods.base import HeadGate, KeptColumns
from vit_prune.methods.stack import Prune, prune_stacks
from vit_prune.ops.precision import at_least_float32, full_precision
from vit_prune.ops.reference import additive, safe_softmax
from vit_prune.patch.heads import queries_keys_values
from vit_prune.patch.timm import PrunedAttention, kept_mask


class HeadMaps(NamedTuple):
    """weights [H, N, N]: attention of each query (row) over all tokens, 0 for columns that were not kept; relevance: p [H]; runs [H] bool. By p, falling."""

    heads: Tensor  # [H] int64, the number of each
    weights: Tensor
    relevance: Tensor
    runs: Tensor


@torch.no_grad()
def head_maps(model: nn.Module, inputs: Tensor, block: int | None = None) -> HeadMaps:
    """Of a batch of one input, in the block of that number (None: the last), on the CPU.

    Raises: ValueError for a model without gates, one whose tokens merge, a block that is not there, and for several inputs.
    """
    stack, training, found = chosen_stack(model, block), model.training, []
    if len(inputs) != 1:
        raise ValueError(f"attention maps are of one input, got {len(inputs)}")
    handle = stack.register_forward_hook(lambda _stack, args, given, kept: found.append(maps_of(args[0], given, kept)), with_kwargs=True)
    try:
        model.eval()(inputs)
    finally:
        handle.remove()
        model.train(training)
    weights, gate = found[0]
    relevance, runs = gate.relevance[0].cpu(), running(gate)[0].cpu()
    order = relevance.argsort(descending=True, stable=True)
    return HeadMaps(order, weights[0].cpu()[order], relevance[order], runs[order])


def chosen_stack(model: nn.Module, block: int | None) -> Prune:
    """Of the block with that number among all."""
    gated = gated_blocks(model)
    if any(stack.mergers for stack in prune_stacks(model)):
        raise ValueError("the tokens of this model merge (ToMe), so its attention is not over the patches of the image: there are no maps to draw")
    block = max(gated) if block is None else block
    if block not in gated:
        raise ValueError(f"block must be one with gates, from {min(gated)} to {max(gated)}, got {block}")
    return gated[block]


def maps_of(x: Tensor, given: dict, kept: KeptColumns) -> tuple[Tensor, HeadGate]:
    """x [B, N, D] and `given` are what the stack was called with -> [B, H, N, N], and the gate."""
    weights = attention_weights(given["attn"], x, kept, given["mask"])
    return on_all_tokens(weights, kept.index, x.shape[1]), kept.gate


def attention_weights(attn: PrunedAttention, x: Tensor, kept: KeptColumns, mask: Tensor | None) -> Tensor:
    """softmax(q k^T scale + bias + mask) of all heads, at least float32, x [B, N, D] -> [B, H, N, M]; in a query-key-free block softmax(bias + mask)."""
    B, N, H = *x.shape[:2], attn.num_heads
    q, k, _ = queries_keys_values(attn, x, kept.x, torch.arange(H, device=x.device).expand(B, H))
    wide = at_least_float32(x)
    with full_precision(x):
        logits = torch.zeros(B, H, N, kept.x.shape[1], dtype=wide, device=x.device) if q is None else (q.to(wide) * attn.scale) @ k.to(wide).mT
    if kept.bias is not None:
        logits = logits + kept.bias[:, :, None, :]
    if (mask := kept_mask(mask, kept)) is not None:
        logits = logits + additive(mask, wide)
    return safe_softmax(logits)


def on_all_tokens(weights: Tensor, index: Tensor | None, num_tokens: int) -> Tensor:
    """weights [B, H, N, M] of the columns index [B, M] -> [B, H, N, num_tokens]."""
    if index is None:
        return weights
    whole = weights.new_zeros(*weights.shape[:3], num_tokens)
    return whole.scatter_add(3, index[:, None, None].expand_as(weights), weights)


def running(gate: HeadGate) -> Tensor:
    """[B, H] bool: which heads run in which image."""
    if gate.groups is None:
        return torch.ones_like(gate.weight, dtype=torch.bool)
    runs = torch.zeros_like(gate.weight, dtype=torch.bool)
    for images, heads in gate.groups:
        rows = torch.arange(len(runs), device=heads.device) if images is None else images
        runs[rows[:, None], heads] = True
    return runs


def over_patches(model: nn.Module, weights: Tensor) -> Tensor:
    """weights [H, N, P + n] -> [H, n]: the class token's row, or the mean over all queries where the model has no class token."""
    row = weights[:, 0] if getattr(model, "has_class_token", False) else weights.mean(1)
    return row[:, model.num_prefix_tokens :]
