"""Heads and channels are cut so that what is left computes what the dense model computes without them."""

import copy
import json
import pickle

import pytest
import timm
import torch
from timm.layers import Attention, GluMlp, SwiGLU
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn.utils.prune import random_unstructured

import vit_prune as vp
from tests.helpers import tiny_named, tiny_vit
from vit_prune.analysis.noop import perturb, relative
from vit_prune.measure.macs import count_macs, macs
from vit_prune.methods.base import BlockCalibration
from vit_prune.methods.l1 import L1, BlockPlan, PrunePlan
from vit_prune.methods.units import channel_units, head_units
from vit_prune.patch.check import UnsupportedModel
from vit_prune.prune import prune

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
QK_NORM = {"qk_norm": True, "qkv_bias": False, "proj_bias": False, "init_values": 0.5}


def plan_of_heads(model: nn.Module, *kept: tuple[int, ...]) -> PrunePlan:
    """One tuple of heads per block; all channels stay."""
    sizes = [(block.attn.num_heads, block.mlp.fc2.in_features) for block in model.blocks]
    return PrunePlan(tuple(BlockPlan(count, heads, hidden, tuple(range(hidden))) for heads, (count, hidden) in zip(kept, sizes, strict=True)))


@torch.no_grad()
def masked(dense: nn.Module, plan: PrunePlan) -> nn.Module:
    """The dense model with nothing coming out of the heads and channels that the plan removes."""
    model = copy.deepcopy(dense)
    for block, kept in zip(model.blocks, plan.blocks, strict=True):
        out_of_heads = block.attn.proj.weight.unflatten(1, (kept.num_heads, -1))
        out_of_heads[:, [head for head in range(kept.num_heads) if head not in kept.heads]] = 0
        block.mlp.fc2.weight[:, [channel for channel in range(kept.num_channels) if channel not in kept.channels]] = 0
    return model


@torch.no_grad()
def difference(model: nn.Module, other: nn.Module, images: torch.Tensor = IMAGES) -> float:
    return relative(model(images), other(images))


def numbered_attention() -> nn.Module:
    """One block of width 12 with 3 heads; the qkv rows are numbered 0..35 in every column, the proj columns 0..11 in every row."""
    model = tiny_vit(embed_dim=12, num_heads=3, depth=1)
    with torch.no_grad():
        attn = model.blocks[0].attn
        attn.qkv.weight.copy_(torch.arange(36.0)[:, None].expand(36, 12))
        attn.qkv.bias.copy_(torch.arange(36.0))
        attn.proj.weight.copy_(torch.arange(12.0).expand(12, 12))
    return model


