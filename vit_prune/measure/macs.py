"""Multiply-accumulates (MACs) of a timm ViT in closed form, dense or patched, and a counter to check them.

What counts is what FlopCounterMode counts: matrix products and convolutions. Elementwise work, norms, softmax, sorting, gathering,
scatter-adds and interpolation are not MACs. FLOPs = 2 x MACs. All figures are for inference on one image.

Legend: N tokens (queries), M kept columns, H heads, d head dim, A = H d, D width, r directions. Per block:

    q          N D A          kv         2 M D A
    qk         N M A          av         N M A
    gate, proj N per weight   mlp        N per weight of every nn.Linear
    bias       N D H          selection  what the selection costs, see ColumnsMethod.macs

In a fused model bias is N D for each row that rides in the query product, the rows of zeros that fill it up included; selection is the assignment alone.
Where tokens merge, the mlp and what follows see N - r tokens; all N come back before pooling and head. Matching counts as selection, see ToMeMethod.macs.
Where heads are gated, q, kv, qk, av and proj are those of the k heads that run, and the gates, D D + D + D H of one mean token, count as selection.
Without queries and keys: no q, M D A for the values, no qk, M A for softmax(bias) v, and one row through proj (N with an output gate).
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from timm.layers import Attention, AttentionPoolLatent, PatchEmbed
from timm.layers.attention_pool import AttentionPoolPrr
from timm.models.naflexvit import NaFlexEmbeds
from torch import nn

from vit_prune.measure.counter import count_macs
from vit_prune.measure.inputs import image_size, patch_grid, unwrap
from vit_prune.measure.result import BLOCK_PARTS, PROJECTIONS, BlockMacs, ModelMacs
from vit_prune.methods.base import PROVIDERS
from vit_prune.methods.budgetformer import BudgetFormerMethod
from vit_prune.methods.columns import ColumnsMethod
from vit_prune.methods.stack import Prune
from vit_prune.methods.tome import ToMeMethod
from vit_prune.ops.columns import num_kept
from vit_prune.patch.fused import FusedAttention
from vit_prune.patch.roots import MERGING
from vit_prune.patch.timm import BLOCKS, ROOTS, PrunedAttention, PrunedBlock, is_plain_linear
from vit_prune.text.encoder import TextTransformer

__all__ = ["BLOCK_PARTS", "BlockMacs", "ModelMacs", "count_macs", "macs"]

KNOWN = (ColumnsMethod, ToMeMethod, BudgetFormerMethod)  # the providers whose effect on the host's products is counted
ONE_ROW_POOLS = ("token", "avg", "avgmax", "max")


def macs(
    model: nn.Module,
    img_size: int | tuple[int, int] | None = None,
    *,
    num_tokens: int | None = None,
    num_columns: Sequence[int] | None = None,
    num_heads: Sequence[float] | None = None,
) -> ModelMacs:
    """MACs of a timm ViT in closed form, patched or not; no forward is run and the weights may lie on `meta`.

    Args:
        model: VisionTransformer, VisionTransformerDistilled or NaFlexVit of standard blocks, or a TextTransformer.
        img_size: pixels, int or (height, width); None is the model's own size. Others need dynamic_img_size or a NaFlexVit.
        num_tokens: of a text, padding included; None is the longest that the model takes. Looking tokens up costs no MACs.
        num_columns: M per block for the rules mass and threshold, prefix tokens included, e.g. the means over a data set, rounded.
        num_heads: heads that run per block, where the budget of each image decides (BudgetFormer); means over a data set need not be whole.

    Raises: TypeError that names the module whose MACs are not known; ValueError for a size that the model does not take, and for
        num_columns or num_heads that are missing, out of range or not asked for.
    """
    model = unwrap(model)
    if type(model) not in (*ROOTS, *MERGING.values()):
        supported = ", ".join(root.__name__ for root in ROOTS)
        raise TypeError(f"MACs of {type(model).__module__}.{type(model).__qualname__} are not known in closed form; supported: {supported}")
    sheet = Sheet(model)
    size, num_patches, patch_embed = _of_text(sheet, num_tokens) if isinstance(model, TextTransformer) else _of_image(sheet, img_size, num_tokens)
    num_tokens = num_patches + model.num_prefix_tokens
    given = [Given(*both) for both in zip(per_block(model, "num_columns", num_columns), per_block(model, "num_heads", num_heads), strict=True)]
    result = ModelMacs(
        img_size=size,
        num_tokens=num_tokens,
        patch_embed=patch_embed,
        blocks=tuple(_blocks(sheet, num_tokens, given)),
        pool=_pool(sheet, num_tokens),
        head=_head(sheet, num_tokens),
    )
    sheet.check_complete()
    return result


class Given(NamedTuple):
    """What depends on the image in one block, as it is told: M columns, k heads."""

    columns: int | None = None
    heads: float | None = None


def per_block(model: nn.Module, name: str, values: Sequence[float] | None) -> list[float | None]:
    """Raises: ValueError for another number of values than the model has blocks."""
    values = [None] * len(model.blocks) if values is None else list(values)
    if len(values) != len(model.blocks):
        raise ValueError(f"{name} lists {len(values)} blocks, the model has {len(model.blocks)}")
    return values


class Sheet:
    """The products entered so far, so that no weight is left out: `check_complete` names the first that is."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {module: name or "model" for name, module in model.named_modules()}
        self.entered = {model}

    def refuse(self, module: nn.Module, supported: str) -> TypeError:
        return TypeError(f"{self.names[module]} is {type(module).__module__}.{type(module).__qualname__}, whose MACs are not known; supported: {supported}")

    def linear(self, module: nn.Module | None, rows: int) -> int:
        """rows x weights of an nn.Linear itself; 0 for None and nn.Identity."""
        if module is None or type(module) is nn.Identity:
            return 0
        if type(module) is not nn.Linear:
            raise self.refuse(module, "torch.nn.Linear")
        self.entered.add(module)
        return rows * module.weight.numel()

    def mlp(self, module: nn.Module, rows: int) -> int:
        """Every nn.Linear of it, for rows tokens: Mlp, GluMlp, SwiGLU. One that lies deeper (an adapter's) is for `check_complete` to name."""
        return sum(self.linear(child, rows) for child in module.children() if isinstance(child, nn.Linear))

    def check_complete(self) -> None:
        """Raises: TypeError for a module that holds a matrix and that nobody entered. Methods report their own."""
        ours = {child for module in self.names if isinstance(module, Prune) for child in module.modules()}
        for module in self.names:
            missed = module not in self.entered and module not in ours
            if missed and any(parameter.ndim > 1 for parameter in module.parameters(recurse=False)):
                kind = f"{type(module).__module__}.{type(module).__qualname__}"
                raise TypeError(f"{self.names[module]} is {kind}, which holds a matrix where the closed form knows of none")


