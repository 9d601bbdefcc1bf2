"""What each head looks at: attention maps against a computation by hand, and against what the model adds up."""

import pytest
import torch
from PIL import Image
from timm.layers import RmsNorm

import vit_prune as vp
from tests.helpers import randomise_bias, randomise_gates, tiny_named
from vit_prune.analysis.gates.heads import attention_weights, head_maps, over_patches, running
from vit_prune.analysis.gates.pictures import draw_head_maps, head_title
from vit_prune.methods.base import HeadGate
from vit_prune.methods.stack import prune_stacks
from vit_prune.ops.heads import HeadGroup

pytestmark = pytest.mark.filterwarnings("ignore:the token bias is all zero")

IMAGE = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
PATCHED = {
    "gates alone": ([], {}),
    "token bias": ([vp.TokenBias()], {}),
    "kept columns": ([vp.TokenBias(), vp.Columns(keep=0.5)], {}),
    "padded columns": ([vp.TokenBias(), vp.Columns(rule="mass", tau=0.5)], {}),
    "merged columns": ([vp.TokenBias(), vp.Columns(keep=0.5, dropped="merge")], {}),
    "q and k norms": ([vp.TokenBias()], {"qk_norm": True, "norm_layer": RmsNorm}),
}


def gated(methods=(), **kwargs):
    model = vp.patch(tiny_named(**kwargs), [*methods, vp.BudgetFormer()])
    return randomise_gates(randomise_bias(model)).eval()


def watched(model):
    """What the last block's stack is called with, and gives, for IMAGE: x [1, N, D] and the kept columns."""
    seen = []
    handle = prune_stacks(model)[-1].register_forward_hook(lambda _stack, args, kept: seen.append((args[0], kept)))
    with torch.no_grad():
        model(IMAGE)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("case", PATCHED)
def test_maps_equal_softmax_of_q_k_scale_and_bias_by_hand(case):
    methods, kwargs = PATCHED[case]
    model = gated(methods, **kwargs)
    maps, (x, kept) = head_maps(model, IMAGE), watched(model)
    attn = model.blocks[-1].attn
    weight, offset = attn.qkv.weight.view(3, 4, 8, 32), attn.qkv.bias.view(3, 4, 8)
    for place, head in enumerate(maps.heads.tolist()):
        q = attn.q_norm(x[0] @ weight[0, head].T + offset[0, head])
        k = attn.k_norm(kept.x[0] @ weight[1, head].T + offset[1, head])
        logits = q @ k.T * 8**-0.5
        if kept.bias is not None:
            logits = logits + kept.bias[0, head if kept.bias.shape[1] > 1 else 0]
        expected = torch.zeros(17, 17)
        for column, token in enumerate(range(17) if kept.index is None else kept.index[0].tolist()):
            expected[:, token] += logits.softmax(-1)[:, column].detach()
        torch.testing.assert_close(maps.weights[place], expected)


def test_the_heads_that_run_and_their_maps_are_what_the_model_computes():
    """The block's output, rebuilt from the maps."""
    model, outputs = gated([vp.TokenBias(), vp.Columns(keep=0.5)]), []
    attn = model.blocks[-1].attn
    handle = attn.register_forward_hook(lambda _attn, args, out: outputs.append((args[0], out)))
    with torch.no_grad():
        model(IMAGE)
    handle.remove()
    maps, (x, out) = head_maps(model, IMAGE), outputs[0]
    assert 0 < maps.runs.sum() < 4
    gate = watched(model)[1].gate
    values = attn.qkv(x)[0, :, 64:].view(17, 4, 8)
    heads = torch.zeros(17, 4, 8)
    for place, head in enumerate(maps.heads.tolist()):
        if maps.runs[place]:
            heads[:, head] = gate.weight[0, head] * (maps.weights[place] @ values[:, head])
    torch.testing.assert_close(attn.proj(heads.flatten(1)), out[0], atol=1e-5, rtol=1e-5)