def test_head_1_of_3_takes_its_rows_of_q_k_and_v_and_its_columns_of_proj():
    model = numbered_attention()
    prune(model, plan_of_heads(model, (0, 2)))
    attn = model.blocks[0].attn
    rows = [row for row in range(36) if row not in (4, 5, 6, 7, 16, 17, 18, 19, 28, 29, 30, 31)]
    assert attn.qkv.weight[:, 0].tolist() == attn.qkv.bias.tolist() == rows
    assert attn.proj.weight[0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert (attn.num_heads, attn.head_dim, attn.attn_dim, attn.scale) == (2, 4, 8, 0.5)
    assert (attn.qkv.in_features, attn.qkv.out_features, attn.proj.in_features, attn.proj.out_features) == (12, 24, 8, 12)
    assert model(IMAGES).isfinite().all()


def test_twice_in_a_row_down_to_one_head():
    model = numbered_attention()
    prune(model, plan_of_heads(model, (0, 2)))
    plan = prune(model, PrunePlan((BlockPlan(3, (2,), 48, tuple(range(48))),)))  # head 2 of the original is the second now
    attn = model.blocks[0].attn
    assert attn.qkv.bias.tolist() == [8, 9, 10, 11, 20, 21, 22, 23, 32, 33, 34, 35]
    assert attn.proj.weight[0].tolist() == [8, 9, 10, 11]
    assert plan == model.prune_plan
    once = numbered_attention()
    prune(once, plan)
    assert difference(model, once) == 0


@pytest.mark.parametrize("args", [{}, {"qkv_bias": False}, {"qk_norm": True}, QK_NORM], ids=str)
@pytest.mark.parametrize("heads", [(0, 2), (1,)], ids=str)
def test_fused_and_unfused_attention_agree_with_the_masked_dense_model(args, heads):
    dense = tiny_vit(embed_dim=12, num_heads=3, **args)
    model = copy.deepcopy(dense)
    plan = prune(model, plan_of_heads(model, heads, (2,)))
    for fused in (True, False):
        for block in model.blocks:
            block.attn.fused_attn = fused
        assert difference(model, masked(dense, plan)) < 1e-5


HOSTS = {
    "deit_tiny_patch16_224": {},
    "deit_tiny_distilled_patch16_224": {},
    "deit3_small_patch16_224": {},
    "vit_small_patch16_224": QK_NORM,
    "vit_base_patch16_gap_224": {},
    "vit_small_patch14_reg4_dinov2": {"img_size": 56},
    "vit_giant_patch14_reg4_dinov2": {"img_size": 56, "embed_dim": 96, "num_heads": 4},  # a gated MLP in one layer
    "aimv2_large_patch14_224": {"img_size": 56, "embed_dim": 96, "num_heads": 4},  # and in two
    "vit_wee_patch16_reg1_gap_256": {},
    "vit_base_patch16_siglip_224": {"embed_dim": 96, "num_heads": 4},
    "flexivit_small": {},
    "vit_base_patch32_clip_quickgelu_224": {"embed_dim": 96, "num_heads": 4},
    "naflexvit_base_patch16_gap": {"embed_dim": 96, "num_heads": 4},
}
BEIT3 = "beit3_base_patch16_224", {"embed_dim": 96, "num_heads": 4}  # norms over all heads and over all channels


def host(name: str, args: dict) -> tuple[nn.Module, torch.Tensor]:
    size = {} if name.startswith("naflex") else {"img_size": 64}
    args = {**size, "depth": 2, "num_classes": 5, **args}
    torch.manual_seed(0)
    return perturb(timm.create_model(name, **args)).eval(), torch.randn(2, 3, *(args.get("img_size", 64),) * 2)


@pytest.mark.parametrize("ranking", ["uniform", "global"])
@pytest.mark.parametrize("name", HOSTS)
def test_the_cut_model_is_the_dense_one_without_what_was_cut(name, ranking):
    dense, images = host(name, HOSTS[name])
    model = copy.deepcopy(dense)
    plan = prune(model, L1(heads=0.4, mlp=0.5, ranking=ranking))
    assert difference(model, dense, images) > 1e-3
    assert difference(model, masked(dense, plan), images) < 1e-5
    assert count_macs(model, images.shape[-1]) == macs(model, images.shape[-1]).total < macs(dense, images.shape[-1]).total


def test_the_hosts_cover_both_gated_mlps():
    kinds = {type(host(name, HOSTS[name])[0].blocks[0].mlp) for name in ("vit_giant_patch14_reg4_dinov2", "aimv2_large_patch14_224")}
    assert kinds == {GluMlp, SwiGLU}


def gated() -> nn.Module:
    model = tiny_vit()
    for block in model.blocks:
        block.attn = Attention(32, 4, qkv_bias=True, gated=True)
    return perturb(model).eval()


def test_an_output_gate_is_cut_along():
    dense = gated()
    model = copy.deepcopy(dense)
    plan = prune(model, L1(heads=0.5, mlp=0))
    assert model.blocks[0].attn.gate.weight.shape == (16, 32)
    assert difference(model, masked(dense, plan)) < 1e-5
    assert count_macs(model) == macs(model).total


def test_heads_and_channels_are_scored_by_the_mean_of_their_weights():
    model = tiny_vit()
    attn, mlp = model.blocks[0].attn, model.blocks[0].mlp
    q, k, v = (rows[8:16] for rows in attn.qkv.weight.detach().chunk(3))
    weights = torch.cat([q.flatten(), k.flatten(), v.flatten(), attn.proj.weight.detach()[:, 8:16].flatten()])
    torch.testing.assert_close(head_units(attn).magnitudes()[1], weights.abs().mean().double())
    weights = torch.cat([mlp.fc1.weight.detach()[3], mlp.fc2.weight.detach()[:, 3]])
    torch.testing.assert_close(channel_units(mlp).magnitudes()[3], weights.abs().mean().double())


@pytest.mark.parametrize("layer", [GluMlp, SwiGLU])
def test_a_gated_channel_is_scored_by_both_its_rows(layer):
    model = tiny_vit(mlp_layer=layer)
    units = channel_units(model.blocks[0].mlp)
    before = units.magnitudes()
    first = units.axes[0].linear.weight
    with torch.no_grad():
        first[3].add_(10)  # of the first half, or of fc1_g
        (first[units.count + 5] if layer is GluMlp else units.axes[1].linear.weight[5]).add_(10)
    assert (units.magnitudes() - before > 1).nonzero().flatten().tolist() == [3, 5]


def test_pruning_again_composes_to_one_plan_of_the_original():
    dense = tiny_named()
    model = copy.deepcopy(dense)
    first = prune(model, L1(0.25, 0.5))
    second = prune(model, L1(0.34, 0.25, "global"))
    assert [len(block.heads) for block in first.blocks] == [3, 3]
    assert sum(len(block.heads) for block in second.blocks) == 4
    for before, after in zip(first.blocks, second.blocks, strict=True):
        assert set(after.heads) <= set(before.heads)
        assert set(after.channels) < set(before.channels)
    replayed = copy.deepcopy(dense)
    prune(replayed, PrunePlan.from_dict(second.to_dict()))
    assert replayed.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, replayed.state_dict()[name]) for name, value in model.state_dict().items())


