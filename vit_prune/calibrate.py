"""Calibration: one pass over unlabelled images that measures what training-free pruning needs.

B batch, N tokens, H heads, d head dim, D width, r directions.  x [B, N, D] is the normed block input.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from vit_prune.methods.base import BlockCalibration
from vit_prune.ops.columns import visible_tokens
from vit_prune.patch.check import check_host
from vit_prune.patch.timm import host_mask


@torch.no_grad()
def calibrate(model: nn.Module, loader: Iterable, *, rank: int = 32) -> nn.Module:
    """Measure the mean query and the principal directions of x in every block; kept as `model.calibration`, read by `patch`.

    Args:
        model: a timm ViT that is not patched; it is run in eval mode and left in the mode that it had.
        loader: batches of images [B, C, H, W], or (images, labels) whose labels are ignored, or NaFlexVit's dicts. One pass.
        rank: r, how many directions to hold for `Columns(dropped="merge")`.

    Returns: the same model. Raises: as `patch` for a host that is not supported; ValueError for an empty loader, images that
        are not float or not finite, or a rank outside 1..D.
    """
    check_host(model)
    if not 1 <= rank <= model.embed_dim:
        raise ValueError(f"rank must be in 1..{model.embed_dim}, got {rank}")
    sums = [BlockSums(block.attn) for block in model.blocks]
    training = {module: module.training for module in model.modules()}
    try:
        run_images(model.eval(), loader)
    finally:
        for module, mode in training.items():
            module.training = mode
        for block_sums in sums:
            block_sums.handle.remove()
    for block, block_sums in enumerate(sums):
        if not block_sums.moment.isfinite().all():
            raise ValueError(f"the input of block {block} is not finite: look for NaN in the images or the weights")
    model.calibration = [block_sums.result(rank) for block_sums in sums]
    return model


class BlockSums:
    """Running sums of one block, filled by a hook on its attention: of the queries [H, d], of x x^T [D, D], and how many tokens."""

    def __init__(self, attn: nn.Module) -> None:
        self.count = 0
        self.query = 0.0
        self.moment = 0.0
        self.handle = attn.register_forward_pre_hook(self.add, with_kwargs=True)

    def add(self, attn: nn.Module, args: tuple, kwargs: dict) -> None:
        x = args[0]
        q = attn.qkv(x)[..., : attn.attn_dim].unflatten(-1, (attn.num_heads, attn.head_dim))  # [B, N, H, d]
        mask = host_mask(kwargs.get("attn_mask"), kwargs.get("is_causal", False), x)
        real = slice(None) if mask is None else visible_tokens(mask).expand(x.shape[0], -1)
        q, x = attn.q_norm(q)[real].flatten(0, -3).double(), x[real].flatten(0, -2).double()
        self.query = self.query + q.sum(0)
        self.moment = self.moment + x.T @ x
        self.count += len(x)

    def result(self, rank: int) -> BlockCalibration:
        directions = torch.linalg.eigh(self.moment / self.count).eigenvectors[:, -rank:].flip(-1)  # [D, r], strongest first
        return BlockCalibration((self.query / self.count).float(), directions.float().contiguous())


def run_images(model: nn.Module, loader: Iterable) -> None:
    parameter = next(model.parameters())
    batches = 0
    for batch in loader:
        if isinstance(batch, Mapping):
            model({name: value.to(parameter.device) for name, value in batch.items()})
        else:
            images = batch if isinstance(batch, Tensor) else batch[0]
            if images.ndim != 4 or not images.is_floating_point():
                raise ValueError(f"the loader must give batches of float images [B, C, H, W], got {images.dtype} {tuple(images.shape)}")
            model.forward_features(images.to(device=parameter.device, dtype=parameter.dtype))
        batches += 1
    if not batches:
        raise ValueError("the loader gave no batch: nothing to calibrate on")
