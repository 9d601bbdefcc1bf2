import json
from dataclasses import FrozenInstanceError
from itertools import product

import pytest
import timm
import torch
from timm.layers import Attention, SwiGLU
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import vit_prune as vp
from tests.helpers import randomise_bias, tiny_vit
from vit_prune.measure.macs import count_macs, macs
from vit_prune.methods.base import BlockCalibration, Method, MethodConfig
from vit_prune.methods.importance import IMPORTANCES, PROBABILITIES
from vit_prune.patch import check

pytestmark = pytest.mark.filterwarnings("ignore:the token bias is all zero")


def gated_vit(**kwargs) -> VisionTransformer:
    """Output gate and heads that are wider than D / H."""
    model = VisionTransformer(**kwargs)
    for block in model.blocks:
        block.attn = Attention(model.embed_dim, num_heads=block.attn.num_heads, attn_head_dim=24, qkv_bias=True, gated=True)
    return model


TINY = {"depth": 2, "embed_dim": 64, "num_heads": 4}
HOSTS = {
    "class token": ("deit_tiny_patch16_224", {"depth": 2}),
    "distilled, two heads": ("deit_tiny_distilled_patch16_224", {"depth": 2}),
    "LayerScale, no_embed_class": ("deit3_small_patch16_224", {"depth": 2}),
    "registers": ("vit_small_patch14_reg4_dinov2", {"depth": 2, "img_size": 56}),
    "SwiGLU": ("vit_giant_patch14_reg4_dinov2", {**TINY, "embed_dim": 96, "img_size": 56}),
    "map pooling": ("vit_base_patch16_siglip_224", {"depth": 2}),
    "map pooling and head": ("test_vit3", {"depth": 2}),
    "no class token, average pooling": ("vit_medium_patch16_gap_256", {"depth": 2}),
    "registers, average pooling": ("vit_little_patch16_reg4_gap_256", {"depth": 2}),
    "pre-norm": ("vit_base_patch16_clip_224", {"depth": 2}),
    "size not a multiple of the patch": ("vit_so400m_patch14_siglip_gap_384", {"depth": 2, "img_size": 100}),
    "NaFlex": ("naflexvit_base_patch16_gap", {"depth": 2}),
    "NaFlex, map pooling": ("naflexvit_base_patch16_siglip", {"depth": 2}),
    "not square": ("deit_tiny_patch16_224", {"depth": 2, "img_size": (96, 160)}),
    "gated, wide heads": (gated_vit, {**TINY, "img_size": 64}),
    "qk_norm, scale norms": (VisionTransformer, {**TINY, "img_size": 64, "qk_norm": True, "scale_attn_norm": True, "scale_mlp_norm": True}),
    "split SwiGLU": (VisionTransformer, {**TINY, "img_size": 64, "mlp_layer": SwiGLU}),
    "prr pooling": (VisionTransformer, {**TINY, "img_size": 64, "global_pool": "prr"}),
    "no pooling, head on every token": (VisionTransformer, {**TINY, "img_size": 64, "global_pool": ""}),
    "no head": (VisionTransformer, {**TINY, "img_size": 64, "num_classes": 0}),
    "padded to whole patches": (VisionTransformer, {**TINY, "img_size": 64, "dynamic_img_size": True, "dynamic_img_pad": True}),
}
OTHER_SIZES = {"NaFlex": (224, 320), "padded to whole patches": (70, 100)}


def on_meta(make, **kwargs) -> nn.Module:
    with torch.device("meta"):
        model = timm.create_model(make, **kwargs) if isinstance(make, str) else make(**kwargs)
    return model.eval()


def calibrated(model: nn.Module, rank: int = 32) -> nn.Module:
    attn = model.blocks[0].attn
    model.calibration = [BlockCalibration(torch.randn(attn.num_heads, attn.head_dim), torch.randn(model.embed_dim, rank)) for _ in model.blocks]
    return model


def columns(**kwargs) -> list:
    return [vp.TokenBias(query_key_free=kwargs.pop("query_key_free", 0)), vp.Columns(**kwargs)]