def test_what_the_cut_parameters_keep():
    model = tiny_named().bfloat16().train()
    model.blocks[0].attn.qkv.weight.requires_grad_(False)
    norm, untouched = model.blocks[0].norm1.weight, model.blocks[0].attn.proj.bias
    prune(model, L1(0.5, 0.5))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(module.training for module in model.modules())
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == ["blocks.0.attn.qkv.weight"]
    assert model.blocks[0].norm1.weight is norm
    assert model.blocks[0].attn.proj.bias is untouched
    model(IMAGES.bfloat16()).sum().backward()
    assert model.blocks[0].mlp.fc1.weight.grad.shape == (64, 32)
    assert model.blocks[0].attn.qkv.weight.grad is None


def test_copies_and_pickles_keep_the_plan():
    model = tiny_named()
    plan = prune(model, L1())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied.prune_plan == plan
        assert difference(copied, model) == 0


def test_a_calibration_of_the_dense_model_is_dropped_with_a_warning():
    model = tiny_vit()
    model.calibration = [BlockCalibration(torch.randn(4, 8), torch.randn(32, 0)) for _ in model.blocks]
    with pytest.warns(UserWarning, match=r"run vp\.calibrate again"):
        prune(model, L1(0, 0.5))
    with pytest.raises(ValueError, match=r"run vp\.calibrate"):
        vp.patch(model, vp.Columns(keep=0.5, importance="column_mean"))