def test_heads_are_sorted_by_relevance_and_the_others_do_not_run():
    model = gated()
    maps, gate = head_maps(model, IMAGE, 0), []
    handle = prune_stacks(model)[0].register_forward_hook(lambda _stack, _args, kept: gate.append(kept.gate))
    model(IMAGE)
    handle.remove()
    p, k = gate[0].relevance[0], gate[0].groups[0].heads.shape[1]
    assert maps.relevance.tolist() == sorted(p.tolist(), reverse=True)
    assert maps.relevance.tolist() == p[maps.heads].tolist()
    assert maps.runs.tolist() == [True] * k + [False] * (4 - k)
    assert head_title(maps, 3) == f"head {maps.heads[3]}: p = {maps.relevance[3].item():.3f}, does not run"


def test_running_heads_of_a_mixed_batch():
    groups = (HeadGroup(torch.tensor([1]), torch.tensor([[2]])), HeadGroup(torch.tensor([0, 2]), torch.tensor([[0, 1], [1, 2]])))
    gate = HeadGate(torch.ones(3, 3), groups, torch.ones(3), torch.ones(3, 3))
    assert running(gate).int().tolist() == [[1, 1, 0], [0, 0, 1], [0, 1, 1]]
    assert running(gate._replace(groups=None)).all()
    assert running(gate._replace(groups=(HeadGroup(None, torch.tensor([[0], [1], [2]])),))).int().tolist() == torch.eye(3).int().tolist()


def test_a_block_without_queries_and_keys_shows_its_bias():
    model = gated([vp.TokenBias(query_key_free=1)])
    maps, (_, kept) = head_maps(model, IMAGE), watched(model)
    expected = kept.bias[0].softmax(-1).detach().expand(4, -1)[maps.heads]
    torch.testing.assert_close(maps.weights, expected[:, None].expand(-1, 17, -1))


def test_a_fused_model_has_the_same_maps():
    model = gated([vp.TokenBias(), vp.Columns(keep=0.5)])
    before, after = head_maps(model, IMAGE), head_maps(vp.fuse(model), IMAGE)
    assert torch.equal(before.heads, after.heads)
    torch.testing.assert_close(before.weights, after.weights)


def test_what_a_mask_hides_has_no_weight():
    model = gated([vp.TokenBias(), vp.Columns(keep=0.5)])
    x, kept = watched(model)
    visible = torch.ones(1, 1, 1, 17, dtype=torch.bool)
    hidden = int(kept.index[0, 3])
    visible[..., hidden] = False
    weights = attention_weights(model.blocks[-1].attn, x, kept, visible)
    assert (weights[..., 3] == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 17))


def test_patches_are_seen_by_the_class_token_or_by_the_mean_over_queries():
    weights = torch.rand(4, 17, 17)
    assert torch.equal(over_patches(tiny_named(), weights), weights[:, 0, 1:])
    pooled = tiny_named(global_pool="avg", class_token=False)
    torch.testing.assert_close(over_patches(pooled, weights[:, :16, :16]), weights[:, :16, :16].mean(1))


def test_what_has_no_maps_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match=r"merge \(ToMe\)"):
        head_maps(gated([vp.ToMe(r=2)]), IMAGE)
    with pytest.raises(ValueError, match="from 0 to 1, got 2"):
        head_maps(gated(), IMAGE, 2)
    with pytest.raises(ValueError, match="from 0 to 1, got -1"):
        head_maps(gated(), IMAGE, -1)
    with pytest.raises(ValueError, match="no gates"):
        head_maps(tiny_named(), IMAGE)
    with pytest.raises(ValueError, match="one input, got 2"):
        head_maps(gated(), IMAGE.expand(2, -1, -1, -1))


def test_the_picture_has_a_panel_per_head_and_leaves_no_hook(tmp_path):
    model = gated().train()
    path = draw_head_maps(model, IMAGE, tmp_path / "heads.png", block=0)
    assert Image.open(path).width > 4 * Image.open(path).height
    assert not any(stack._forward_hooks for stack in prune_stacks(model))
    assert model.training
