"""Auxiliary losses of the methods, collected while a model runs: `with vp.losses(model) as aux: y = model(x)`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vit_prune.methods.base import HeadGate, Method
from vit_prune.methods.stack import prune_stacks

Heard = list[tuple[Method, HeadGate, bool]]


class Losses(Mapping[str, Tensor]):
    """The losses by name, each a scalar with its gradient: the mean over blocks, forwards and batch. Empty where no method has one."""

    def __init__(self) -> None:
        self.heard: Heard = []

    def _by_name(self) -> dict[str, list[Tensor]]:
        found: dict[str, list[Tensor]] = {}
        for method, gate, _ in self.heard:
            for name, loss in method.losses(gate).items():
                found.setdefault(name, []).append(loss)
        return found

    def __getitem__(self, name: str) -> Tensor:
        return torch.stack(self._by_name()[name]).mean()

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name())

    def __len__(self) -> int:
        return len(self._by_name())

    def total(self) -> Tensor | float:
        """Their sum, to be added to the loss of the task; 0.0 where there is none."""
        found = self._by_name()
        return sum((torch.stack(losses).mean() for losses in found.values()), start=0.0)


@contextmanager
def losses(model: nn.Module) -> Iterator[Losses]:
    """Collect what the methods' losses depend on in each forward inside the block; nothing is kept on the model.

    Checkpointing: non-reentrant works; the reentrant kind runs its blocks without a graph, and their losses would have no gradient.

    Args: model: patched or not, also inside DDP or torch.compile.
    Raises: RuntimeError at the end of the block where a loss would have no gradient; ValueError for a second collector inside the first.
    """
    stacks, aux = prune_stacks(model), Losses()
    if any(stack.listener is not None for stack in stacks):
        raise ValueError("the losses of this model are being collected already")
    wants_grad = torch.is_grad_enabled()
    for stack in stacks:
        stack.listener = aux.heard
    try:
        yield aux
    finally:
        for stack in stacks:
            stack.listener = None
    if wants_grad and any(method.training and not had_grad for method, _, had_grad in aux.heard):
        raise RuntimeError(
            "the auxiliary losses would have no gradient: the blocks ran without a graph, as reentrant checkpointing runs them; use "
            "timm.layers.set_reentrant_ckpt(False), or leave vp.losses out of torch.no_grad"
        )
