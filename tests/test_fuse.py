import copy

import pytest
import timm
import torch
from torch import nn

import vit_prune as vp
from tests.helpers import assert_within_budget, kept_indices, randomise_bias, randomise_gates, tiny_named, tiny_vit
from vit_prune.analysis.noop import perturb
from vit_prune.measure.macs import count_macs, macs
from vit_prune.patch.fused import FusedAttention

pytestmark = pytest.mark.filterwarnings("ignore:the token bias is all zero")
METHODS = {
    "bias": vp.TokenBias(),
    "shared": vp.TokenBias(per_head=False, keep=0.5),
    "pruned": vp.TokenBias(keep="1,.5"),
    "merged": [vp.TokenBias(), vp.Columns(keep=0.5, dropped="merge")],
    "column_mean": vp.Columns(keep=0.5, importance="column_mean", dropped="merge"),
    "both": [vp.TokenBias(), vp.Columns(keep=0.5, importance="column_mean")],
    "gumbel": [vp.TokenBias(), vp.Columns(keep=0.5, sampling="gumbel")],
    "random": vp.Columns(keep=0.5, importance="random"),
    "systematic": vp.Columns(keep=0.5, importance="column_mean", sampling="systematic"),
    "systematic, merged": [vp.TokenBias(), vp.Columns(keep=0.5, importance="column_mean", dropped="merge", sampling="systematic")],
    "class_attention": vp.Columns(keep=0.5, importance="class_attention", dropped="merge"),
    "value_norm": vp.Columns(keep=0.5, importance="value_norm"),
    "grid": vp.Columns(keep=0.5, importance="grid"),
    "mass": [vp.TokenBias(), vp.Columns(rule="mass", tau=0.6)],
    "heads": vp.BudgetFormer(tau_min=1.0),
    "heads, merged": [vp.TokenBias(), vp.Columns(keep=0.5, importance="column_mean", dropped="merge"), vp.BudgetFormer(heads=2)],
    "query-key-free": vp.TokenBias(keep=0.5, query_key_free=1),
    "query-key-free, merged": [vp.TokenBias(query_key_free=1), vp.Columns(keep=0.5, importance="column_mean", dropped="merge")],
}
HOSTS = {
    "plain": {},
    "no qkv bias": {"qkv_bias": False},
    "LayerScale": {"init_values": 0.5},
    "registers": {"reg_tokens": 4},
    "average": {"global_pool": "avg"},
    "qk-norm": {"qk_norm": True},
}


def patched_model(method, host="plain", scale=1.0):
    model = tiny_vit(**HOSTS[host])
    methods = METHODS[method]
    if host != "qk-norm":
        vp.calibrate(model, [torch.randn(4, 3, 32, 32)], rank=8)
    return randomise_gates(randomise_bias(vp.patch(model, methods), scale))


def fused_pair(*args, **kwargs):
    model = patched_model(*args, **kwargs)
    return model, vp.fuse(copy.deepcopy(model))


@pytest.mark.parametrize(("method", "host"), [*((method, "plain") for method in METHODS), *(("pruned", host) for host in HOSTS), ("query-key-free", "qk-norm")])
def test_a_fused_model_is_the_same_function(method, host):
    model, fused = fused_pair(method, host)
    assert all(type(block.attn) is FusedAttention and not hasattr(block.attn, "qkv") for block in fused.blocks)
    for batch in (1, 3):
        images = torch.randn(batch, 3, 32, 32)
        with torch.no_grad():
            torch.testing.assert_close(fused(images), model(images), rtol=1e-4, atol=1e-5)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(kept_indices(model, images), kept_indices(fused, images), strict=True))


def test_every_row_of_the_readouts_rides_where_it_should():
    model, fused = fused_pair("merged")
    attn, weight = fused.blocks[0].attn, model.blocks[0].attn.qkv.weight
    assert attn.names == ("token_bias", "features")
    assert attn.first == (32, 4, 8, 4)
    assert attn.weight.shape == (3 * 32 + 16, 32)  # 12 rows filled up to 16
    assert torch.equal(attn.weight[:32], weight[:32])
    assert torch.equal(attn.weight[32:36], model.blocks[0].attn.prune.token_bias.weight)
    assert torch.equal(attn.weight[48:], weight[32:])


def test_one_product_where_every_column_stays_and_two_where_not(monkeypatch):
    calls = []
    linear = nn.functional.linear
    _, fused = fused_pair("pruned")
    monkeypatch.setattr(nn.functional, "linear", lambda x, *args: calls.append(tuple(x.shape)) or linear(x, *args))
    fused.forward_features(torch.randn(1, 3, 32, 32))
    host = [(1, 17, 32), (1, 17, 32), (1, 17, 128)]  # proj, and the two layers of the MLP
    assert calls == [(1, 17, 32), *host, (1, 17, 32), (1, 9, 32), *host]