@pytest.mark.parametrize("host", HOSTS)
def test_every_host_equals_the_counter_so_that_no_module_of_it_is_left_out(host):
    make, kwargs = HOSTS[host]
    model = calibrated(on_meta(make, **kwargs))
    size = OTHER_SIZES.get(host)
    assert macs(model, size).total == macs(model, size).dense == count_macs(model, size)
    dense = macs(model, size).total
    for methods in (columns(keep=(1.0, 0.5)), columns(keep=0.5, dropped="merge", query_key_free=1, importance="prob")):
        with vp.patched(model, methods):
            result = macs(model, size)
            assert (result.total, result.dense) == (count_macs(model, size), dense)
            assert result.ceiling < result.total


SELECTIONS = [{"importance": importance} for importance in IMPORTANCES]
SELECTIONS += [{"importance": importance, "sampling": "systematic"} for importance in PROBABILITIES]


@pytest.mark.parametrize("how", SELECTIONS, ids=lambda how: "-".join(how.values()))
@pytest.mark.parametrize("dropped", ["drop", "merge"])
def test_the_selection_reports_all_that_it_costs(how, dropped):
    model = on_meta("deit_tiny_patch16_224", depth=2, img_size=80)
    for keep, key_free, rank in product((1.0, 0.5), (0, 1), (0, 32)):
        with vp.patched(calibrated(model, rank), columns(keep=keep, dropped=dropped, query_key_free=key_free, **how)):
            assert macs(model).total == count_macs(model)


def test_overhead_by_hand():
    """Guards against a figure that leaves out its own overhead."""
    model = calibrated(on_meta("deit_tiny_patch16_224", depth=2))
    vp.patch(model, columns(keep=0.5, importance="column_mean", dropped="merge", merge_rank=16))
    parts = macs(model).blocks[0].parts
    assert parts["bias"] == 197 * 192 * 3
    anticipated = 3 * 64 * 192 + 197 * 3 * 192  # W_k^T q_mean, and its product with each x
    assert parts["selection"] == anticipated + 197 * 192 * 16 + (197 - 99) * 98 * 16  # x to 16 directions; (N - M) (M - P) r
    assert macs(model).blocks[0].overhead == parts["bias"] + parts["selection"]


def test_columns_alone_and_a_schedule_give_each_block_its_own_m():
    model = on_meta("deit_tiny_patch16_224", depth=2)
    vp.patch(model, vp.Columns(keep=(1.0, 0.5), importance="random"))
    assert [block.num_columns for block in macs(model).blocks] == [197, 1 + 98]
    assert macs(model).total == count_macs(model)
    vp.set_keep(model, 0.25)
    assert [block.num_columns for block in macs(model).blocks] == [1 + 49, 1 + 49]


def test_query_key_free_blocks_have_no_queries_and_one_row_of_proj_unless_gated():
    for make, width, rows in ((VisionTransformer, 64, 1), (gated_vit, 4 * 24, 17)):
        model = vp.patch(on_meta(make, **TINY, img_size=64), columns(keep=0.5, query_key_free=1))
        parts = macs(model).blocks[-1].parts
        assert (parts["q"], parts["qk"], parts["kv"], parts["av"]) == (0, 0, 9 * 64 * width, 9 * width)
        assert parts["proj"] == rows * width * 64


def test_deit_small_is_4598882304_macs_and_twice_as_many_flops():
    result = macs(on_meta("deit_small_patch16_224"))
    assert result.total == 4_598_882_304
    assert result.flops == 2 * 4_598_882_304


def test_485_gflops_at_1024_px_is_patch_embedding_and_blocks():
    """The paper's Table 2: no class token, no head. 242.80 GMACs = 485.60 GFLOPs."""
    model = on_meta(VisionTransformer, img_size=1024, embed_dim=384, num_heads=6, class_token=False, global_pool="avg", num_classes=0)
    N, D = 4096, 384
    result = macs(model)
    assert result.patch_embed == N * 3 * 16 * 16 * D
    assert [block.total for block in result.blocks] == [12 * N * D**2 + 2 * N**2 * D] * 12
    assert result.total == count_macs(model) == 242_799_869_952
    assert round(result.flops / 1e9, 2) == 485.60


