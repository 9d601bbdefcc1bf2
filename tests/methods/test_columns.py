import warnings

import pytest
import torch
from timm.models.deit import VisionTransformerDistilled

import vit_prune as vp
from tests.helpers import kept_indices, randomise_bias, tiny_named, tiny_vit
from vit_prune.methods.base import BlockCalibration
from vit_prune.ops.reference import column_attention

pytestmark = pytest.mark.filterwarnings("ignore:the token bias is all zero")  # randomised right after the patch


def calibrated(model, rank=8):
    generator = torch.Generator().manual_seed(2)
    model.calibration = [
        BlockCalibration(torch.randn(4, 8, generator=generator), torch.linalg.qr(torch.randn(32, rank, generator=generator)).Q) for _ in model.blocks
    ]
    return model


def biased(columns, **kwargs):
    return randomise_bias(vp.patch(calibrated(tiny_vit(**kwargs)), [vp.TokenBias(), columns]))


def first_block(model, images):
    """The first attention, its input x [B, N, D], and its bias [B, H, N]."""
    attn = model.blocks[0].attn
    x = model.blocks[0].norm1(model.norm_pre(model._pos_embed(model.patch_embed(images))))
    return attn, x, (x @ attn.prune.token_bias.weight.T).mT


def rank(importance, num_kept):
    """By hand: the class token and the most important patches."""
    order = importance[:, 1:].argsort(-1, descending=True)[:, :num_kept] + 1
    return torch.cat([torch.zeros(len(order), 1, dtype=torch.long), order], 1)


@pytest.mark.parametrize("importance", ["logit", "prob", "column_mean"])
@torch.no_grad()
def test_importance_is_the_mean_over_heads_of_its_formula(importance):
    model, images = biased(vp.Columns(keep=0.5, importance=importance)), torch.randn(3, 3, 32, 32)
    attn, x, bias = first_block(model, images)
    k = attn.qkv(x)[..., 32:64].unflatten(-1, (4, 8)).transpose(1, 2)  # [B, H, N, d]
    q_mean = model.calibration[0].q_mean
    scores = {
        "logit": bias.mean(1),
        "prob": bias.softmax(-1).mean(1),
        "column_mean": (bias + attn.scale * torch.einsum("hd,bhnd->bhn", q_mean, k)).softmax(-1).mean(1),
    }
    assert torch.equal(kept_indices(model, images)[0], rank(scores[importance], 8))
    others = [rank(score, 8) for name, score in scores.items() if name != importance]
    assert all(not torch.equal(kept_indices(model, images)[0], other) for other in others)


@torch.no_grad()
def test_dropping_is_attention_over_the_kept_columns_alone():
    model, images = biased(vp.Columns(keep=0.5)), torch.randn(3, 3, 32, 32)
    attn, x, bias = first_block(model, images)
    kept = kept_indices(model, images)[0]
    q, k, v = attn.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
    hidden = torch.ones(3, 1, 1, 17, dtype=torch.bool).scatter(-1, kept[:, None, None], False)
    by_hand = attn.proj(column_attention(q, k, v, bias, mask=~hidden).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attn(x), by_hand)


@torch.no_grad()
def test_keys_and_values_are_computed_for_kept_rows_only():
    model, images = biased(vp.Columns(keep=0.25)), torch.randn(2, 3, 32, 32)
    attn, x, _ = first_block(model, images)
    seen = []
    project = attn.project
    attn.project = lambda rows, start, stop: seen.append((rows.shape[1], start, stop)) or project(rows, start, stop)
    attn(x)
    assert sorted(seen) == [(5, 1, 3), (17, 0, 1)]


