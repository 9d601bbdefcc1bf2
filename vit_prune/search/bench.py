"""A copy of the model on which settings are tried: what each of them loses on the images of a loader.

n images, N0 tokens, D width.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_prune.methods.base import MethodConfig
from vit_prune.methods.columns import Columns
from vit_prune.methods.state import Tokens
from vit_prune.methods.tome import ToMe
from vit_prune.ops.merging import unmerge_tokens
from vit_prune.patch import patch
from vit_prune.search.levels import Order, Setting, State

FIDELITIES = ("features", "logits", "labels")

Batch = tuple[Tensor, Tensor | None]  # images [B, C, H, W], labels [B]


class Bench:
    """`loss(state)` of the whole model, and of one block after the other on the inputs that they have in a given state."""

    def __init__(self, model: nn.Module, methods: Sequence[MethodConfig], batches: Sequence[Batch], orders: Sequence[Order], fidelity: str) -> None:
        self.model = copy.deepcopy(model).eval()
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        self.batches, self.orders, self.fidelity = batches, orders, fidelity
        self.expected = [self.unpruned(images) for images, _ in batches]
        others = [method for method in methods if not isinstance(method, ToMe)]
        merging = next((method for method in methods if isinstance(method, ToMe)), ToMe(r=0))
        patch(self.model, [replace(merging, r=0), *(replace(one, keep=1.0) if isinstance(one, Columns) else one for one in others)])
        self.whole = [(block.attn.proj.weight.clone(), block.mlp.fc2.weight.clone()) if cuts(order) else None for block, order in self.pairs()]
        self.dense = (Setting(),) * len(self.model.blocks)

    @torch.no_grad()
    def unpruned(self, images: Tensor) -> Tensor:
        """Features [B, N0, D] of the model as it came. Raises: ValueError where they are no numbers."""
        features = self.forward(images)
        if not features.isfinite().all():
            raise ValueError("the model's features are not finite on the loader's images: nothing can be compared with them")
        return features

    def pairs(self) -> Iterator[tuple[nn.Module, Order]]:
        """Each block with the order of its heads and channels."""
        return zip(self.model.blocks, self.orders, strict=True)

    def set(self, state: State) -> None:
        """Give every block its setting. Removed heads and channels are there, and count for nothing."""
        for (block, order), setting, whole in zip(self.pairs(), state, self.whole, strict=True):
            stack = block.attn.prune
            stack.tome.r = setting.r
            for method in stack.choosers:
                method.keep_ratio = setting.keep
            if whole is not None:
                heads = whole[0].unflatten(1, (block.attn.num_heads, -1)).index_fill(1, order.heads[: setting.heads].to(whole[0].device), 0)
                block.attn.proj.weight.copy_(heads.flatten(1))
                block.mlp.fc2.weight.copy_(whole[1].index_fill(1, order.channels[: setting.channels].to(whole[1].device), 0))

    @torch.no_grad()
    def loss(self, state: State) -> float:
        """Mean over the images."""
        self.set(state)
        return self.loss_of(self.model)

    @torch.no_grad()
    def loss_of(self, model: nn.Module) -> float:
        """What a model like this one loses, mean over the images."""
        return sum(self.lost(index, model.forward_features(images)) * len(images) for index, (images, _) in enumerate(self.batches)) / self.num_images

    @property
    def num_images(self) -> int:
        return sum(len(images) for images, _ in self.batches)

    @torch.no_grad()
    def single_losses(self, state: State, changes: Sequence[tuple[int, Setting]], done: Callable[[], object]) -> list[float]:
        """For each (block, setting): what the model loses in `state` with that one block set otherwise. Only what follows the block is run again."""
        total = [0.0] * len(changes)
        for index, (images, _) in enumerate(self.batches):
            self.set(state)
            inputs = self.block_inputs(images)
            for place, (block, setting) in enumerate(changes):
                self.set((*state[:block], setting, *state[block + 1 :]))
                total[place] += self.lost(index, self.run_from(block, *inputs[block])) * len(images) / self.num_images
                done()
        return total

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] -> features [B, N0, D]."""
        return self.model.forward_features(images)

    def block_inputs(self, images: Tensor) -> list[tuple[Tensor, Tokens]]:
        """x [B, N, D] and what its tokens stand for, before each block."""
        inputs: list[tuple[Tensor, Tokens]] = []
        handles = [block.register_forward_pre_hook(lambda _block, args: inputs.append(args)) for block in self.model.blocks]
        try:
            self.forward(images)
        finally:
            for handle in handles:
                handle.remove()
        return inputs

    def run_from(self, first: int, x: Tensor, tokens: Tokens) -> Tensor:
        """The blocks from `first` on -> features [B, N0, D]."""
        for block in self.model.blocks[first:]:
            x, tokens = block(x, tokens)
        return unmerge_tokens(self.model.norm(x), tokens.source)

    def lost(self, index: int, features: Tensor) -> float:
        """Against the unpruned model: 1 - cosine of the patches' features, the divergence of the predictions, or the labels' cross-entropy that is added."""
        expected, P = self.expected[index], self.model.num_prefix_tokens
        if self.fidelity == "features":
            return 1 - F.cosine_similarity(features[:, P:].float(), expected[:, P:].float(), dim=-1).mean().item()
        logits, before = self.model.forward_head(features).float(), self.model.forward_head(expected).float()
        if self.fidelity == "logits":
            return F.kl_div(logits.log_softmax(-1), before.log_softmax(-1), log_target=True, reduction="batchmean").item()
        labels = self.batches[index][1]
        return (F.cross_entropy(logits, labels) - F.cross_entropy(before, labels)).item()


def cuts(order: Order) -> bool:
    """True where heads or channels of the block may go."""
    return bool(len(order.heads) or len(order.channels))