class BlockCounter:
    """Counts single blocks of a model, at any number of tokens, over and over: for a search."""

    def __init__(self, model: nn.Module) -> None:
        self.sheet = Sheet(model)

    def __call__(self, index: int, num_tokens: int) -> BlockMacs:
        """One block as it is set now."""
        return _block(self.sheet, self.sheet.model.blocks[index], num_tokens, Given(), whole=num_tokens)


def _of_text(sheet: Sheet, num_tokens: int | None) -> tuple[tuple[int, int], int, int]:
    """As `_of_image`; the size is (1, tokens)."""
    model = sheet.model
    if num_tokens is not None and not 1 <= num_tokens <= model.max_length:
        raise ValueError(f"num_tokens must be in 1..{model.max_length}, got {num_tokens}")
    sheet.entered.add(model.patch_embed)
    num_tokens = num_tokens or model.max_length
    return (1, num_tokens), num_tokens, 0


def _of_image(sheet: Sheet, img_size: int | tuple[int, int] | None, num_tokens: int | None) -> tuple[tuple[int, int], int, int]:
    """The size in pixels, the patches, and the MACs of embedding them."""
    if num_tokens is not None:
        raise ValueError(f"num_tokens is of texts; images have a size, give img_size, got {num_tokens}")
    embeds, size = _embeds(sheet), image_size(sheet.model, img_size)
    height, width = patch_grid(embeds, size, fixed=not getattr(sheet.model, "dynamic_img_size", True))  # a NaFlexVit has no such flag
    return size, height * width, _projection(sheet, embeds.proj, height * width)


def _embeds(sheet: Sheet) -> nn.Module:
    embeds = sheet.model.patch_embed if hasattr(sheet.model, "patch_embed") else sheet.model.embeds
    if type(embeds) not in (PatchEmbed, NaFlexEmbeds):
        raise sheet.refuse(embeds, "PatchEmbed, NaFlexEmbeds")
    sheet.entered.add(embeds)
    return embeds


