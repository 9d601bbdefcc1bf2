"""The methods of one block, combined: the one child, `prune`, that a host module gets.

B batch, N tokens, M kept columns, H heads, D width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vit_prune.methods.base import NOTHING, PROVIDERS, HeadGate, Host, KeptColumns, Method, MethodConfig, Readouts, check_providers


class Prune(nn.Module):
    """Asks every method of the block for its share; which there are is settled at birth. A forward hook on it sees the KeptColumns of each call."""

    def __init__(self, configs: Sequence[MethodConfig], host: Host, *, impl: str = "auto") -> None:
        super().__init__()
        self.configs = tuple(configs)
        self.impl = impl
        for config in configs:
            if hasattr(self, config.name):
                raise ValueError(f"{type(config).__name__} is given twice")
            method = config.build(host)
            if method is not None:
                self.add_module(config.name, method)
        check_providers(list(self.children()))
        # names of the children that answer each hook, found once: to ask every method in every forward costs as much as small operations
        self.answering = {hook: [name for name, method in self.named_children() if method.answers(hook)] for hook in ("bias", *PROVIDERS)}
        self._check_bias()
        self.query_key_free = any(method.query_key_free for method in self.children())
        self.listener: list | None = None  # while `vp.losses` collects
        self.frozen: tuple[str, ...] = ()  # host parameters that nothing reads any more, unfrozen by `unpatch`

    def _check_bias(self) -> None:
        if not self.biases:
            for method in self.children():
                if method.needs_bias:
                    raise ValueError(f"{method.needs_bias} ranks columns by a bias, and no method gives one: add TokenBias(), or choose another importance")

    @property
    def biases(self) -> list[Method]:
        """The methods that add to the logits."""
        return [self._modules[name] for name in self.answering["bias"]]

    @property
    def choosers(self) -> list[Method]:
        """The method that provides columns: one at most."""
        return [self._modules[name] for name in self.answering["columns"]]

    @property
    def mergers(self) -> list[Method]:
        """The method that merges tokens: one at most."""
        return [self._modules[name] for name in self.answering["merge"]]

    @property
    def gaters(self) -> list[Method]:
        """The method that gates heads: one at most."""
        return [self._modules[name] for name in self.answering["gate"]]

    @property
    def keeps_all(self) -> bool:
        """True where attention sees every token's own column."""
        return all(method.keeps_all for method in self.choosers)

    def readouts(self, attn: nn.Module) -> dict[str, Tensor]:
        """Of all methods, see `Method.readouts`."""
        return {name: weight for method in self.children() for name, weight in method.readouts(attn).items()}

    def forward(
        self,
        x: Tensor,
        *,
        attn: nn.Module,
        mask: Tensor | None,
        size_bias: Tensor | None = None,
        sizes: Tensor | None = None,
        read: Readouts = NOTHING,
    ) -> KeptColumns:
        """x [B, N, D] -> the columns that attention sees, and the gate of the heads.

        size_bias [B, 1, N]: what merged tokens add to the logits; sizes [B, N]: of merged tokens; read: what the host has computed of the readouts.
        """
        kept = self._columns(x, attn, mask, size_bias, read)
        for method in self.gaters:
            gate = method.gate(x, mask=mask, sizes=sizes)
            self._tell(method, gate)
            kept = kept._replace(gate=gate)
        return kept

    def _tell(self, method: Method, gate: HeadGate | None) -> None:
        """Whoever collects losses hears of each gate once: a forward that checkpointing runs again, inside a backward pass, is none of its business."""
        if self.listener is not None and gate is not None and (torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1):
            self.listener.append((method, gate, torch.is_grad_enabled()))

    def _columns(self, x: Tensor, attn: nn.Module, mask: Tensor | None, size_bias: Tensor | None, read: Readouts) -> KeptColumns:
        bias = size_bias
        for method in self.biases:
            own = method.bias(x, read=read) if read and method.reads else method.bias(x)
            if own is not None:
                bias = own if bias is None else bias + own
        for method in self.choosers:
            given = {"read": read} if read and method.reads else {}
            kept = method.columns(x, bias, attn=attn, mask=mask, **given)
            if kept is not None:
                return kept
        return KeptColumns(x, None if bias is None else bias.contiguous(), None)  # over the columns, or the fused kernels crawl

    def __getstate__(self) -> dict:
        """A copy is nobody's to listen to."""
        return self.__dict__ | {"listener": None}

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args) -> None:
        """Dense weights have no `prune.*` keys at all: what we added then keeps the values that it has."""
        if not any(key.startswith(prefix) for key in state_dict):
            state_dict.update({prefix + key: value for key, value in self.state_dict().items()})
        super()._load_from_state_dict(state_dict, prefix, *args)


def prune_stacks(model: nn.Module) -> list[Prune]:
    """The Prune children of a model, in block order."""
    return [module for module in model.modules() if isinstance(module, Prune)]


def columns_methods(model: nn.Module) -> list[Method]:
    """The methods that provide columns, in block order."""
    return [method for stack in prune_stacks(model) for method in stack.choosers]