@pytest.mark.parametrize("method", ["bias", "pruned", "both"])
def test_in_bfloat16_it_stays_within_the_error_budget_of_the_unfused_model(method):
    torch.manual_seed(0)
    x = torch.randn(2, 17, 32).bfloat16()
    model, fused = (one.bfloat16().blocks[0].attn for one in fused_pair(method, scale=0.05))
    exact = copy.deepcopy(model).double()
    choose = type(model.prune).forward
    kept = choose(exact.prune, x.double(), attn=exact, mask=None)
    with torch.no_grad():
        for attn in (model, fused):  # the same columns: which of two near-equal ones stays is not an error
            attn.prune.register_forward_hook(
                lambda module, args, out: (
                    out
                    if kept.index is None
                    else out._replace(x=x.gather(1, kept.index[..., None].expand(-1, -1, 32)), index=kept.index, bias=kept.bias.to(out.bias.dtype))
                )
            )
        assert_within_budget(fused(x), exact=exact(x.double()), eager=model(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_huge_bias_stays_finite_in_half_precision(dtype):
    model, fused = fused_pair("pruned", scale=1.5e4)
    images = torch.randn(2, 3, 32, 32, dtype=dtype)
    biases = []
    model.blocks[0].attn.prune.register_forward_hook(lambda module, args, out: biases.append(out.bias))
    assert fused.to(dtype)(images).isfinite().all()
    assert model.to(dtype)(images).isfinite().all()
    assert biases[0].abs().max() > torch.finfo(torch.float16).max


def test_set_keep_copies_and_dtypes_work_on_a_fused_model():
    model, fused = fused_pair("pruned")
    images = torch.randn(2, 3, 32, 32)
    for keep in (1.0, 0.25, [0.5, 1.0]):
        vp.set_keep(model, keep)
        vp.set_keep(fused, keep)
        torch.testing.assert_close(copy.deepcopy(fused)(images), model(images), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fused.double()(images.double()), model.double()(images.double()))


@pytest.mark.parametrize("method", [method for method in METHODS if method not in ("mass", "heads")])
def test_every_row_that_rides_is_counted(method):
    model, fused = fused_pair(method)
    assert macs(fused).total == count_macs(fused)
    assert macs(fused).dense == macs(model).dense
    if method == "pruned":
        assert macs(fused).total - macs(model).total == 2 * 17 * 32 * 12  # two blocks, tokens, width, rows of zeros


@pytest.mark.parametrize("method", ["bias", "pruned", "merged", "mass"])
def test_padded_images_of_a_naflex_model_are_the_same_fused(method):
    args = {"embed_dim": 32, "depth": 2, "num_heads": 4, "patch_size": 8, "img_size": 32, "num_classes": 5}
    model = randomise_bias(vp.patch(perturb(timm.create_model("naflexvit_base_patch16_gap", **args)).eval(), METHODS[method]))
    images = {
        "patches": torch.randn(2, 16, 3 * 8 * 8),
        "patch_coord": torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(2, -1, -1),
        "patch_valid": torch.arange(16).expand(2, -1) < torch.tensor([[16], [9]]),
    }
    with torch.no_grad():
        expected = model(images)
        torch.testing.assert_close(vp.fuse(copy.deepcopy(model))(images), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("what", ["plain", "twice", "training", "hooked", "save", "unpatch", "patch", "train after"])
def test_what_cannot_be_is_refused_and_changes_nothing(what, tmp_path):
    model = randomise_bias(vp.patch(tiny_named(), vp.TokenBias(keep=0.5)))
    refused = {
        "plain": (lambda: vp.fuse(tiny_vit()), ValueError, "not patched"),
        "twice": (lambda: vp.fuse(vp.fuse(model)), ValueError, "fused already"),
        "training": (lambda: vp.fuse(model.train()), ValueError, r"model\.eval"),
        "hooked": (lambda: vp.fuse(model), TypeError, r"blocks\.1\.attn\.qkv"),
        "save": (lambda: vp.save(vp.fuse(model), tmp_path), ValueError, "before vp.fuse"),
        "unpatch": (lambda: vp.unpatch(vp.fuse(model)), ValueError, "before vp.fuse"),
        "patch": (lambda: vp.patch(vp.fuse(model), vp.TokenBias()), ValueError, "patched already"),
        "train after": (lambda: vp.fuse(model).train()(torch.randn(1, 3, 32, 32)), RuntimeError, "inference"),
    }
    if what == "hooked":
        model.blocks[1].attn.qkv.register_forward_hook(lambda *args: None)
    call, error, message = refused[what]
    with pytest.raises(error, match=message):
        call()
    if what == "hooked":
        assert not any(isinstance(module, FusedAttention) for module in model.modules())


@pytest.mark.parametrize("method", METHODS)
def test_in_float16_the_methods_read_for_themselves(method):
    model, fused = (one.half() for one in fused_pair(method))
    images = torch.randn(2, 3, 32, 32).half()
    with torch.no_grad():
        torch.testing.assert_close(fused(images), model(images), rtol=0, atol=0.05)


@pytest.mark.parametrize("name", ["q_norm", "k_norm", "norm", "proj_drop"])
def test_hooks_on_what_a_fused_attention_would_skip_are_called(name):
    model = patched_model("pruned")
    getattr(model.blocks[0].attn, name).register_forward_hook(lambda module, args, out: 3 * out)
    fused = vp.fuse(copy.deepcopy(model))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(fused(images), model(images), rtol=1e-4, atol=1e-5)