@pytest.fixture(scope="module")
def refused() -> dict:
    """name: (model, how, error, message)."""
    adapted, masked_layer, scaled, other_mlp, out_of_heads, smaller, broken = (tiny_vit() for _ in range(7))
    scaled.blocks[0].mlp.fc2.scale = nn.Parameter(torch.ones(32))
    adapted.blocks[1].attn.qkv = nn.Sequential(adapted.blocks[1].attn.qkv)
    out_of_heads.blocks[1].attn.proj = nn.Sequential(out_of_heads.blocks[1].attn.proj)
    random_unstructured(masked_layer.blocks[1].mlp.fc1, "weight", 0.5)
    other_mlp.blocks[1].mlp = nn.Sequential(nn.Linear(32, 32))
    prune(smaller, L1(0.5, 0.5))
    broken.blocks[1].attn.qkv.weight.data[0, 0] = float("nan")
    half = plan_of_heads(tiny_vit(num_heads=2), (0,), (0, 1))
    return {
        "patched": (vp.patch(tiny_vit(), vp.TokenBias()), L1(), ValueError, r"the model is patched: vp\.unpatch it"),
        "compiled": (torch.compile(tiny_vit()), L1(), UnsupportedModel, "the model is compiled"),
        "resnet": (timm.create_model("test_resnet"), L1(), UnsupportedModel, "ResNet cannot be patched"),
        "beit3": (host(*BEIT3)[0], L1(), UnsupportedModel, r"blocks\.0\.attn\.norm is a LayerNorm"),
        "mlp norm": (tiny_vit(scale_mlp_norm=True), L1(), UnsupportedModel, r"blocks\.0\.mlp\.norm is a LayerNorm over all units.*mlp=0 leaves them"),
        "attention norm": (tiny_vit(scale_attn_norm=True), L1(), UnsupportedModel, r"blocks\.0\.attn\.norm is a LayerNorm over all units"),
        "other mlp": (other_mlp, L1(), UnsupportedModel, r"blocks\.1\.mlp is Sequential.*supported: Mlp, GluMlp, SwiGLU"),
        "adapted qkv": (adapted, L1(), UnsupportedModel, r"blocks\.1\.attn\.qkv is a Sequential"),
        "adapted proj": (out_of_heads, L1(), UnsupportedModel, r"blocks\.1\.attn\.proj is a Sequential"),
        "masked fc1": (masked_layer, L1(), UnsupportedModel, r"blocks\.1\.mlp\.fc1 is a Linear and no plain nn\.Linear"),
        "scaled fc2": (scaled, L1(), UnsupportedModel, r"blocks\.0\.mlp\.fc2 is a Linear and no plain nn\.Linear"),
        "too few": (tiny_vit(), L1(0.1, 0.5), ValueError, "heads: a share of 0.1 of 4 per block removes no whole head"),
        "nan": (broken, L1(), ValueError, r"heads of blocks\.1 are not finite"),
        "other plan": (tiny_vit(), half, ValueError, r"it is of 2 heads and 128 channels in blocks\.0, the model of 4 heads"),
        "other depth": (tiny_vit(depth=3), plan_of_heads(tiny_vit(), (0,), (0,)), ValueError, "it is of 2 blocks, the model of 3 blocks"),
        "nothing more": (smaller, smaller.prune_plan, ValueError, "the plan removes nothing"),
        "lost": (smaller, plan_of_heads(tiny_vit(), (0, 1, 2, 3), (0,)), ValueError, r"the plan keeps head \d of blocks\.0, which this model has lost"),
        "no config": (tiny_vit(), 0.5, TypeError, "how must be L1"),
    }


NAMES = (
    "patched, compiled, resnet, beit3, mlp norm, attention norm, other mlp, adapted qkv, adapted proj, masked fc1, scaled fc2, too few, nan, "
    "other plan, other depth, nothing more, lost, no config"
)


@pytest.mark.parametrize("name", NAMES.split(", "))
def test_what_is_refused_is_named_and_nothing_is_changed(refused, name):
    model, how, error, message = refused[name]
    before = dict(model.named_parameters())
    shapes = {name: parameter.shape for name, parameter in before.items()}
    plan = getattr(model, "prune_plan", None)
    with pytest.raises(error, match=message):
        prune(model, how)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert {name: parameter.shape for name, parameter in after.items()} == shapes
    assert getattr(model, "prune_plan", None) == plan