def _projection(sheet: Sheet, proj: nn.Module, num_patches: int) -> int:
    """Of each patch's pixels: a linear layer, or a convolution that steps from patch to patch."""
    if type(proj) is nn.Linear:
        return sheet.linear(proj, num_patches)
    if type(proj) is not nn.Conv2d or proj.stride != proj.kernel_size:
        raise sheet.refuse(proj, "an nn.Conv2d whose stride is its kernel size, nn.Linear")
    sheet.entered.add(proj)
    return num_patches * proj.weight.numel()


def _blocks(sheet: Sheet, num_tokens: int, given: Sequence[Given]) -> Iterator[BlockMacs]:
    """Each block, at the tokens that the blocks before have left."""
    left = num_tokens
    for block, told in zip(sheet.model.blocks, given, strict=True):
        cost = _block(sheet, block, left, told, whole=num_tokens)
        yield cost
        left -= cost.num_merged


def _block(sheet: Sheet, block: nn.Module, num_tokens: int, given: Given, *, whole: int) -> BlockMacs:
    """One block on num_tokens tokens; `whole` of them are in a model where nothing merges."""
    if type(block) not in (*BLOCKS, PrunedBlock):
        raise sheet.refuse(block, ", ".join(kind.__name__ for kind in BLOCKS))
    attn = block.attn
    if type(attn) not in (Attention, PrunedAttention, FusedAttention):
        raise sheet.refuse(attn, "Attention, PrunedAttention, FusedAttention")
    stack = getattr(attn, "prune", None)
    if type(attn) is PrunedAttention and not is_plain_linear(attn.qkv):
        raise TypeError(f"{sheet.names[attn.qkv]} is a {type(attn.qkv).__name__} or has hooks: a patched block calls it whole, and its MACs are not known")
    columns = _num_columns(sheet.names[attn], stack, num_tokens, given.columns)
    heads = _num_heads(sheet.names[attn], attn, stack, given.heads)
    merged = sum(method.num_merges(num_tokens) for method in stack.mergers) if stack is not None else 0
    mlp = sheet.mlp(block.mlp, num_tokens - merged)
    key_free = stack is not None and stack.query_key_free

    def attention(tokens: int, columns: int, *, key_free: bool = False, heads: float = attn.num_heads) -> dict[str, int]:
        return _attention(sheet, attn, tokens, columns, key_free=key_free, heads=heads)

    return BlockMacs(
        name=sheet.names[block],
        num_tokens=num_tokens,
        num_columns=columns,
        num_merged=merged,
        num_heads=heads,
        parts={**attention(num_tokens, columns, key_free=key_free, heads=heads), **_overhead(attn, stack, num_tokens, given), "mlp": mlp},
        dense=sum(attention(whole, whole).values()) + sheet.mlp(block.mlp, whole),
        ceiling=sum(attention(num_tokens, 0, key_free=key_free, heads=heads).values()) + mlp,
        all_projected={name: macs for name, macs in attention(num_tokens, columns, key_free=key_free).items() if name in PROJECTIONS},
    )


def _num_columns(name: str, stack: Prune | None, num_tokens: int, given: int | None) -> int:
    """M of a block. Raises: NotImplementedError for a method whose effect on the host's own products is not known here."""
    methods = list(stack.children()) if stack is not None else []
    for method in methods:
        unknown = [hook for hook in PROVIDERS if method.answers(hook) and not isinstance(method, KNOWN)]
        if unknown:
            raise NotImplementedError(f"{name}: {type(method).__name__} provides `{unknown[0]}`, which the closed form does not count")
    choosers = [method for method in methods if isinstance(method, ColumnsMethod)]  # one at most
    if choosers and choosers[0].config.rule != "topk":
        return _given_columns(name, choosers[0], num_tokens, given)
    columns = num_kept(num_tokens, choosers[0].num_prefix_tokens, choosers[0].keep_ratio) if choosers else num_tokens
    if given is not None:
        raise ValueError(f"{name}: num_columns is for the rules mass and threshold; here M is {columns}")
    return columns


def _num_heads(name: str, attn: nn.Module, stack: Prune | None, given: float | None) -> float:
    """k of a block. Raises: ValueError where it depends on the image and is not told, is out of range, or is told and does not depend on it."""
    gates = [method for method in stack.children() if isinstance(method, BudgetFormerMethod)] if stack is not None else []
    heads = gates[0].known_heads if gates else attn.num_heads
    if given is None and heads is None:
        how = "num_heads, one k per block, or fix it by vp.set_heads(model, k), --heads in the tools"
        raise ValueError(f"{name}: how many heads run depends on the image: give {how}")
    if given is not None and not 1 <= given <= attn.num_heads:
        raise ValueError(f"{name}: num_heads must be in 1..{attn.num_heads}, got {given}")
    if given is not None and heads not in (None, given):
        raise ValueError(f"{name}: num_heads is for gates whose budget decides; here {heads} of {attn.num_heads} heads run")
    return heads if given is None else given


