"""timm's models with what merged tokens stand for carried from block to block, and all tokens back at the end.

B batch, N tokens now, N0 tokens at the first block, D width.
What comes out has N0 tokens, each with the value of the token that it is in. So timm's own heads do right: a mean over all tokens is the
mean of the merged ones weighted by size, and maps have their grid.
"""

from collections.abc import Collection

import torch.nn.functional as F
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from timm.models.deit import VisionTransformerDistilled
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vit_prune.methods.state import Tokens, filled
from vit_prune.ops.merging import unmerge_tokens
from vit_prune.patch.timm import host_mask

Intermediates = list | tuple | dict


class MergingVisionTransformer(VisionTransformer):
    """VisionTransformer whose blocks merge tokens."""

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """As timm's: images [B, C, height, width] -> [B, N0, D]."""
        x, tokens = self.merged_features(x, attn_mask, is_causal)
        return unmerge_tokens(x, tokens.source)

    def merged_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> tuple[Tensor, Tokens]:
        """The normed features of the merged tokens [B, N, D], and what they stand for."""
        x = self._embedded(x)
        x, tokens, _ = run_blocks(self, x, host_mask(attn_mask, is_causal, x))
        return self.norm(x), filled(tokens, x)

    def _embedded(self, x: Tensor) -> Tensor:
        return self.norm_pre(self.patch_drop(self._pos_embed(self.patch_embed(x))))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Intermediates:
        """As timm's, with all tokens."""
        check_format(output_fmt)
        grid = self.patch_embed.dynamic_feat_size(x.shape[-2:]) if output_fmt == "NCHW" else None
        take, last = feature_take_indices(len(self.blocks), indices)
        x = self._embedded(x)
        x, tokens, taken = run_blocks(self, x, host_mask(attn_mask, is_causal, x), take=take, stop=last + 1 if stop_early else None)
        taken = [self.norm(y) for y in taken] if norm else taken
        final = None if intermediates_only else unmerge_tokens(self.norm(x), tokens.source)
        return arrange(taken, final, self.num_prefix_tokens, grid, return_prefix_tokens, output_dict)


class MergingVisionTransformerDistilled(MergingVisionTransformer, VisionTransformerDistilled):
    """VisionTransformerDistilled whose blocks merge tokens."""


class MergingNaFlexVit(NaFlexVit):
    """NaFlexVit whose blocks merge tokens."""

    def forward_features(
        self, patches: Tensor, patch_coord: Tensor | None = None, patch_valid: Tensor | None = None, attn_mask: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        """As timm's."""
        x, mask, valid = self._embedded(patches, patch_coord, patch_valid, attn_mask)
        x, tokens, _ = run_blocks(self, x, mask)
        x = unmerge_tokens(self.norm(x), tokens.source)
        return x if patch_coord is None else {"patches": x, "patch_valid": valid}

    def merged_features(self, patches: Tensor) -> tuple[Tensor, Tokens]:
        """The normed features of the merged tokens [B, N, D] of images [B, C, height, width], and what they stand for."""
        x, mask, _ = self._embedded(patches, None, None, None)
        x, tokens, _ = run_blocks(self, x, mask)
        return self.norm(x), filled(tokens, x)

    def _embedded(self, patches: Tensor, coord: Tensor | None, valid: Tensor | None, attn_mask: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Tokens, their mask, and which of the patches are real."""
        no_mask_for_each_query = patches  # anything: where there is a mask, timm makes none
        given = no_mask_for_each_query if attn_mask is None else attn_mask
        embeds = self._forward_embeds(patches, patch_coord=coord, patch_valid=valid, attn_mask=given)
        x, valid = embeds["patches"], embeds["patch_valid"]
        if attn_mask is not None or valid is None:
            return x, host_mask(attn_mask, False, x), valid
        mask = F.pad(valid.bool(), (self.num_prefix_tokens, 0), value=True)  # of keys alone: merged tokens have one mask for all queries
        return x, mask[:, None, None], valid

    def forward_intermediates(
        self,
        x: Tensor | dict[str, Tensor],
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        patch_coord: Tensor | None = None,
        patch_valid: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Intermediates:
        """As timm's, with all tokens."""
        check_format(output_fmt)
        if isinstance(x, dict):
            if self.training and self.patch_drop is not None and not output_dict:
                raise ValueError("patch dropout leaves other patches than patch_valid tells of: give output_dict=True, which returns it of those that stay")
            if output_fmt == "NCHW":
                raise ValueError("NaFlex batches hold grids of several shapes: give output_fmt='NLC', and place tokens by patch_coord")
            x, patch_coord, patch_valid, attn_mask = x["patches"], x["patch_coord"], x.get("patch_valid", patch_valid), x.get("attn_mask", attn_mask)
        grid = self.embeds.dynamic_feat_size(x.shape[-2:]) if output_fmt == "NCHW" else None
        take, last = feature_take_indices(len(self.blocks), indices)
        x, mask, valid = self._embedded(x, patch_coord, patch_valid, attn_mask)
        x, tokens, taken = run_blocks(self, x, mask, take=take, stop=last + 1 if stop_early else None)
        taken = [self.norm(y) for y in taken] if norm else taken
        final = None if intermediates_only else unmerge_tokens(self.norm(x), tokens.source)
        result = arrange(taken, final, self.num_prefix_tokens, grid, return_prefix_tokens, output_dict)
        return result | {"patch_valid": valid} if output_dict and valid is not None else result


def run_blocks(model: nn.Module, x: Tensor, mask: Tensor | None, *, take: Collection[int] = (), stop: int | None = None) -> tuple[Tensor, Tokens, list[Tensor]]:
    """x [B, N0, D] through the blocks, `stop` of them -> x [B, N, D], what its tokens stand for, and [B, N0, D] after each block in `take`."""
    tokens, taken = Tokens(mask=mask), []
    for index, block in enumerate(model.blocks):
        if index == stop:
            break
        x, tokens = checkpoint(block, x, tokens) if model.grad_checkpointing else block(x, tokens)
        if index in take:
            taken.append(unmerge_tokens(x, tokens.source))
    return x, tokens, taken


def check_format(output_fmt: str) -> None:
    if output_fmt not in ("NCHW", "NLC"):
        raise ValueError(f"output_fmt must be NCHW or NLC, got {output_fmt!r}")


def arrange(
    taken: list[Tensor], final: Tensor | None, num_prefix: int, grid: tuple[int, int] | None, return_prefix_tokens: bool, output_dict: bool
) -> Intermediates:
    """What timm's forward_intermediates returns, of taken [B, N0, D] each; grid: (down, across) of a map [B, D, down, across], None for [B, n, D]."""
    prefix = [y[:, :num_prefix] for y in taken] if num_prefix else None
    patches = [y[:, num_prefix:] for y in taken]
    if grid is not None:
        patches = [y.unflatten(1, grid).permute(0, 3, 1, 2).contiguous() for y in patches]
    with_prefix = return_prefix_tokens and prefix is not None
    if output_dict:
        result = {"image_intermediates": patches} | ({"image_intermediates_prefix": prefix} if with_prefix else {})
        return result if final is None else result | {"image_features": final}
    patches = list(zip(patches, prefix, strict=True)) if with_prefix else patches
    return patches if final is None else (final, patches)


MERGING = {
    VisionTransformer: MergingVisionTransformer,
    VisionTransformerDistilled: MergingVisionTransformerDistilled,
    NaFlexVit: MergingNaFlexVit,
}
