"""Heads that run alone: the same as all heads with the others' outputs set to zero, in every host and beside every method."""

import copy
import warnings

import pytest
import timm
import torch
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import vit_prune as vp
from tests.helpers import randomise_bias, randomise_gates, tiny_vit
from vit_prune.measure.macs import count_macs, macs
from vit_prune.methods.base import HeadGate
from vit_prune.methods.budgetformer import BudgetFormerMethod
from vit_prune.methods.l1 import BlockPlan, PrunePlan
from vit_prune.methods.stack import prune_stacks
from vit_prune.ops.heads import HeadGroup
from vit_prune.patch import unpatch

BATCH = 6
HOSTS = {
    "plain": {},
    "no biases": {"qkv_bias": False, "proj_bias": False},
    "qk norm": {"qk_norm": True, "init_values": 0.5},
    "norm": {"scale_attn_norm": True},
    "registers": {"reg_tokens": 2, "class_token": False, "global_pool": "avg"},
    "four blocks": {"depth": 4},
}
METHODS = {
    "alone": [],
    "columns": [vp.TokenBias(), vp.Columns(keep=0.5)],
    "merged columns": [vp.TokenBias(per_head=False), vp.Columns(keep=0.5, dropped="merge")],
    "no queries and keys": [vp.TokenBias(query_key_free=1)],
    "tome": [vp.ToMe(r=3)],
    "tome and columns": [vp.TokenBias(), vp.Columns(keep=0.7), vp.ToMe(r=2)],
}


def gated(methods=(), **kwargs) -> nn.Module:
    host = kwargs.pop("host", VisionTransformer)
    model = tiny_vit(host, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        vp.patch(model, [*methods, vp.BudgetFormer(tau_min=1.0)])
    return randomise_gates(randomise_bias(model))


def images(batch: int = BATCH) -> Tensor:
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(7))


def all_heads_others_zero(model: nn.Module, x: Tensor) -> tuple[Tensor, list[HeadGate]]:
    """The model with every head computed: those that the gates leave out get the weight 0."""
    seen, model = [], copy.deepcopy(model)

    def zeroed(stack, _args, kept):
        seen.append(kept.gate)
        weight = torch.zeros_like(kept.gate.weight)
        for chosen, heads in kept.gate.groups or [HeadGroup(None, torch.arange(weight.shape[1]).expand(len(weight), -1))]:
            rows = torch.arange(len(weight)) if chosen is None else chosen
            weight[rows[:, None], heads] = kept.gate.weight[rows[:, None], heads]
        return kept._replace(gate=kept.gate._replace(weight=weight, groups=None))

    for stack in prune_stacks(model):
        stack.register_forward_hook(zeroed)
    return model(x), seen


@pytest.mark.parametrize("methods", METHODS)
@pytest.mark.parametrize("host", HOSTS)
@torch.no_grad()
def test_heads_that_run_alone_equal_all_heads_with_the_others_zeroed(host, methods):
    model, x = gated(METHODS[methods], **HOSTS[host]), images()
    expected, seen = all_heads_others_zero(model, x)
    counts = {heads.shape[1] for gate in seen for _, heads in gate.groups or ()}
    assert len(counts) > 1  # mixed
    assert min(counts) < 4
    torch.testing.assert_close(model(x), expected, atol=1e-6, rtol=1e-5)
    for row in range(BATCH):
        torch.testing.assert_close(model(x[row : row + 1]), expected[row : row + 1], atol=1e-6, rtol=1e-5)
    if methods != "no queries and keys" or host != "qk norm":
        torch.testing.assert_close(vp.fuse(copy.deepcopy(model))(x), expected, atol=2e-6, rtol=1e-5)