@pytest.mark.parametrize(("dim", "heads", "share"), [(192, 3, 0.288), (384, 6, 0.232), (768, 12, 0.201), (1024, 16, 0.193)])
def test_ceiling_of_a_block_at_197_tokens(dim, heads, share):
    model = on_meta("deit_small_patch16_224", depth=1, embed_dim=dim, num_heads=heads)
    for methods in (None, columns(keep=0.5, dropped="merge")):  # what a method costs does not lower the ceiling
        if methods:
            vp.patch(model, methods)
        block = macs(model).blocks[0]
        assert round(block.ceiling_saved, 3) == share
        assert block.ceiling_speedup == pytest.approx(1 / (1 - block.ceiling_saved))


def test_ceiling_of_a_block_at_4096_tokens_is_70_percent():
    model = on_meta(VisionTransformer, img_size=1024, embed_dim=384, num_heads=6, depth=1, class_token=False, global_pool="avg")
    assert macs(model).blocks[0].ceiling_saved == pytest.approx(0.70, abs=1e-12)


@pytest.mark.parametrize("rule", [{"rule": "mass", "tau": 0.5}, {"rule": "threshold", "tau": 1.0}])
@pytest.mark.parametrize("dropped", ["drop", "merge"])
def test_rules_whose_m_depends_on_the_image_equal_a_real_count(rule, dropped):
    model = randomise_bias(vp.patch(calibrated(tiny_vit(), rank=8), columns(dropped=dropped, **rule)))
    kept = []
    for block in model.blocks:
        block.attn.prune.register_forward_hook(lambda _module, _args, output: kept.append(output.x.shape[1]))
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    assert any(m < 17 for m in kept)
    assert macs(model, num_columns=kept).total == counter.get_total_flops() // 2


def test_num_columns_is_asked_for_and_checked():
    model = on_meta("deit_tiny_patch16_224", depth=2)
    with vp.patched(model, columns(rule="mass", tau=0.9)):
        with pytest.raises(ValueError, match=r"blocks.0.attn: under the rule mass M depends on the image: give num_columns"):
            macs(model)
        with pytest.raises(ValueError, match=r"blocks.1.attn: num_columns must be in 2..197, got 198"):
            macs(model, num_columns=[50, 198])
        with pytest.raises(ValueError, match="num_columns lists 3 blocks, the model has 2"):
            macs(model, num_columns=[50, 50, 50])
    with vp.patched(model, columns(keep=0.5)), pytest.raises(ValueError, match="num_columns is for the rules mass and threshold; here M is 99"):
        macs(model, num_columns=[50, 50])


class LoraLinear(nn.Linear):
    """A subclass that multiplies more than its weight."""


class ToMeLike(MethodConfig):
    name = "tome_like"

    def build(self, host):
        return MergingMethod()


class MergingMethod(Method):
    def merge(self, x, metric, sizes, *, mask):
        return x, sizes


def replaced(path: str, module: nn.Module) -> nn.Module:
    model = on_meta("deit_tiny_patch16_224", depth=2)
    parent, _, child = path.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
    return model


