"""What a count holds: multiply-accumulates (MACs) per part, block and model, beside the dense figure and the ceiling.

FLOPs = 2 x MACs. The ceiling is the cost with M -> 0 columns in every block and no overhead: no choice of columns gets below it.
"""

from dataclasses import dataclass

BLOCK_PARTS = ("q", "kv", "bias", "selection", "qk", "av", "gate", "proj", "mlp")
PROJECTIONS = ("q", "kv", "proj")


class Comparison:
    """Shares and factors of anything with `total`, `dense` and `ceiling` in MACs."""

    total: int
    dense: int
    ceiling: int

    @property
    def flops(self) -> int:
        """2 x MACs: a multiplication and an addition each."""
        return 2 * self.total

    @property
    def saved(self) -> float:
        """Share of the dense MACs that is gone; negative where the overhead is larger than the gain."""
        return 1 - self.total / self.dense

    @property
    def speedup(self) -> float:
        """The speedup that the MACs predict."""
        return self.dense / self.total

    @property
    def ceiling_saved(self) -> float:
        """The largest `saved` that any choice of columns can reach."""
        return 1 - self.ceiling / self.dense

    @property
    def ceiling_speedup(self) -> float:
        """The largest `speedup` that any choice of columns can reach."""
        return self.dense / self.ceiling

    def figures(self) -> dict[str, float]:
        return {
            "macs": self.total,
            "flops": self.flops,
            "dense_macs": self.dense,
            "ceiling_macs": self.ceiling,
            "saved": self.saved,
            "speedup": self.speedup,
            "ceiling_saved": self.ceiling_saved,
            "ceiling_speedup": self.ceiling_speedup,
        }


@dataclass(frozen=True)
class BlockMacs(Comparison):
    """MACs of one block for one image.

    Args:
        name: the block in the model, "blocks.3".
        num_tokens: N, the queries. num_columns: M, the keys and values. num_merged: tokens that merge away before the MLP. num_heads: that run.
        parts: by BLOCK_PARTS. q, kv: projections; bias: methods that add to the logits; selection: choosing columns and heads, merging tokens;
            qk: q k^T; av: weights v; gate, proj: the host's output gate and projection; mlp: every nn.Linear of block.mlp.
        dense: the same block unpatched, in a model where nothing merges. ceiling: with M = 0 and no overhead, of the tokens and heads that there are.
        all_projected: by PROJECTIONS, of all heads, whether they run or not.
    """

    name: str
    num_tokens: int
    num_columns: int
    num_merged: int
    parts: dict[str, int]
    dense: int
    ceiling: int
    num_heads: float
    all_projected: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def total_all_projected(self) -> int:
        """The total if the heads that do not run were projected all the same, as BudgetFormer's paper counts."""
        return sum((self.parts | self.all_projected).values())

    @property
    def overhead(self) -> int:
        """What the methods themselves cost."""
        return self.parts["bias"] + self.parts["selection"]

    def to_dict(self) -> dict:
        """JSON-able."""
        return {
            "name": self.name,
            "num_tokens": self.num_tokens,
            "num_columns": self.num_columns,
            "num_merged": self.num_merged,
            "num_heads": self.num_heads,
            **self.figures(),
            "macs_all_projected": self.total_all_projected,
            "parts": dict(self.parts),
        }


@dataclass(frozen=True)
class ModelMacs(Comparison):
    """MACs of a model for one image of img_size (height, width) in pixels, or one text, (1, tokens): outside the blocks, and per block."""

    img_size: tuple[int, int]
    num_tokens: int
    patch_embed: int
    blocks: tuple[BlockMacs, ...]
    pool: int
    head: int

    @property
    def outside(self) -> int:
        """Patch embedding, attention pooling and heads, which no choice of columns touches."""
        return self.patch_embed + self.pool + self.head

    @property
    def total(self) -> int:
        return self.outside + sum(block.total for block in self.blocks)

    @property
    def total_all_projected(self) -> int:
        """As `BlockMacs.total_all_projected`, of the model."""
        return self.outside + sum(block.total_all_projected for block in self.blocks)

    @property
    def dense(self) -> int:
        return self.outside + sum(block.dense for block in self.blocks)

    @property
    def ceiling(self) -> int:
        return self.outside + sum(block.ceiling for block in self.blocks)

    @property
    def parts(self) -> dict[str, int]:
        """BLOCK_PARTS summed over the blocks, and what lies outside them."""
        sums = {part: sum(block.parts[part] for block in self.blocks) for part in BLOCK_PARTS}
        return {"patch_embed": self.patch_embed, **sums, "pool": self.pool, "head": self.head}

    def to_dict(self) -> dict:
        """JSON-able."""
        blocks = [block.to_dict() for block in self.blocks]
        figures = self.figures() | {"macs_all_projected": self.total_all_projected}
        return {"img_size": list(self.img_size), "num_tokens": self.num_tokens, **figures, "parts": self.parts, "blocks": blocks}
