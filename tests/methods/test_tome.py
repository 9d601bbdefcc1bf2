import json

import pytest
import timm
import torch
from timm.models.deit import VisionTransformerDistilled

import vit_prune as vp
from tests.helpers import randomise_bias, tiny_named, tiny_vit
from vit_prune.measure.counter import count_macs
from vit_prune.measure.macs import macs
from vit_prune.methods.state import Tokens
from vit_prune.patch.roots import MergingVisionTransformer
from vit_prune.patch.timm import PrunedBlock


def images(batch=2, size=32):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("given", "counts"),
    [(3, (3, 3, 3, 3)), ("3", (3, 3, 3, 3)), ("decreasing:3", (6, 4, 2, 0)), ("4,0,2,1", (4, 0, 2, 1)), ([4, 0, 2, 1], (4, 0, 2, 1)), (0, (0, 0, 0, 0))],
)
def test_r_is_a_number_a_decreasing_schedule_or_a_list(given, counts):
    config = vp.ToMe(r=given)
    assert config.counts(4) == counts
    assert vp.ToMe(**{key: value for key, value in json.loads(json.dumps(config.to_dict())).items() if key != "name"}) == config


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "fast", "increasing:3", "decreasing:", (), (1, -1), "1,x", None])
def test_a_wrong_r_is_refused(wrong):
    with pytest.raises(ValueError, match="r must be a number of merges"):
        vp.ToMe(r=wrong)


def test_a_list_of_another_length_is_refused_and_nothing_is_changed():
    model = tiny_vit()
    with pytest.raises(ValueError, match="r lists 3 numbers, the model has 2 blocks"):
        vp.patch(model, vp.ToMe(r=(1, 2, 3)))
    assert macs(model).saved == 0


def test_two_methods_that_merge_are_refused_by_name():
    with pytest.raises(ValueError, match="ToMe is given twice"):
        vp.patch(tiny_vit(), [vp.ToMe(r=1), vp.ToMe(r=2)])


def by_hand(model, x, r):
    """ToMe written as its paper tells it, one image at a time and without the model's own classes. Returns the merged tokens and their members."""
    x = model.norm_pre(model._pos_embed(model.patch_embed(x)))[0]
    members = [[token] for token in range(len(x))]
    P = model.num_prefix_tokens
    for block in model.blocks:
        attn, normed = block.attn, block.norm1(x)
        q, k, v = attn.qkv(normed).view(len(x), 3, attn.num_heads, attn.head_dim).permute(1, 2, 0, 3)
        q, k = attn.q_norm(q), attn.k_norm(k)
        sizes = torch.tensor([float(len(group)) for group in members])
        weights = (q @ k.mT * attn.scale + sizes.log()).softmax(-1)
        x = x + block.ls1(attn.proj((weights @ v).transpose(0, 1).flatten(1)))
        key = torch.nn.functional.normalize(k.mean(0), dim=-1)
        targets, sources = list(range(P, len(x), 2)), list(range(P + 1, len(x), 2))
        best = (key[sources] @ key[targets].mT).max(-1)
        merging = best.values.argsort(descending=True)[:r].tolist()
        for index in merging:
            source, target = sources[index], targets[best.indices[index]]
            size, others = len(members[source]), len(members[target])
            x = torch.cat([x[:target], ((size * x[source] + others * x[target]) / (size + others))[None], x[target + 1 :]])
            members[target] = members[target] + members[source]
        left = [*range(P), *(source for index, source in enumerate(sources) if index not in merging), *targets]
        x, members = x[left], [members[token] for token in left]
        x = x + block.ls2(block.mlp(block.norm2(x)))
    return model.norm(x), members


@pytest.mark.parametrize("kwargs", [{}, {"qk_norm": True, "init_values": 0.5}, {"reg_tokens": 2}, {"class_token": False, "global_pool": "avg"}])
@pytest.mark.parametrize("size", [(32, 32), (24, 40)])  # 16 patches; an odd number of them on a grid that is no square
@torch.no_grad()
def test_merging_equals_the_paper_by_hand(kwargs, size):
    model = tiny_vit(depth=3, img_size=size, **kwargs)
    x = torch.randn(1, 3, *size)
    expected, members = by_hand(model, x, r=3)
    vp.patch(model, vp.ToMe(r=3))
    merged, tokens = model.merged_features(x)
    torch.testing.assert_close(merged[0], expected, rtol=1e-4, atol=1e-5)
    assert tokens.sizes[0].tolist() == [len(group) for group in members]
    for place, group in enumerate(members):
        assert tokens.source[0, group].tolist() == [place] * len(group)


