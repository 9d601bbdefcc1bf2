"""timm's attention with kept columns, and the table of what may be patched.

B batch, N tokens (queries), M kept columns, H heads, d head dim, A = H d.  x [B, N, D] is the normed block input.
A line that differs from timm's Attention.forward ends in `# prune`.
"""

import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.models.deit import VisionTransformerDistilled
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from vit_prune.methods.base import KeptColumns
from vit_prune.methods.stack import Prune
from vit_prune.methods.state import Tokens
from vit_prune.ops.attention import column_attention, query_free_attention
from vit_prune.ops.columns import gather_mask
from vit_prune.patch.heads import active_heads, scaled

ROOTS = [VisionTransformer, VisionTransformerDistilled, NaFlexVit]  # exact types, see add_root
BLOCKS = (Block,)
ROOT_READS = ("blocks", "embed_dim", "num_prefix_tokens", "has_class_token")
BLOCK_READS = ("norm1", "attn", "ls1", "drop_path1", "norm2", "mlp", "ls2", "drop_path2")
ATTENTION_READS = (
    "num_heads", "head_dim", "attn_dim", "scale", "fused_attn", "qkv", "q_norm", "k_norm", "attn_drop", "norm", "gate", "proj", "proj_drop",
)  # fmt: skip


def add_root(cls: type[nn.Module]) -> None:
    """Let `patch` take a host class of another module, whose blocks are timm's."""
    if cls not in ROOTS:
        ROOTS.append(cls)


