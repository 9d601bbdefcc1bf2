"""A timm ViT as one dense feature map: no prefix tokens, no final norm, attention over the whole image or inside windows.

B batch, N = h w tokens, D width, p pixels per patch; W windows of w x w tokens.  *Exploring Plain Vision Transformer Backbones for Object
Detection* (ViTDet, arXiv 2203.16527), section 3.
"""

from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from timm.models import checkpoint
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from vit_prune.methods.stack import prune_stacks
from vit_prune.patch.check import UnsupportedModel
from vit_prune.patch.timm import BLOCKS, PrunedAttention

STRIDES = (8, 16, 32)  # pixels per patch that a pyramid of powers of two can be built on


class ViTBackbone(nn.Module):
    """Images [B, 3, H, W], sides whole patches -> a map [B, D, H / p, W / p].

    A patched model prunes columns for the whole image, or for each window on its own. Where a window hangs over the edge of the map it is filled up
    with zeros after the first norm, as in ViTDet. A block that prunes never keeps a column of these, or of what an image was padded with, and never
    looks at one.

    Args:
        vit: from `dense_vit`, patched or not. window: tokens per side, None for global attention in all blocks.
        global_blocks: the blocks that see the whole image all the same.
    """

    def __init__(self, vit: VisionTransformer, *, window: int | None = None, global_blocks: Collection[int] = ()) -> None:
        super().__init__()
        check_vit(vit)
        if window is not None and window < 1:
            raise ValueError(f"window must be a number of tokens >= 1, or None for global attention, got {window}")
        if wrong := [block for block in global_blocks if not 0 <= block < len(vit.blocks)]:
            raise ValueError(f"global_blocks lists block {wrong[0]}, the model has blocks 0 to {len(vit.blocks) - 1}")
        if global_blocks and window is None:
            raise ValueError("global_blocks are the exceptions among windows: give a window, or leave them out")
        self.vit, self.window, self.global_blocks = vit, window, tuple(global_blocks)

    @property
    def stride(self) -> int:
        """Pixels per patch."""
        return self.vit.patch_embed.patch_size[0]

    @property
    def channels(self) -> int:
        return self.vit.embed_dim

    def window_of(self, block: int) -> int | None:
        """Tokens per side in which this block attends; None for the whole image."""
        return None if block in self.global_blocks else self.window

    def forward(self, images: Tensor, image_sizes: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """image_sizes: (height, width) of each image without its padding; None: all of it is image."""
        vit = self.vit
        grid = images.shape[-2] // self.stride, images.shape[-1] // self.stride
        x = vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))
        real = self.real_tokens(images, image_sizes)
        for index, block in enumerate(vit.blocks):
            args = (block, x, grid, self.window_of(index), real)
            x = checkpoint(run_block, *args) if vit.grad_checkpointing and not torch.jit.is_scripting() else run_block(*args)
        return x.mT.unflatten(2, grid).contiguous()

    def real_tokens(self, images: Tensor, image_sizes: Sequence[tuple[int, int]] | None) -> Tensor | None:
        """Which tokens hold a pixel of their image, [B, h, w]; None where all do."""
        height, width = images.shape[-2:]
        if image_sizes is None or all(tuple(size) == (height, width) for size in image_sizes):
            return None
        real = torch.zeros(len(images), height // self.stride, width // self.stride, dtype=torch.bool, device=images.device)
        for one, (down, across) in zip(real, image_sizes, strict=True):
            one[: -(-down // self.stride), : -(-across // self.stride)] = True
        return real


def check_vit(vit: nn.Module) -> None:
    """Raises: UnsupportedModel, ValueError for a model that gives no dense map, by what is wrong with it."""
    if type(vit) is not VisionTransformer or any(type(block) not in BLOCKS for block in vit.blocks):
        kind = type(vit).__name__ if type(vit) is not VisionTransformer else type(vit.blocks[0]).__name__
        raise UnsupportedModel(f"a dense map is taken from a timm VisionTransformer of standard blocks in which no tokens merge, not from {kind}")
    if any(stack.gaters for stack in prune_stacks(vit)):
        raise UnsupportedModel("a detector attends in windows, of which none is an image with a budget of its own: BudgetFormer is for classifiers")
    if vit.num_prefix_tokens:
        raise ValueError(f"the model has {vit.num_prefix_tokens} prefix token(s), which a dense map has no place for: build it by dense_vit(name)")
    if vit.patch_embed.patch_size[0] != vit.patch_embed.patch_size[1] or vit.patch_embed.patch_size[0] not in STRIDES:
        raise ValueError(f"a pyramid is built on square patches of {', '.join(map(str, STRIDES))} pixels, the model has {vit.patch_embed.patch_size}")
    if not vit.dynamic_img_size:
        raise ValueError("images come in all sizes: build the model with dynamic_img_size=True, or by dense_vit(name)")


def run_block(block: Block, x: Tensor, grid: tuple[int, int], window: int | None, real: Tensor | None) -> Tensor:
    """x [B, N, D] through one block; real [B, h, w]: tokens that are no padding."""
    if window is None:
        return block(x) if real is None or not prunes(block.attn) else block(x, attn_mask=real.flatten(1)[:, None, None])
    x = x + block.drop_path1(block.ls1(attend_in_windows(block.attn, block.norm1(x), grid, window, real)))
    return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))


def prunes(attn: nn.Module) -> bool:
    """True where fewer columns may stay than there are tokens."""
    return isinstance(attn, PrunedAttention) and not attn.prune.keeps_all


def attend_in_windows(attn: nn.Module, x: Tensor, grid: tuple[int, int], window: int, real: Tensor | None) -> Tensor:
    """Attention of normed tokens x [B, N, D] inside windows -> [B, N, D]."""
    B, (h, w) = x.shape[0], grid
    down, across = -(-h // window), -(-w // window)  # windows
    padding = (0, 0, 0, across * window - w, 0, down * window - h)
    windows = cut(F.pad(x.unflatten(1, grid), padding), window)
    mask = None
    if prunes(attn) and (real is not None or any(padding)):
        real = x.new_ones(B, h, w, dtype=torch.bool) if real is None else real
        seen = cut(F.pad(real[..., None], padding), window)[..., 0]  # [B W, w w]
        mask = (seen | ~seen.any(1, keepdim=True))[:, None, None]  # a window of padding alone sees itself: nobody reads it
    out = attn(windows, attn_mask=mask).view(B, down, across, window, window, -1)
    return out.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :h, :w].flatten(1, 2)


def cut(x: Tensor, window: int) -> Tensor:
    """[B, down w, across w, D] -> [B W, w w, D]."""
    return x.unflatten(2, (-1, window)).unflatten(1, (-1, window)).transpose(2, 3).flatten(3, 4).flatten(0, 2)