def test_every_token_comes_back_with_the_value_of_the_one_that_it_is_in():
    model = vp.patch(tiny_vit(depth=3), vp.ToMe(r=3))
    merged, tokens = model.merged_features(images())
    features = model.forward_features(images())
    assert merged.shape[1] == 17 - 9
    assert features.shape[1] == 17
    assert torch.equal(features[1, 5], merged[1, tokens.source[1, 5]])
    final, maps = model.forward_intermediates(images())
    assert torch.equal(final, features)
    assert [tuple(one.shape) for one in maps] == [(2, 32, 4, 4)] * 3
    assert torch.equal(model.norm(maps[-1].flatten(2).mT), features[:, 1:])


def test_average_pooling_is_weighted_by_size():
    model = vp.patch(tiny_vit(global_pool="avg", fc_norm=False), vp.ToMe(r=5))
    merged, tokens = model.merged_features(images())
    weights = tokens.sizes[:, 1:, None]
    expected = model.head((merged[:, 1:] * weights).sum(1) / weights.sum(1))
    torch.testing.assert_close(model(images()), expected)


PREFIXES = {
    "registers": tiny_vit(reg_tokens=4),
    "registers alone": tiny_vit(reg_tokens=4, class_token=False, global_pool="avg"),
    "distilled": tiny_vit(VisionTransformerDistilled),
}


@pytest.mark.parametrize("model", PREFIXES.values(), ids=PREFIXES)
def test_prefix_tokens_never_merge(model):
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[32:64] = 0  # all keys alike: every pair is the most similar
    P = model.num_prefix_tokens
    vp.patch(model, vp.ToMe(r=100))
    _, tokens = model.merged_features(images())
    assert torch.equal(tokens.source[:, :P], torch.arange(P).expand(2, -1))
    assert tokens.source[:, P:].min() == P
    assert (tokens.sizes[:, :P] == 1).all()


def test_without_proportional_attention_sizes_do_not_weigh():
    model, outputs = tiny_vit(depth=3), []
    for proportional in (True, False):
        with vp.patched(model, vp.ToMe(r=3, proportional=proportional)):
            outputs.append(model(images()))
    assert not torch.allclose(*outputs)


def test_stochastic_depth_draws_as_in_timm():
    model = tiny_vit(drop_path_rate=0.5, depth=4).train()
    torch.manual_seed(5)
    expected = model(images())
    vp.patch(model, vp.ToMe(r=0))
    torch.manual_seed(5)
    torch.testing.assert_close(model(images()), expected)


def test_unpatch_restores_every_class():
    model = tiny_vit()
    classes = [type(module) for module in model.modules()]
    vp.patch(model, vp.ToMe(r=2))
    assert type(model) is MergingVisionTransformer
    assert {type(block) for block in model.blocks} == {PrunedBlock}
    assert [type(module) for module in vp.unpatch(model).modules()] == classes


def test_gradients_reach_every_parameter_that_has_one_in_timm():
    plain, model = tiny_vit().train(), vp.patch(tiny_vit(), [vp.ToMe(r=3), vp.TokenBias()]).train()
    for one in (plain, model):
        one(images()).pow(2).sum().backward()
    for name, parameter in plain.named_parameters():
        assert (model.get_parameter(name).grad is None) == (parameter.grad is None)
    assert all(block.attn.prune.token_bias.weight.grad.abs().sum() > 0 for block in model.blocks)


COMBINED = {
    "alone": [vp.ToMe(r=3)],
    "list": [vp.ToMe(r=(5, 0, 9))],
    "dropped": [vp.ToMe(r=3), vp.TokenBias(), vp.Columns(keep=0.5)],
    "merged": [vp.ToMe(r=3), vp.TokenBias(), vp.Columns(keep=0.5, dropped="merge")],
    "query-key-free": [vp.ToMe(r=3), vp.TokenBias(keep=0.5, query_key_free=2)],
}


@pytest.mark.parametrize("methods", COMBINED.values(), ids=COMBINED)
@pytest.mark.parametrize("kwargs", [{}, {"qk_norm": True}, {"global_pool": "avg", "class_token": False}, {"global_pool": "map"}])
@pytest.mark.filterwarnings("ignore:the token bias is all zero")
def test_macs_equal_a_count_and_a_fused_model_agrees(methods, kwargs):
    model = randomise_bias(vp.patch(tiny_vit(depth=3, **kwargs), methods))
    counted = macs(model)
    assert counted.total == count_macs(model)
    assert counted.total < counted.dense == macs(tiny_vit(depth=3, **kwargs)).total
    expected = model(images())
    fused = vp.fuse(model)
    torch.testing.assert_close(fused(images()), expected, rtol=1e-4, atol=1e-5)
    assert macs(fused).total == count_macs(fused)


@pytest.mark.filterwarnings("ignore:the token bias is all zero")
def test_the_sizes_and_the_cluster_masses_are_one_bias():
    model = randomise_bias(vp.patch(tiny_vit(depth=2), [vp.ToMe(r=3), vp.TokenBias(), vp.Columns(keep="1,.5", dropped="merge")]))
    seen = []
    model.blocks[1].attn.prune.register_forward_hook(lambda _stack, args, kept: seen.append((args[0], kept)))
    model(images())
    x, kept = seen[0]
    own = model.blocks[1].attn.prune.token_bias.bias(x) + tokens_before(model).log()[:, None]
    torch.testing.assert_close(kept.bias.exp().sum(-1), own.exp().sum(-1))  # merging moves mass and loses none
    assert kept.x.shape[1] == 1 + 7