class PrunedAttention(Attention):
    """timm's Attention that computes keys and values for the kept columns only. The methods live in the child `prune`."""

    prune: Prune

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        size_bias: Tensor | None = None,
        keys: list[Tensor] | None = None,
        sizes: Tensor | None = None,
    ) -> Tensor:
        """x [B, N, D] -> [B, N, D_out]; attn_mask broadcasts to [B, H, N, N], bool (True = visible) or additive.

        size_bias: log size of merged tokens [B, 1, N]. keys: a list that gets the keys [B, H, N, d], where all tokens and heads have one.
        sizes: of merged tokens [B, N].
        """
        N = x.shape[1]  # prune
        gate = self.gate(x).sigmoid() if self.gate is not None else None
        mask, has_gates = host_mask(attn_mask, is_causal, x), bool(self.prune.gaters)  # prune
        if is_causal and has_gates:
            raise ValueError("a gate reads the mean of all tokens, the later ones too: BudgetFormer is not for causal attention")
        x = self.gated(x, mask, size_bias, keys, sizes, gate) if has_gates else self.output(self.attend(x, mask, size_bias, keys), gate)  # prune
        return self.proj_drop(x if x.shape[1] == N else x.expand(-1, N, -1))  # prune

    def output(self, x: Tensor, gate: Tensor | None) -> Tensor:
        """The host's own end: x [B, N or 1, A] -> [B, N, D_out]; gate [B, N, A]: the host's output gate."""
        x = self.norm(x)
        if gate is not None:
            x = x * gate
        return self.proj(x)

    def gated(
        self, x: Tensor, mask: Tensor | None, size_bias: Tensor | None, keys: list[Tensor] | None, sizes: Tensor | None, output_gate: Tensor | None
    ) -> Tensor:
        """Attention and output of the heads that run, each scaled by its weight: x [B, N, D] -> [B, N or 1, D_out]."""
        kept = self.choose(x, mask, size_bias, sizes)
        if kept.gate is not None and kept.gate.groups is not None:
            return active_heads(self, x, kept, mask, output_gate)
        return self.output(scaled(self.attend_to(x, kept, mask, keys), kept.gate), output_gate)

    def choose(self, x: Tensor, mask: Tensor | None, size_bias: Tensor | None, sizes: Tensor | None) -> KeptColumns:
        """The columns and the heads."""
        return self.prune(x, attn=self, mask=mask, size_bias=size_bias, sizes=sizes)

    def attend(self, x: Tensor, mask: Tensor | None, size_bias: Tensor | None, keys: list[Tensor] | None) -> Tensor:
        """Attention of x [B, N, D] over the columns that are kept -> [B, N or 1, A]; 1 where every query has the same row."""
        return self.attend_to(x, self.prune(x, attn=self, mask=mask, size_bias=size_bias), mask, keys)

    def attend_to(self, x: Tensor, kept: KeptColumns, mask: Tensor | None, keys: list[Tensor] | None) -> Tensor:
        """The same, over these columns."""
        if self.prune.query_key_free:
            return self.query_free(self.project(kept.x, 2, 3), kept, mask)
        return self.weigh(*self.queries_keys_values(x, kept.x), kept, mask, keys)

    def query_free(self, v: Tensor, kept: KeptColumns, mask: Tensor | None) -> Tensor:
        """softmax(bias) v of v [B, M, A] -> [B, 1, A]."""
        return self.attend_heads(None, None, self.heads(v), kept, mask).transpose(1, 2).flatten(2)

    def weigh(self, q: Tensor, k: Tensor, v: Tensor, kept: KeptColumns, mask: Tensor | None, keys: list[Tensor] | None) -> Tensor:
        """Attention of q [B, N, A] over k, v [B, M, A] -> [B, N, A]."""
        q, k, v = self.q_norm(self.heads(q)), self.k_norm(self.heads(k)), self.heads(v)
        if keys is not None and kept.index is None:
            keys.append(k)
        return self.attend_heads(q, k, v, kept, mask).transpose(1, 2).flatten(2)

    def attend_heads(self, q: Tensor | None, k: Tensor | None, v: Tensor, kept: KeptColumns, mask: Tensor | None) -> Tensor:
        """Attention of some heads, q [B, h, N, d] over k, v [B, h, M, d] -> [B, h, N, d]; softmax(bias) v [B, h, 1, d] in a query-key-free block."""
        mask = kept_mask(mask, kept)
        if self.prune.query_key_free:
            return query_free_attention(v, kept.bias, mask=mask, dropout_p=self.dropout_p())
        impl = "math" if self.prune.impl == "auto" and not self.fused_attn else self.prune.impl
        return column_attention(q, k, v, kept.bias, mask=mask, scale=self.scale, dropout_p=self.dropout_p(), impl=impl)

    def dropout_p(self) -> float:
        return self.attn_drop.p if self.training else 0.0

    def queries_keys_values(self, x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, N, A] of x; k, v [B, M, A] of the kept columns. One GEMM where x itself is kept."""
        if kept is x:
            return self.qkv(x).chunk(3, dim=-1)
        return self.project(x, 0, 1), *self.project(kept, 1, 3).chunk(2, dim=-1)

    def project(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Rows start to stop of (query, key, value) of the qkv projection: [B, M, D] -> [B, M, (stop - start) A]."""
        if not is_plain_linear(self.qkv):
            return self.qkv(x)[..., start * self.attn_dim : stop * self.attn_dim]
        return F.linear(x, *self.rows_of(start, stop - start))

    def heads(self, x: Tensor) -> Tensor:
        """[B, M, A] -> [B, H, M, d]."""
        return x.view(*x.shape[:-1], self.num_heads, self.head_dim).transpose(1, 2)

    def metric(self, x: Tensor) -> Tensor:
        """What tokens are compared by: the mean over heads of their keys, of their values in a query-key-free block, x [B, N, D] -> [B, N, d].

        Linear in x, it costs N D d; keys that are normalised, or come from a layer that is not plain, are computed, N D A.
        """
        part = 2 if self.prune.query_key_free else 1
        norm = nn.Identity() if self.prune.query_key_free else self.k_norm
        if type(norm) is not nn.Identity or not self.is_sliceable():
            return norm(self.heads(self.project_part(x, part))).mean(1)
        weight, bias = self.rows_of(part)
        return F.linear(x, weight.unflatten(0, (self.num_heads, -1)).mean(0), None if bias is None else bias.unflatten(0, (self.num_heads, -1)).mean(0))

    def project_part(self, x: Tensor, part: int) -> Tensor:
        """Queries (0), keys (1) or values (2) of x, [B, M, A]."""
        return self.project(x, part, part + 1)

    def is_sliceable(self) -> bool:
        """True where `rows_of` may be read."""
        return is_plain_linear(self.qkv)

    def is_one_stretch(self) -> bool:
        """True where the rows of queries, keys and values follow each other."""
        return True

    def can_cut_proj(self, output_gate: Tensor | None) -> bool:
        """True where some heads can be projected back without the others: nothing that sees all of them lies between."""
        return output_gate is None and is_plain_linear(self.proj) and type(self.norm) is nn.Identity and not hooked(self.norm)

    def rows_of(self, part: int, count: int = 1) -> tuple[Tensor, Tensor | None]:
        """Weight [count A, D] and bias [count A] of the queries (0), keys (1) or values (2), and of those that follow."""
        return cut_rows(self.qkv.weight, self.qkv.bias, part * self.attn_dim, count * self.attn_dim)

    def key_weight(self) -> Tensor:
        """W_k as [H, d, D]. Raises: ValueError where qkv is not a plain nn.Linear."""
        if not self.is_sliceable():
            raise ValueError(
                f"importance column_mean or class_attention reads the key weight, and qkv is a {type(self.qkv).__name__} (or has hooks), not a plain nn.Linear"
            )
        return self.rows_of(1)[0].unflatten(0, (self.num_heads, self.head_dim))


