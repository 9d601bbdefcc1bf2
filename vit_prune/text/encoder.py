"""A text encoder of timm's own blocks, so that `vp.patch` serves it as it serves a ViT.

B batch, L tokens, D width.  ids [B, L] int64; the id PAD is padding: nothing attends to it, and the mean over the tokens leaves it out.
"""

from functools import partial

import torch
from timm.layers import trunc_normal_
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vit_prune.patch.timm import add_root

PAD = 0
STD = 0.02  # of the embeddings at the start, as timm's position embeddings


class TokenEmbed(nn.Embedding):
    """One row for each entry of the vocabulary, in the place of a ViT's `patch_embed`."""

    def __init__(self, *, vocab_size: int, max_length: int, embed_dim: int, device: object = None, dtype: torch.dtype | None = None, **of_patches) -> None:
        super().__init__(vocab_size, embed_dim, padding_idx=PAD, device=device, dtype=dtype)
        self.num_patches = max_length  # how long timm makes the position embedding


class TextTransformer(VisionTransformer):
    """Token and learned position embedding, blocks, norm, mean over the real tokens, head. It has no class token.

    Args:
        vocab_size: entries of the vocabulary, the padding among them. max_length: most tokens of a text. Others: timm's.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 8192,
        max_length: int = 128,
        num_classes: int = 2,
        embed_dim: int = 768,
        depth: int = 4,
        num_heads: int = 8,
        mlp_ratio: float = 4.0,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: object = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        super().__init__(
            embed_layer=partial(TokenEmbed, vocab_size=vocab_size, max_length=max_length),
            **{"num_classes": num_classes, "embed_dim": embed_dim, "depth": depth, "num_heads": num_heads, "mlp_ratio": mlp_ratio},
            **{"drop_rate": drop_rate, "pos_drop_rate": pos_drop_rate, "proj_drop_rate": proj_drop_rate},
            **{"attn_drop_rate": attn_drop_rate, "drop_path_rate": drop_path_rate},
            **{"global_pool": "avg", "fc_norm": False, "class_token": False, "device": device, "dtype": dtype},
        )
        self.vocab_size, self.max_length = vocab_size, max_length

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """As timm's, and the token embedding as the position embedding."""
        super().init_weights(mode, needs_reset=needs_reset)
        trunc_normal_(self.patch_embed.weight, std=STD)
        with torch.no_grad():
            self.patch_embed.weight[PAD].zero_()

    def forward(self, ids: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """ids [B, L] -> logits [B, classes]. See `forward_features`."""
        x = self.forward_features(ids, attn_mask=attn_mask, is_causal=is_causal)
        return self.forward_head(x, visible=visible_ids(ids))

    def forward_features(self, ids: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """ids [B, L] -> the normed features [B, L, D]; those at padding mean nothing.

        Args:
            attn_mask: beside the padding, broadcasts to [B, H, L, L], bool (True = visible) or additive. is_causal: nothing sees what comes after it.

        Raises: ValueError for more tokens than max_length.
        """
        x, mask = self._embedded(ids, attn_mask, is_causal)
        for block in self.blocks:
            x = self._run(block, x, mask)
        return self.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False, visible: Tensor | None = None) -> Tensor:
        """Features [B, L, D] -> logits [B, classes], or their mean [B, D]. visible [B, L] bool: the tokens that count (None: all)."""
        x = self.head_drop(self.fc_norm(mean_of(x, visible) if self.global_pool else x))
        return x if pre_logits else self.head(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NLC",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]] | dict:
        """As timm's, of ids x [B, L] and features [B, L, D]. Raises: ValueError for maps (NCHW), which texts have none of."""
        if output_fmt != "NLC":
            raise ValueError(f"the features of a text are no map: output_fmt must be NLC, got {output_fmt!r}")
        take, last = feature_take_indices(len(self.blocks), indices)
        x, mask = self._embedded(x, attn_mask, is_causal)
        taken = []
        for index, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = self._run(block, x, mask)
            if index in take:
                taken.append(self.norm(x) if norm else x)
        if output_dict:
            return {"image_intermediates": taken} | ({} if intermediates_only else {"image_features": self.norm(x)})
        return taken if intermediates_only else (self.norm(x), taken)

    def _run(self, block: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        """One block; timm checkpoints none that is given a mask."""
        return checkpoint(block, x, mask) if self.grad_checkpointing and torch.is_grad_enabled() else block(x, mask)

    def _embedded(self, ids: Tensor, attn_mask: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor]:
        """The first block's input [B, L, D], and the mask of all blocks."""
        length = ids.shape[1]
        if length > self.max_length:
            raise ValueError(f"the texts have {length} tokens, the model takes at most {self.max_length}: cut them, or build it with another max_length")
        x = self.pos_drop(self.patch_embed(ids) + self.pos_embed[:, :length])
        return x, joint_mask(visible_ids(ids), attn_mask, is_causal)


def visible_ids(ids: Tensor) -> Tensor:
    """Which tokens are no padding, ids [B, L] -> [B, L] bool. Of a text that is all padding the first counts: there must be something to attend to."""
    visible = ids != PAD
    first = torch.arange(ids.shape[1], device=ids.device) == 0
    return visible | (first & ~visible.any(1, keepdim=True))


def joint_mask(visible: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """Padding, visible [B, L] bool, and the caller's mask as one, [B, 1 or H, 1 or L, L]."""
    mask = visible[:, None, None, :]
    if is_causal:
        L = visible.shape[1]
        itself = torch.eye(L, dtype=torch.bool, device=visible.device)  # padding on the left sees nothing before it
        mask = mask & itself.new_ones(L, L).tril() | itself
    if attn_mask is None:
        return mask
    return mask & attn_mask if attn_mask.dtype == torch.bool else attn_mask.masked_fill(~mask, float("-inf"))


def mean_of(x: Tensor, visible: Tensor | None) -> Tensor:
    """The mean over the visible tokens: x [B, L, D], visible [B, L] bool -> [B, D]."""
    if visible is None:
        return x.mean(1)
    weight = visible.unsqueeze(-1).to(x.dtype)
    return (x * weight).sum(1) / weight.sum(1)


add_root(TextTransformer)