def _given_columns(name: str, method: ColumnsMethod, num_tokens: int, given: int | None) -> int:
    if given is None:
        raise ValueError(f"{name}: under the rule {method.config.rule} M depends on the image: give num_columns, one M per block")
    if not method.num_prefix_tokens < given <= num_tokens:
        raise ValueError(f"{name}: num_columns must be in {method.num_prefix_tokens + 1}..{num_tokens}, got {given}")
    return given


def _attention(sheet: Sheet, attn: nn.Module, num_tokens: int, num_columns: int, *, key_free: bool, heads: float) -> dict[str, int]:
    """The host's own products of the heads that run, without the methods'. key_free: attention is softmax(bias) v, one row for all queries."""
    queries = 0 if key_free else num_tokens
    proj_rows = 1 if key_free and attn.gate is None else num_tokens
    per_row = attn.weight.shape[1] * attn.attn_dim if type(attn) is FusedAttention else sheet.linear(attn.qkv, 1) // 3  # D A, a third of the qkv projection
    share = Fraction(heads) / attn.num_heads
    of_heads = attn.attn_dim * share
    projected = sheet.linear(attn.proj, proj_rows)
    if heads < attn.num_heads and attn.can_cut_proj(attn.gate):
        projected = round(projected * share)
    return {
        "q": round(queries * per_row * share),
        "kv": round(num_columns * per_row * share) * (1 if key_free else 2),
        "qk": round(queries * num_columns * of_heads),
        "av": round(max(1, queries) * num_columns * of_heads),
        "gate": sheet.linear(attn.gate, num_tokens),
        "proj": projected,
    }


def _overhead(attn: nn.Module, stack: Prune | None, num_tokens: int, given: Given) -> dict[str, int]:
    """What the methods report: the selection of columns, heads and pairs of tokens, and everything else, which adds to the logits."""
    fused = type(attn) is FusedAttention
    overhead = {"bias": num_tokens * attn.weight.shape[1] * sum(attn.first[1:]) if fused else 0, "selection": 0}
    for method in stack.children() if stack is not None else ():
        if isinstance(method, ColumnsMethod):
            overhead["selection"] += method.macs(num_tokens, given.columns, query_key_free=stack.query_key_free, riding=fused)
        elif isinstance(method, ToMeMethod):
            has_all_keys = stack.keeps_all and _num_heads("", attn, stack, given.heads) == attn.num_heads
            overhead["selection"] += method.macs(num_tokens, has_all_keys=has_all_keys, query_key_free=stack.query_key_free)
        elif isinstance(method, BudgetFormerMethod):
            overhead["selection"] += method.macs(num_tokens)
        elif not (fused and method.reads):
            overhead["bias"] += method.macs(num_tokens)
    return overhead


def _pool(sheet: Sheet, num_tokens: int) -> int:
    pool = sheet.model.attn_pool
    if pool is None:
        return 0
    rows = num_tokens if sheet.model.pool_include_prefix else num_tokens - sheet.model.num_prefix_tokens
    sheet.entered.add(pool)
    if type(pool) is AttentionPoolPrr:
        return 2 * rows * rows * pool.out_features  # q k^T and weights v of x itself
    if type(pool) is not AttentionPoolLatent:
        raise sheet.refuse(pool, "AttentionPoolLatent, AttentionPoolPrr")
    latents = pool.latent_len
    projections = sheet.linear(pool.q, latents) + sheet.linear(pool.kv, rows) + sheet.linear(pool.proj, latents)
    mlp = 0 if pool.mlp is None else sheet.mlp(pool.mlp, latents)
    return projections + 2 * latents * rows * pool.num_heads * pool.head_dim + mlp


def _head(sheet: Sheet, num_tokens: int) -> int:
    """The classifier, and the second one of a distilled model; global_pool='' sends every token through it."""
    pooled = sheet.model.attn_pool is not None or sheet.model.global_pool in ONE_ROW_POOLS
    distilled = getattr(sheet.model, "head_dist", None)
    rows = 1 if pooled or distilled is not None else num_tokens
    return sheet.linear(sheet.model.head, rows) + sheet.linear(distilled, rows)