class PrunedBlock(Block):
    """timm's Block in a model that merges tokens: it is given what they stand for, and gives it on."""

    attn: PrunedAttention

    def forward(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        """x [B, N, D] -> [B, N - r, D], and what its tokens stand for."""
        merger, normed, keys = self.attn.prune.mergers[0], self.norm1(x), []  # prune
        attended = self.attn(normed, tokens.mask, size_bias=merger.column_bias(tokens), keys=keys, sizes=tokens.sizes)  # prune
        x = x + self.drop_path1(self.ls1(attended))
        if merger.num_merges(x.shape[1]):  # prune
            x, tokens = merger.merge(x, keys[0].mean(1) if keys else self.attn.metric(normed), tokens)  # prune
        x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return x, tokens  # prune


def is_plain_linear(module: nn.Module) -> bool:
    """True where slicing the weight is the same as calling the module: an nn.Linear itself, without hooks or a forward of its own."""
    return type(module) is nn.Linear and not hooked(module) and "forward" not in vars(module)


def hooked(module: nn.Module) -> bool:
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def cut_rows(weight: Tensor, bias: Tensor | None, first: int, count: int) -> tuple[Tensor, Tensor | None]:
    """`count` rows of a layer from `first` on."""
    if count == weight.shape[0]:
        return weight, bias
    return weight[first : first + count], None if bias is None else bias[first : first + count]


def kept_mask(mask: Tensor | None, kept: KeptColumns) -> Tensor | None:
    """The host's mask of the kept columns."""
    return mask if mask is None or kept.index is None else gather_mask(mask, kept.index)


def host_mask(attn_mask: Tensor | None, is_causal: bool, x: Tensor) -> Tensor | None:
    """The host's mask with 4 dims, [B or 1, H or 1, N or 1, N]; None where everything is visible."""
    if is_causal and attn_mask is not None:
        raise ValueError("give attn_mask or is_causal, not both")
    if is_causal:
        return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()[None, None]
    if attn_mask is None:
        return None
    if not 2 <= attn_mask.ndim <= 4:
        raise ValueError(f"attn_mask must broadcast to [batch, heads, {x.shape[1]}, {x.shape[1]}], got {tuple(attn_mask.shape)}")
    return attn_mask[(None,) * (4 - attn_mask.ndim)]