def test_what_cannot_be_cut_may_stay_whole():
    model = tiny_vit(scale_attn_norm=True)
    assert len(prune(model, L1(0, 0.5)).blocks[0].heads) == 4
    model = tiny_vit(scale_mlp_norm=True)
    prune(model, L1(0.5, 0))
    assert model(IMAGES).shape == (2, 5)
    model = tiny_vit()
    model.blocks[1].mlp = nn.Sequential(nn.Linear(32, 32))
    plan = prune(model, L1(0.5, 0))
    assert plan.blocks[1].num_channels == 0
    assert PrunePlan.from_dict(plan.to_dict()) == plan


def test_a_model_that_lost_blocks_after_it_was_pruned_is_refused():
    model = tiny_vit()
    prune(model, L1(0.25, 0))
    model.prune_intermediate_layers([0], prune_norm=False)
    with pytest.raises(ValueError, match=r"model\.prune_plan is of 2 blocks, the model has 1"):
        prune(model, L1(0.5, 0))


@pytest.mark.filterwarnings("ignore:the token bias is all zero")
@pytest.mark.parametrize("methods", [None, vp.TokenBias(keep=0.5), [vp.TokenBias(), vp.Columns(keep=0.7, dropped="merge")]], ids=["dense", "bias", "merge"])
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_a_cut_and_patched_model_comes_back_bit_for_bit(tmp_path, name, methods):
    model = tiny_named(name)
    plan = prune(model, L1(0.5, 0.5, "global"))
    if methods is not None:
        vp.patch(model, methods)
    vp.save(model, tmp_path)
    loaded = vp.load(tmp_path).eval()
    assert loaded.prune_plan == plan
    assert difference(loaded, model) == 0
    if methods is not None:
        assert difference(vp.fuse(copy.deepcopy(loaded)), model) < 1e-5
        assert macs(loaded).total == count_macs(loaded)
        vp.unpatch(loaded)
    again = prune(loaded, L1(0, 0.5))
    assert len(again.blocks[0].channels) < len(plan.blocks[0].channels)
    vp.save(loaded, tmp_path / "again")
    assert vp.load(tmp_path / "again").prune_plan == again


def test_a_model_that_timm_did_not_name_is_saved_with_its_original_heads(tmp_path):
    torch.manual_seed(0)
    args = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
    model = perturb(VisionTransformer(**args)).eval()
    prune(model, L1(0.5, 0.5))
    vp.save(model, tmp_path, model_args={"architecture": "vit_tiny_patch16_224"})
    assert difference(vp.load(tmp_path).eval(), model) == 0


def test_older_configs_have_no_plan_and_load(tmp_path):
    model = tiny_named()
    vp.save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("prune_plan", ...) is None
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert difference(vp.load(tmp_path).eval(), model) == 0


def test_a_broken_plan_is_named_with_its_file(tmp_path):
    model = tiny_named()
    prune(model, L1())
    vp.save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["prune_plan"]["blocks"][0]["heads"] = [7]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json: heads of a plan must be rising numbers below num_heads, 4"):
        vp.load(tmp_path)


def test_cut_weights_do_not_load_into_the_dense_model(tmp_path):
    model, dense = tiny_named(), tiny_named()
    prune(model, L1())
    vp.save(model, tmp_path)
    before = copy.deepcopy(dense.state_dict())
    with pytest.raises(ValueError, match=r"of another shape: blocks\.0\.attn\.proj\.weight \(\(32, 24\) in the file, \(32, 32\) in the model\)"):
        vp.load_weights(dense, tmp_path)
    assert all(torch.equal(value, dense.state_dict()[name]) for name, value in before.items())
    assert vp.load_weights(model, tmp_path).matched == len(before)