@pytest.mark.parametrize(
    ("path", "module", "message"),
    [
        ("blocks.1.attn.qkv", LoraLinear(192, 576), "blocks.1.attn.qkv is .*LoraLinear, whose MACs are not known"),
        ("blocks.1.mlp.fc1", LoraLinear(192, 768), "blocks.1.mlp.fc1 is .*LoraLinear"),
        ("blocks.1.mlp.fc1", nn.Sequential(nn.Linear(192, 768)), "blocks.1.mlp.fc1.0 is .*Linear, which holds a matrix where the closed form knows of none"),
        ("blocks.1.mlp.act", nn.Conv1d(1, 1, 3), "blocks.1.mlp.act is torch.nn.modules.conv.Conv1d"),
        ("blocks.1.norm2", nn.Sequential(nn.LayerNorm(192), nn.Linear(192, 192)), "blocks.1.norm2.1 is torch.nn.modules.linear.Linear"),
        ("blocks.1.attn", nn.MultiheadAttention(192, 3), "blocks.1.attn is .*MultiheadAttention"),
        ("head", nn.Sequential(nn.Linear(192, 10)), "head is torch.nn.modules.container.Sequential"),
        ("attn_pool", nn.Linear(192, 192), "attn_pool is torch.nn.modules.linear.Linear"),
        ("patch_embed.proj", nn.Conv2d(3, 192, 16, stride=8), "patch_embed.proj is torch.nn.modules.conv.Conv2d.*stride"),
    ],
)
def test_an_unknown_module_is_named_not_left_out(path, module, message):
    with pytest.raises(TypeError, match=message):
        macs(replaced(path, module))


def test_unknown_models_blocks_and_embeddings_are_named():
    with pytest.raises(TypeError, match=r"timm.models.resnet.ResNet .* supported: VisionTransformer"):
        macs(on_meta("resnet18"))
    with pytest.raises(TypeError, match=r"blocks.0 is .*ParallelScalingBlock"):
        macs(on_meta("vit_base_patch16_xp_224"))
    with pytest.raises(TypeError, match=r"patch_embed is .*HybridEmbed"):
        macs(on_meta("vit_base_r50_s16_224"))


def test_a_patched_qkv_with_a_hook_is_refused_because_it_is_called_whole():
    model = vp.patch(on_meta("deit_tiny_patch16_224", depth=1), columns(keep=0.5))
    model.blocks[0].attn.qkv.register_forward_hook(lambda *_: None)
    with pytest.raises(TypeError, match=r"blocks.0.attn.qkv is a Linear or has hooks"):
        macs(model)


def test_a_method_that_changes_the_hosts_own_products_is_refused(monkeypatch):
    monkeypatch.setattr(check, "RUN_PROVIDERS", ("columns", "merge"))
    model = vp.patch(on_meta("deit_tiny_patch16_224", depth=1), ToMeLike())
    with pytest.raises(NotImplementedError, match=r"blocks.0.attn: MergingMethod provides `merge`"):
        macs(model)


@pytest.mark.parametrize(
    ("kwargs", "size", "message"),
    [
        ({"img_size": 64}, 80, "takes 64 x 64 pixels only, got 80 x 80"),
        ({"img_size": 64, "dynamic_img_size": True}, (64, 70), "64 x 70 pixels cannot be cut into patches of 16 x 16"),
        ({"img_size": 64, "dynamic_img_size": True}, (64, 8), "64 x 8 pixels cannot be cut"),
        ({"img_size": 64}, (64, 64, 64), "img_size must be a positive number of pixels"),
        ({"img_size": 64}, 0, "img_size must be a positive number of pixels"),
    ],
)
def test_a_size_that_the_model_does_not_take_is_refused(kwargs, size, message):
    with pytest.raises(ValueError, match=message):
        macs(on_meta(VisionTransformer, **TINY, **kwargs), size)


def test_parts_add_up_and_the_result_is_frozen_and_json_able():
    model = vp.patch(on_meta("test_vit3", depth=2), columns(keep=0.5, dropped="merge"))
    result = macs(model)
    data = json.loads(json.dumps(result.to_dict()))
    assert sum(data["parts"].values()) == data["macs"] == result.total
    assert data["flops"] == 2 * data["macs"]
    assert [sum(block["parts"].values()) for block in data["blocks"]] == [block.total for block in result.blocks]
    assert data["saved"] == pytest.approx(1 - result.total / result.dense)
    assert result.speedup == pytest.approx(result.dense / result.total)
    with pytest.raises(FrozenInstanceError):
        result.pool = 0


def test_compiled_and_wrapped_models_are_unwrapped():
    model = on_meta("deit_tiny_patch16_224", depth=1)
    wrapped = nn.DataParallel(torch.compile(model))
    assert macs(wrapped).total == count_macs(wrapped) == macs(model).total