@pytest.mark.parametrize(("rule", "tau"), [("mass", 1.0), ("threshold", 1e-9)])
@pytest.mark.parametrize("dropped", ["drop", "merge"])
@torch.no_grad()
def test_a_rule_that_keeps_all_equals_no_pruning(rule, tau, dropped):
    images = torch.randn(3, 3, 32, 32)
    expected = biased(vp.Columns())(images)
    torch.testing.assert_close(biased(vp.Columns(rule=rule, tau=tau, dropped=dropped))(images), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dropped", ["drop", "merge"])
@pytest.mark.parametrize(("rule", "tau"), [("mass", 0.5), ("threshold", 1.0)])
@torch.no_grad()
def test_an_image_in_a_padded_batch_equals_the_image_alone(rule, tau, dropped):
    model, images = biased(vp.Columns(rule=rule, tau=tau, dropped=dropped)), torch.randn(4, 3, 32, 32) * torch.tensor([0.2, 1, 3, 9])[:, None, None, None]
    together = model(images)
    counts = [kept_indices(model, image[None])[0].shape[1] for image in images]
    assert len(set(counts)) > 1  # else nothing is padded
    torch.testing.assert_close(together, torch.cat([model(image[None]) for image in images]), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_mass_and_threshold_keep_what_their_formulas_say():
    images = torch.randn(1, 3, 32, 32)
    for rule, tau in (("mass", 0.6), ("threshold", 0.8)):
        model = biased(vp.Columns(rule=rule, tau=tau))
        _, _, bias = first_block(model, images)
        p = bias.softmax(-1).mean(1)[0]
        patches = p[1:].sort(descending=True).values
        expected = int((patches >= tau / 17).sum()) if rule == "threshold" else 1 + int((patches.cumsum(0) < tau * patches.sum()).sum())
        assert kept_indices(model, images)[0].shape[1] == 1 + expected


def test_gumbel_draws_alike_in_evaluation_and_anew_in_training():
    model, images = biased(vp.Columns(keep=0.5, sampling="gumbel")), torch.randn(1, 3, 32, 32)
    pair = torch.cat([images, images + 1e-3])
    again = [kept_indices(model, pair)[0] for _ in range(2)]
    assert torch.equal(*again)
    assert torch.equal(again[0][:1], kept_indices(model, images)[0])  # whatever the batch
    plain = kept_indices(biased(vp.Columns(keep=0.5)), images)[0]
    assert not torch.equal(plain, again[0][:1])
    model.train()
    same = torch.cat([images, images])
    first = kept_indices(model, same)[0]
    assert set(first[0].tolist()) != set(first[1].tolist())
    assert torch.equal(first, kept_indices(model, same)[0])  # a recomputation under gradient checkpointing draws the same
    vp.set_progress(model, 0.25)
    second = kept_indices(model, same)[0]
    assert set(first[0].tolist()) != set(second[0].tolist())


@pytest.mark.parametrize("kwargs", [{}, {"reg_tokens": 2}, {"qkv_bias": False}])
@torch.no_grad()
def test_class_attention_is_the_class_tokens_own_row_of_attention(kwargs):
    model = vp.patch(tiny_vit(**kwargs), vp.Columns(keep=0.5, importance="class_attention"))
    attn, x = model.blocks[0].attn, torch.randn(3, 17 + kwargs.get("reg_tokens", 0), 32)
    q, k, _ = attn.qkv(x).view(3, -1, 3, 4, 8).permute(2, 0, 3, 1, 4)
    attention = (torch.einsum("bhd,bhnd->bhn", q[:, :, 0], k) * attn.scale).softmax(-1).mean(1)
    P = model.num_prefix_tokens
    expected = P + attention[:, P:].topk(8).indices
    index = attn.prune(x, attn=attn, mask=None).index
    assert torch.equal(index[:, P:], expected)


@torch.no_grad()
def test_value_norm_ranks_by_the_length_of_the_values():
    model = vp.patch(tiny_vit(), vp.Columns(keep=0.5, importance="value_norm"))
    attn, x = model.blocks[0].attn, torch.randn(3, 17, 32)
    lengths = attn.qkv(x)[..., 64:].unflatten(-1, (4, 8)).norm(dim=-1).mean(-1)
    assert torch.equal(attn.prune(x, attn=attn, mask=None).index[:, 1:], 1 + lengths[:, 1:].topk(8).indices)


@torch.no_grad()
def test_a_grid_is_every_so_many_patches():
    model = vp.patch(tiny_vit(), vp.Columns(keep=0.25, importance="grid"))
    kept = kept_indices(model, torch.randn(2, 3, 32, 32))[0]
    assert kept[:, 1:].sort().values.diff().unique().tolist() == [4]


def test_class_attention_needs_a_class_token_and_the_keys_as_they_are():
    with pytest.raises(ValueError, match="needs a class token"):
        vp.patch(tiny_vit(class_token=False, global_pool="avg", reg_tokens=1), vp.Columns(keep=0.5, importance="class_attention"))
    with pytest.raises(ValueError, match="normalises its keys"):
        vp.patch(tiny_vit(qk_norm=True), vp.Columns(keep=0.5, importance="class_attention"))


def test_systematic_sampling_needs_a_probability():
    for importance in ("logit", "random"):
        with pytest.raises(ValueError, match=f"sampling systematic needs a probability: importance prob, column_mean, class_attention, got {importance}"):
            vp.Columns(keep=0.5, importance=importance, sampling="systematic")


@pytest.mark.parametrize("dropped", ["drop", "merge"])
@torch.no_grad()
def test_systematic_sampling_spares_no_column_for_a_double(dropped):
    """Two patches alike, of one importance: by importance both stay, and one is enough."""
    model = biased(vp.Columns(keep=0.5, importance="prob", dropped=dropped, sampling="systematic"))
    x = torch.randn(1, 17, 32)
    weight = model.blocks[0].attn.prune.token_bias.weight
    x[0, 4] = 3 * weight.mean(0) / weight.mean(0).norm()  # the most important patch, and its double beside it
    x[0, 5] = x[0, 4]
    kept = model.blocks[0].attn.prune(x, attn=model.blocks[0].attn, mask=None).index[0].tolist()
    by_importance = biased(vp.Columns(keep=0.5, importance="prob", dropped=dropped))
    both = by_importance.blocks[0].attn.prune(x, attn=by_importance.blocks[0].attn, mask=None).index[0].tolist()
    assert {4, 5} <= set(both)
    assert not {4, 5} <= set(kept)


def test_gumbel_and_random_leave_the_global_generator_alone():
    state = torch.get_rng_state()
    for columns in (vp.Columns(keep=0.5, sampling="gumbel"), vp.Columns(keep=0.5, importance="random")):
        model = biased(columns)
        torch.set_rng_state(state)
        model.train()(torch.ones(1, 3, 32, 32))
        assert torch.equal(torch.get_rng_state(), state)


def test_seeds_and_blocks_draw_different_random_columns():
    images = torch.randn(1, 3, 32, 32)
    draws = [tuple(kept[0].tolist()) for seed in (0, 1) for kept in kept_indices(biased(vp.Columns(keep=0.5, importance="random", seed=seed)), images)]
    assert len(set(draws)) == 4


PREFIXES = {
    "class": {},
    "none": {"class_token": False, "global_pool": "avg"},
    "class and registers": {"reg_tokens": 4},
    "registers alone": {"reg_tokens": 4, "class_token": False, "global_pool": "avg"},
    "class and distillation": {"host": VisionTransformerDistilled},
}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("dropped", ["drop", "merge"])
def test_prefix_tokens_stay_even_when_they_rank_last(prefix, dropped):
    model = biased(vp.Columns(keep=0.25, dropped=dropped), **PREFIXES[prefix])
    P = model.num_prefix_tokens
    for block in model.blocks:  # the bias falls with the first channel, and the prefix has the most of it
        block.norm1.register_forward_hook(lambda _m, _a, x: torch.cat([x[:, :P] * 0 + 50, x[:, P:]], 1))
        torch.nn.init.zeros_(block.attn.prune.token_bias.weight)
        block.attn.prune.token_bias.weight.data[:, 0] = -1.0
    for kept in kept_indices(model, torch.randn(2, 3, 32, 32)):
        assert kept.shape[1] == P + 4
        assert (kept[:, :P] == torch.arange(P)).all()
        assert (kept[:, P:] >= P).all()


@pytest.mark.parametrize("keep", [1e-6, 0.5, 1])
@pytest.mark.parametrize("dropped", ["drop", "merge"])
def test_one_patch_token_is_always_kept(keep, dropped):
    model = biased(vp.Columns(keep=keep, dropped=dropped), img_size=16, patch_size=16)
    images = torch.randn(2, 3, 16, 16)
    assert model(images).isfinite().all()
    torch.testing.assert_close(model(images), biased(vp.Columns(), img_size=16, patch_size=16)(images))


@pytest.mark.parametrize("keep", [0, 1.5])
def test_keep_outside_the_interval_is_refused(keep):
    for make in (vp.Columns, vp.TokenBias):
        with pytest.raises(ValueError, match=rf"keep must be in \(0, 1\], got {keep}"):
            make(keep=keep)
    model = biased(vp.Columns(keep=0.5))
    with pytest.raises(ValueError, match=r"keep must be in \(0, 1\]"):
        vp.set_keep(model, keep)


def test_set_keep_changes_the_schedule_without_patching_again():
    model, images = biased(vp.Columns(keep=0.5)), torch.randn(1, 3, 32, 32)
    vp.set_keep(model, "1,.25")
    assert [None if kept is None else kept.shape[1] for kept in kept_indices(model, images)] == [None, 5]
    with pytest.raises(ValueError, match=r"keep lists 3 ratios, the model has 2 blocks"):
        vp.set_keep(model, [1, 1, 1])
    assert [None if kept is None else kept.shape[1] for kept in kept_indices(model, images)] == [None, 5]


def test_set_keep_needs_columns_with_a_keep_ratio():
    with pytest.raises(ValueError, match=r"no Columns in this model"):
        vp.set_keep(vp.patch(tiny_vit(), vp.TokenBias()), 0.5)
    with pytest.raises(ValueError, match=r"the rule mass takes tau"):
        vp.set_keep(biased(vp.Columns(rule="mass", tau=0.5)), 0.5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rule": "top"}, "rule must be one of topk, mass, threshold, got 'top'"),
        ({"importance": "norm"}, "importance must be one of"),
        ({"dropped": "fuse"}, "dropped must be one of drop, merge"),
        ({"sampling": "softmax"}, "sampling must be one of"),
        ({"rule": "mass"}, r"rule mass takes tau in \(0, 1\], got None"),
        ({"rule": "mass", "tau": 1.5}, r"rule mass takes tau in \(0, 1\], got 1.5"),
        ({"rule": "threshold", "tau": 0}, "rule threshold takes tau > 0, got 0"),
        ({"rule": "mass", "tau": 0.5, "importance": "logit"}, "rule mass needs a probability"),
        ({"rule": "mass", "tau": 0.5, "keep": 0.5}, "keep and sampling belong to the rule topk"),
        ({"keep": 0.5, "tau": 0.5}, "tau belongs to the rules mass and threshold"),
        ({"merge_rank": 8}, "merge_rank is a number of directions >= 1 for dropped='merge'"),
        ({"dropped": "merge", "merge_rank": 1.5}, "merge_rank is a number of directions >= 1"),
        ({"rule": "mass", "tau": "x"}, r"rule mass takes tau in \(0, 1\], got x"),
        ({"dropped": "merge", "merge_rank": 0}, "merge_rank is a number of directions >= 1"),
    ],
)
def test_wrong_fields_are_refused_at_birth(fields, message):
    with pytest.raises(ValueError, match=message):
        vp.Columns(**fields)


def test_what_a_method_needs_is_checked_before_anything_is_patched():
    model = tiny_vit()
    cases = [
        (vp.Columns(keep=0.5), "no method gives one: add TokenBias"),
        (vp.Columns(keep=0.5, importance="column_mean"), "run vp.calibrate"),
        (
            vp.Columns(keep=0.5, importance="random", dropped="merge", merge_rank=8),
            "merge_rank=8 needs that many principal directions, the calibration holds 0",
        ),
        ([vp.TokenBias(), vp.TokenBias()], "TokenBias is given twice"),
        (vp.TokenBias(keep="1,.5,.5"), "keep lists 3 ratios, the model has 2 blocks"),
    ]
    for methods, message in cases:
        with pytest.raises(ValueError, match=message):
            vp.patch(model, methods)
    assert not any("prune" in name for name, _ in model.named_modules())


def test_column_mean_under_key_norm_is_refused_by_name():
    with pytest.raises(ValueError, match=r"blocks\.0\.attn normalises its keys"):
        vp.patch(calibrated(tiny_vit(qk_norm=True)), vp.Columns(keep=0.5, importance="column_mean"))


@torch.no_grad()
def test_merge_rank_of_all_directions_equals_no_directions():
    images = torch.randn(2, 3, 32, 32)
    full = calibrated(tiny_vit(), rank=32)
    vp.patch(full, vp.Columns(keep=0.5, importance="random", dropped="merge"))
    plain = vp.patch(tiny_vit(), vp.Columns(keep=0.5, importance="random", dropped="merge"))
    torch.testing.assert_close(full(images), plain(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dropped", ["drop", "merge"])
def test_every_parameter_gets_a_gradient_in_training(dropped):
    model = biased(vp.Columns(keep=0.5, dropped=dropped)).train()
    model(torch.randn(2, 3, 32, 32)).pow(2).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().any()] == []


def test_configs_are_frozen_and_json_able():
    columns = vp.Columns(keep="linear:1:.5", dropped="merge")
    with pytest.raises(AttributeError):
        columns.keep = 0.5
    values = columns.to_dict()
    assert values.pop("name") == "columns"
    assert vp.Columns(**values) == columns


@pytest.mark.parametrize("columns", [{"importance": "random"}, {"sampling": "gumbel"}])
def test_evaluation_draws_do_not_depend_on_how_far_training_was(columns, tmp_path):
    model = randomise_bias(vp.patch(tiny_named(), [vp.TokenBias(), vp.Columns(keep=0.5, **columns)]))
    images = torch.randn(1, 3, 32, 32)
    expected = model(images)
    vp.set_progress(model, 0.5)
    assert torch.equal(model(images), expected)
    vp.save(model, tmp_path / "model")
    assert torch.equal(vp.load(tmp_path / "model").eval()(images), expected)


@pytest.mark.parametrize("importance", ["column_mean", "class_attention"])
@pytest.mark.parametrize("dropped", ["drop", "merge"])
@torch.no_grad()
def test_anticipated_logits_stay_finite_in_float16(importance, dropped):
    model, images = calibrated(tiny_vit()), torch.randn(2, 3, 32, 32)
    for block in model.blocks:
        block.attn.qkv.weight[32:64] *= 4000.0 / block.attn.qkv.weight[32:64].abs().max()
    expected = kept_indices(vp.patch(model, vp.Columns(keep=0.5, importance=importance, dropped=dropped)), images)[0]
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(kept_indices(model, images)[0].sort().values, expected.sort().values)
        attn, x = model.blocks[0].attn, model.blocks[0].norm1(torch.randn(2, 17, 32))
        assert attn.prune(x, attn=attn, mask=None).x.isfinite().all()


def test_a_zero_bias_is_warned_of_where_ties_keep_the_top_and_not_where_a_sample_is_spread():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vp.patch(tiny_vit(), [vp.TokenBias(), vp.Columns(keep=0.5, importance="prob", sampling="systematic")])
        with pytest.raises(UserWarning, match="ties keep the top"):
            vp.patch(tiny_vit(), [vp.TokenBias(), vp.Columns(keep=0.5, importance="prob")])
