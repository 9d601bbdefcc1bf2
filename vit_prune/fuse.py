"""The fast path for inference: `fast = vp.fuse(model.eval())`."""

from torch import nn

from vit_prune.methods.stack import prune_stacks
from vit_prune.patch.fused import fuse_attention, is_fused
from vit_prune.patch.timm import PrunedAttention, is_plain_linear


def fuse(model: nn.Module) -> nn.Module:
    """Let the methods' linear maps ride in the query projection, in place: the same outputs, with fewer and larger products.

    The token bias, the anticipated logits of `importance="column_mean"` and the directions of `dropped="merge"` become rows of one weight
    [Q + R + K + V, D] per block; the parameters are copied, not shared, and `qkv` is gone. One way: keep, or `copy.deepcopy`, the model for
    training, saving and `vp.unpatch`. Hooks, `impl` and timm's `fused_attn` are read now, and later weights change nothing. `vp.set_keep`,
    `.to(dtype)`, torch.compile and `vp.export_onnx` work on the fused model.

    Args: model: patched, in eval mode.
    Returns: the same model.
    Raises: ValueError for a model that is not patched, is fused already, or is in training mode; TypeError that names the qkv that is
        not a plain nn.Linear (LoRA, quantised, hooked). Nothing is changed then.
    """
    if not prune_stacks(model):
        raise ValueError("the model is not patched: there is nothing to fuse; call vp.patch first")
    if is_fused(model):
        raise ValueError("the model is fused already")
    if model.training:
        raise ValueError("vp.fuse is for inference: call model.eval() first")
    attentions = {name: module for name, module in model.named_modules() if type(module) is PrunedAttention}
    for name, attn in attentions.items():
        if not is_plain_linear(attn.qkv):
            kind = type(attn.qkv).__name__
            raise TypeError(f"{name}.qkv is a {kind} or has hooks, not a plain nn.Linear, and cannot be fused: merge adapters and remove hooks first")
    for attn in attentions.values():
        fuse_attention(attn)
    return model
