"""Auxiliary losses of the methods, collected while a model runs: `with vp.losses(model) as aux: y = model(x)`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vit_prune.methods.base import HeadGate, Method
from vit_prune.methods.stack import prune_stacks

Heard = list[tuple[Method, HeadGate, bool]]  # who, what, and whether there was a graph


class Losses(Mapping[str, Tensor]):
    """The losses by name, each a scalar with its gradient: the mean over blocks, forwards and batch. Empty where no method has one.

    They are weighed by the progress of the moment in which the block ends, or before that by the one in which they are read.
    """

    def __init__(self) -> None:
        self.heard: Heard = []
        self._closed: dict[str, Tensor] | None = None

    def _by_name(self) -> dict[str, Tensor]:
        if self._closed is not None:
            return self._closed
        found: dict[str, list[Tensor]] = {}
        for method, gate, _ in self.heard:
            for name, loss in method.losses(gate).items():
                found.setdefault(name, []).append(loss)
        return {name: torch.stack(losses).mean() for name, losses in found.items()}

    def close(self, *, wants_grad: bool) -> None:
        """Nothing more is heard. Raises: RuntimeError where a loss would have no gradient."""
        with_graph = {id(method) for method, _, has_graph in self.heard if has_graph}
        if wants_grad:
            lost = [method for method, _, _ in self.heard if method.training and id(method) not in with_graph]
            self.heard[:] = [entry for entry in self.heard if entry[2] or not entry[0].training]  # a look without a graph beside the training's own
            if lost:
                raise RuntimeError(
                    "the auxiliary losses would have no gradient: the blocks ran without a graph, as under torch.no_grad and reentrant checkpointing; "
                    "for the latter use timm.layers.set_reentrant_ckpt(False)"
                )
        self._closed = self._by_name()

    def __getitem__(self, name: str) -> Tensor:
        return self._by_name()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name())

    def __len__(self) -> int:
        return len(self._by_name())

    def total(self) -> Tensor | float:
        """Their sum, to be added to the loss of the task; 0.0 where there is none."""
        return sum(self._by_name().values(), start=0.0)


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
    aux.close(wants_grad=wants_grad)