@torch.no_grad()
def test_they_equal_timms_own_attention_with_those_heads_zeroed_before_the_projection():
    model, x = gated(), images()
    _, seen = all_heads_others_zero(model, x)
    plain, gates = unpatch(copy.deepcopy(model)), iter(seen)

    def zero(_proj, args):
        gate, weight = next(gates), torch.zeros(BATCH, 4)
        for chosen, heads in gate.groups:
            rows = torch.arange(BATCH) if chosen is None else chosen
            weight[rows[:, None], heads] = gate.weight[rows[:, None], heads]
        return (args[0] * weight.repeat_interleave(8, 1)[:, None],)

    for block in plain.blocks:
        block.attn.proj.register_forward_pre_hook(zero)
    torch.testing.assert_close(model(x), plain(x), atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_a_zero_gate_is_the_model_without_that_head(monkeypatch):
    x, weight = images(), torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    kept = BlockPlan(num_heads=4, heads=(0, 2, 3), num_channels=128, channels=tuple(range(128)))
    removed = tiny_vit()
    vp.prune(removed, PrunePlan((kept, kept)))
    for groups in (None, (HeadGroup(None, torch.tensor([[0, 2, 3]]).expand(BATCH, -1)),)):
        gate = HeadGate(weight.expand(BATCH, -1), groups, torch.ones(BATCH), weight / 3)
        monkeypatch.setattr(BudgetFormerMethod, "gate", lambda *_args, gate=gate, **_masks: gate)
        torch.testing.assert_close(gated()(x), removed(x), atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_a_mask_per_head_is_that_of_the_heads_that_run():
    model, x = gated(), images()
    mask = torch.rand(BATCH, 4, 17, 17, generator=torch.Generator().manual_seed(1)) > 0.3
    for given in (mask, mask[:1], mask[:, :1, :1]):
        expected, _ = all_heads_others_zero_masked(model, x, given)
        torch.testing.assert_close(model(x, attn_mask=given), expected, atol=1e-6, rtol=1e-5)


def all_heads_others_zero_masked(model: nn.Module, x: Tensor, mask: Tensor) -> tuple[Tensor, list[HeadGate]]:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x, attn_mask=mask)

    return all_heads_others_zero(Masked(), x)


@torch.no_grad()
def test_an_output_gate_of_the_host_meets_the_heads_where_they_are():
    model = tiny_vit()
    for block in model.blocks:
        block.attn.gate = nn.Linear(32, 32)
    randomise_gates(vp.patch(model, vp.BudgetFormer(tau_min=1.0)))
    expected, _ = all_heads_others_zero(model, images())
    torch.testing.assert_close(model(images()), expected, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_a_layer_that_is_not_plain_is_called_not_sliced():
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = gated()
    for block in model.blocks:
        for name in ("qkv", "proj"):
            layer = getattr(block.attn, name)
            layer.__class__ = Doubled
    expected, _ = all_heads_others_zero(model, images())
    torch.testing.assert_close(model(images()), expected, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_naflex_padding_is_left_out_of_the_gates_mean():
    model = NaFlexVit(patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=5, pos_embed_grid_size=(4, 4)).eval()
    randomise_gates(vp.patch(model, vp.BudgetFormer(tau_min=1.0)))
    patches, coord = torch.randn(1, 9, 192), torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij"), -1).view(1, 9, 2)
    padded = torch.cat([patches, torch.randn(1, 5, 192)], 1), torch.cat([coord, torch.zeros(1, 5, 2, dtype=torch.long)], 1)
    valid = torch.arange(14)[None] < 9
    alone = model({"patches": patches, "patch_coord": coord, "patch_valid": torch.ones(1, 9, dtype=torch.bool)})
    torch.testing.assert_close(model({"patches": padded[0], "patch_coord": padded[1], "patch_valid": valid}), alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("methods", METHODS)
@pytest.mark.parametrize("host", ["plain", "norm", "qk norm"])
@pytest.mark.parametrize("fused", [False, True])
def test_the_heads_that_do_not_run_are_not_computed(host, methods, fused):
    model = gated(METHODS[methods], **HOSTS[host])
    vp.set_heads(model, [1, 3])
    dense = macs(tiny_vit(**HOSTS[host])).total
    if fused:
        vp.fuse(model)
    counts = macs(model)
    assert counts.total == count_macs(model)
    assert counts.total < counts.total_all_projected
    assert [block.num_heads for block in counts.blocks] == [1, 3]
    if methods == "alone" and host == "plain":
        gate, block = 32 * 32 + 32 + 32 * 4, 4 * 17 * 32 * 32 + 2 * 17 * 17 * 32  # of one head in four: a quarter of the projections and the attention
        assert dense - counts.total == block * 3 // 4 + block // 4 - 2 * gate


def test_budgets_that_decide_have_no_count_without_being_told():
    model = gated()
    with pytest.raises(ValueError, match=r"blocks.0.attn: how many heads run depends on the image: give num_heads"):
        macs(model)
    with pytest.raises(ValueError, match=r"runs as many heads as the image asks for"):
        count_macs(model)
    vp.set_heads(model, [2, 1])
    told = macs(model).total
    vp.set_heads(model, None)
    assert macs(model, num_heads=[2, 1]).total == told
    with pytest.raises(ValueError, match=r"num_heads must be in 1..4, got 5"):
        macs(model, num_heads=[5, 1])
    with pytest.raises(ValueError, match=r"num_heads lists 1 blocks, the model has 2"):
        macs(model, num_heads=[1])
    untrained = vp.patch(tiny_vit(), vp.BudgetFormer())
    assert macs(untrained).blocks[0].num_heads == 4
    with pytest.raises(ValueError, match=r"num_heads is for gates whose budget decides; here 4 of 4 heads run"):
        macs(untrained, num_heads=[1, 1])


def test_a_fixed_number_of_heads_compiles_to_one_graph_of_static_shapes():
    model, counter = gated(METHODS["columns"]), CompileCounter()
    vp.set_heads(model, 2)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for batch in (4, 3, 1):
            torch.testing.assert_close(compiled(images(batch)), model(images(batch)))
    assert counter.frame_count <= 3


def test_training_with_losses_compiles_to_one_graph():
    model, counter = gated().train(), CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for step in range(3):
        vp.set_progress(model, step / 3)
        with vp.losses(compiled) as aux:
            out = compiled(images())
        assert len(aux.heard) == 2
        (out.mean() + aux.total()).backward()
    assert counter.frame_count == 1
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_hybrid_trains_together_and_leaves_no_parameter_without_gradient():
    model = gated(METHODS["tome and columns"]).train()
    with vp.losses(model) as aux:
        out = model(images())
    (out.square().mean() + aux.total()).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()] == []


@pytest.mark.parametrize("name", ["deit_ti_budget", "deit_s_budget", "deit_b_budget", "vit_mini28_budget"])
def test_the_registered_models_take_timms_arguments_and_ours(name, tmp_path):
    cut = {"depth": 2, "embed_dim": 48, "num_heads": 4, "num_classes": 3}
    model = timm.create_model(name, s_max=0.5, **cut).eval()
    assert [type(config).__name__ for config in prune_stacks(model)[0].configs] == ["BudgetFormer"]
    hybrid = timm.create_model(name, keep="0.5", heads=2, **cut).eval()
    assert [type(config).__name__ for config in prune_stacks(hybrid)[0].configs] == ["TokenBias", "Columns", "BudgetFormer"]
    randomise_gates(model)
    vp.save(model, tmp_path / "model")
    x = torch.randn(2, 3, *model.patch_embed.img_size)
    assert torch.equal(vp.load(tmp_path / "model").eval()(x), model(x))
    features = timm.create_model(name, features_only=True, out_indices=(0, 1), **cut)
    assert [out.shape[1] for out in features(x)] == [48, 48]


def test_causal_attention_is_refused_since_a_gate_sees_what_comes_later():
    with pytest.raises(ValueError, match=r"BudgetFormer is not for causal attention"):
        gated()(images(), is_causal=True)


def test_an_empty_batch_stays_empty():
    model = gated()
    for heads in (2, None):
        vp.set_heads(model, heads)
        assert model(images()[:0]).shape == (0, 5)