def tokens_before(model):
    """Sizes after the first block."""
    x = model.norm_pre(model._pos_embed(model.patch_embed(images())))
    return model.blocks[0](x, Tokens())[1].sizes


@pytest.mark.filterwarnings("ignore:the token bias is all zero")
def test_a_checkpoint_comes_back(tmp_path):
    model = randomise_bias(vp.patch(tiny_named(), [vp.ToMe(r="3,1"), vp.TokenBias(keep=0.5)]))
    vp.save(model, tmp_path / "saved")
    loaded = vp.load(tmp_path / "saved").eval()
    assert type(loaded) is MergingVisionTransformer
    assert torch.equal(loaded(images()), model(images()))


@torch.no_grad()
def test_a_token_that_is_hidden_as_a_key_keeps_its_own_way_through_the_model():
    model, hidden = tiny_vit(), torch.ones(1, 1, 1, 17, dtype=torch.bool)
    hidden[..., 0] = False
    expected = model(images(), attn_mask=hidden)
    vp.patch(model, vp.ToMe(r=(0, 1)))  # after the last attention a merge of patches cannot reach the class token
    torch.testing.assert_close(model(images(), attn_mask=hidden), expected)


@torch.no_grad()
def test_an_additive_mask_may_be_large_and_is_carried_on():
    mask = torch.zeros(1, 1, 1, 17)
    mask[..., 3] = 100.0
    model = vp.patch(tiny_vit(), vp.ToMe(r=1))
    assert model(images(), attn_mask=mask).isfinite().all()
    torch.testing.assert_close(model(images(), attn_mask=mask), model(images(), attn_mask=mask - 50.0), rtol=1e-4, atol=1e-5)


def test_without_proportional_attention_an_additive_mask_is_refused():
    model = vp.patch(tiny_vit(), vp.ToMe(r=1, proportional=False))
    with pytest.raises(ValueError, match=r"proportional=False\) carries on which tokens are hidden"):
        model(images(), attn_mask=torch.zeros(1, 1, 1, 17))
    assert model(images(), attn_mask=torch.ones(1, 1, 1, 17, dtype=torch.bool)).isfinite().all()


def test_sizes_and_sources_are_there_where_nothing_merged():
    _, tokens = vp.patch(tiny_vit(), vp.ToMe(r=0)).merged_features(images())
    assert torch.equal(tokens.sizes, torch.ones(2, 17))
    assert torch.equal(tokens.source, torch.arange(17).expand(2, -1))


def test_one_block_has_the_mean_of_a_decreasing_schedule():
    assert vp.ToMe(r="decreasing:3").counts(1) == (3,)


def test_a_wrong_format_is_refused_as_in_timm():
    with pytest.raises(ValueError, match="output_fmt must be NCHW or NLC, got 'nchw'"):
        vp.patch(tiny_vit(), vp.ToMe(r=1)).forward_intermediates(images(), output_fmt="nchw")


def tiny_naflex(**kwargs):
    return timm.create_model("naflexvit_base_patch16_gap", embed_dim=32, depth=2, num_heads=4, num_classes=5, **kwargs)


def naflex_batch():
    coord = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1).flatten(0, 1).expand(2, -1, -1)
    return {"patches": torch.randn(2, 16, 768), "patch_coord": coord, "patch_valid": torch.arange(16) < torch.tensor([[16], [9]])}


def test_naflex_intermediates_under_patch_dropout_need_the_mask_of_what_stays_as_in_timm():
    model = vp.patch(tiny_naflex(patch_drop_rate=0.5).train(), vp.ToMe(r=1))
    with pytest.raises(ValueError, match="give output_dict=True"):
        model.forward_intermediates(naflex_batch(), output_fmt="NLC")
    assert model.forward_intermediates(naflex_batch(), output_fmt="NLC", output_dict=True)["patch_valid"].shape == (2, 8)


def test_naflex_makes_no_mask_for_each_query(monkeypatch):
    model = vp.patch(tiny_naflex().eval(), vp.ToMe(r=1))
    monkeypatch.setattr("timm.models.naflexvit.create_attention_mask", None)
    assert model(naflex_batch()).shape == (2, 5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sizes_are_float32_at_least_whatever_the_default_dtype(dtype):
    model = vp.patch(tiny_vit().to(dtype), vp.ToMe(r=3))
    x, before = images().to(dtype), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        _, tokens = model.merged_features(x, attn_mask=torch.ones(1, 1, 1, 17, dtype=torch.bool))
    finally:
        torch.set_default_dtype(before)
    assert tokens.sizes.dtype == torch.promote_types(dtype, torch.float32)
