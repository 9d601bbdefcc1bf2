"""The methods of one block, combined: the one child, `prune`, that a host module gets.

B batch, N tokens, M kept columns, H heads, D width.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from vit_prune.methods.base import Host, KeptColumns, Method, MethodConfig, check_providers


class Prune(nn.Module):
    """Asks every method of the block for its share. A forward hook on it sees the KeptColumns of each call."""

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
        check_providers(self.children())
        self._check_bias()
        self.query_key_free = any(method.query_key_free for method in self.children())
        self.frozen: tuple[str, ...] = ()  # host parameters that nothing reads any more, unfrozen by `unpatch`

    def _check_bias(self) -> None:
        if not any(method.answers("bias") for method in self.children()):
            for method in self.children():
                if method.needs_bias:
                    raise ValueError(f"{method.needs_bias} ranks columns by a bias, and no method gives one: add TokenBias(), or choose another importance")

    def forward(self, x: Tensor, *, attn: nn.Module, mask: Tensor | None) -> KeptColumns:
        """x [B, N, D] -> the columns that attention sees."""
        bias = self._bias(x)
        for method in self.children():
            kept = method.columns(x, bias, attn=attn, mask=mask)
            if kept is not None:
                return kept
        return KeptColumns(x, bias, None)

    def _bias(self, x: Tensor) -> Tensor | None:
        total = None
        for method in self.children():
            bias = method.bias(x)
            if bias is not None:
                total = bias if total is None else total + bias
        return total

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
    return [method for stack in prune_stacks(model) for method in stack.children() if method.answers("columns")]
