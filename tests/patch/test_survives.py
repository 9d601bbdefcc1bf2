import copy
import io
import pickle

import pytest
import timm
import torch
from timm.layers import Attention
from timm.utils import ModelEmaV3
from torch import nn

import vit_prune as vp
from tests.helpers import randomise_bias, randomise_gates, tiny_named, tiny_vit
from vit_prune.patch.timm import PrunedAttention

pytestmark = pytest.mark.filterwarnings("ignore:the token bias is all zero")  # randomised right after the patch
METHODS = {
    "bias": vp.TokenBias(),
    "pruned": vp.TokenBias(keep=0.5),
    "merged": [vp.TokenBias(), vp.Columns(keep=0.5, dropped="merge")],
    "gumbel": [vp.TokenBias(), vp.Columns(keep=0.5, sampling="gumbel")],
    "query-key-free": vp.TokenBias(keep=0.5, query_key_free=1),
    "mass": [vp.TokenBias(), vp.Columns(rule="mass", tau=0.7)],
    "systematic": [vp.TokenBias(), vp.Columns(keep=0.5, importance="prob", dropped="merge", sampling="systematic")],
    "tome": vp.ToMe(r=3),
    "heads": vp.BudgetFormer(tau_min=1.0, sigma_max=0.0),
    "heads, tome, merged": [vp.ToMe(r=3), vp.TokenBias(), vp.Columns(keep=0.5, dropped="merge"), vp.BudgetFormer(sigma_max=0.0)],
    "tome, merged": [vp.ToMe(r=3), vp.TokenBias(), vp.Columns(keep=0.5, dropped="merge")],
}


def patched_vit(method="pruned", **kwargs):
    return randomise_gates(randomise_bias(vp.patch(tiny_vit(**kwargs), METHODS[method])))


def images(batch=3, size=32):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(3))


def test_unpatch_gives_the_original_back_bit_for_bit():
    model, x = tiny_vit(), images()
    keys, expected = list(model.state_dict()), model(x)
    vp.unpatch(randomise_bias(vp.patch(model, vp.TokenBias(keep=0.5))))
    assert list(model.state_dict()) == keys
    assert all(type(block.attn) is Attention for block in model.blocks)
    assert torch.equal(model(x), expected)


def test_ours_is_one_prefix_in_the_state_dict_and_timms_keys_stay():
    plain, model = tiny_vit(), patched_vit()
    added = set(model.state_dict()) - set(plain.state_dict())
    assert set(plain.state_dict()) <= set(model.state_dict())
    assert added == {f"blocks.{block}.attn.prune.token_bias.weight" for block in range(2)}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_compute_the_same_and_are_independent(method, way):
    model = patched_vit(method).train()
    model(images()).sum().backward()
    model.eval()
    expected = model(images())
    if way == "deepcopy":
        other = copy.deepcopy(model)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    assert torch.equal(other(images()), expected)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    assert torch.equal(model(images()), expected)
    vp.unpatch(other)
    assert all(type(block.attn) is PrunedAttention for block in model.blocks)


def test_ema_follows_the_bias_and_leaves_the_model():
    model = patched_vit()
    ema = ModelEmaV3(model, decay=0.5)
    expected = model(images())
    with torch.no_grad():
        model.blocks[0].attn.prune.token_bias.weight.add_(1.0)
    before = ema.module.blocks[0].attn.prune.token_bias.weight.clone()
    ema.update(model)
    torch.testing.assert_close(ema.module.blocks[0].attn.prune.token_bias.weight - before, torch.full((4, 32), 0.5))
    assert not torch.equal(model(images()), expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_under_checkpointing_equal_those_without(method, reentrant):
    timm.layers.set_reentrant_ckpt(reentrant)
    gradients = []
    for checkpointing in (False, True):
        model = patched_vit(method, drop_path_rate=0.0).train()
        model.set_grad_checkpointing(checkpointing)
        first, second = (images() + offset for offset in (0.0, 0.5))
        outputs = model(first.requires_grad_()), model(second.requires_grad_())  # two forwards before one backward
        (outputs[0].pow(2).sum() + outputs[1].sum()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    timm.layers.set_reentrant_ckpt(False)
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        scale = max(1.0, gradient.abs().max().item())  # the two forwards' shares are added in another order
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-6 * scale, msg=name)


@pytest.mark.parametrize("method", METHODS)
def test_feature_taps_keep_every_token(method):
    model, plain = patched_vit(method), tiny_vit()
    tapped, expected = model.forward_intermediates(images()), plain.forward_intermediates(images())
    assert tapped[0].shape == expected[0].shape
    assert [t.shape for t in tapped[1]] == [t.shape for t in expected[1]]
    layers = model.get_intermediate_layers(images(), n=2, reshape=True)
    assert [tuple(layer.shape) for layer in layers] == [(3, 32, 4, 4)] * 2


def test_features_only_models_are_patched_inside():
    model = timm.create_model("deit_s_bias", img_size=32, depth=3, keep=0.5, features_only=True, out_indices=(0, 2))
    assert [tuple(f.shape) for f in model(images())] == [(3, 384, 2, 2)] * 2
    assert all(type(block.attn) is PrunedAttention for block in model.model.blocks)


def test_hooks_on_the_projections_are_called():
    model, seen = patched_vit(), []
    for name in ("qkv", "proj", "attn_drop"):
        module = getattr(model.blocks[0].attn, name)
        module.register_forward_hook(lambda m, a, o, name=name: seen.append((name, a[0].shape[1])))
    expected = patched_vit()(images())
    torch.testing.assert_close(model(images()), expected)
    assert ("qkv", 17) in seen
    assert seen[-1] == ("proj", 17) or ("proj", 17) in seen


class Adapter(nn.Module):
    """What a LoRA layer does: the linear layer, plus something of its own."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.extra = base, nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.extra(x)


@pytest.mark.parametrize("method", ["bias", "pruned", "merged", "query-key-free"])
@torch.no_grad()
def test_a_projection_that_is_not_a_plain_linear_is_called_not_bypassed(method):
    merged, adapted = patched_vit(method), patched_vit(method)
    for a, b in zip(merged.blocks, adapted.blocks, strict=True):
        b.attn.qkv = Adapter(b.attn.qkv)
        a.attn.qkv.weight += b.attn.qkv.extra.weight
    torch.testing.assert_close(adapted(images()), merged(images()), rtol=1e-4, atol=1e-5)
    pruned = patched_vit(method)
    nn.utils.parametrizations.weight_norm(pruned.blocks[0].attn.qkv)
    torch.testing.assert_close(pruned(images()), patched_vit(method)(images()), rtol=1e-4, atol=1e-5)


def test_column_mean_refuses_a_projection_whose_weight_it_cannot_read():
    model = vp.calibrate(tiny_vit(), [images()])
    vp.patch(model, vp.Columns(keep=0.5, importance="column_mean"))
    model.blocks[0].attn.qkv = Adapter(model.blocks[0].attn.qkv)
    with pytest.raises(ValueError, match=r"qkv is a Adapter"):
        model(images())


def test_dense_weights_load_into_a_patched_model_and_keep_its_bias():
    model, dense = patched_vit(), tiny_vit()
    bias = model.blocks[0].attn.prune.token_bias.weight.clone()
    with torch.no_grad():
        dense.head.weight.add_(1.0)
    model.load_state_dict(dense.state_dict())
    assert torch.equal(model.head.weight, dense.head.weight)
    assert torch.equal(model.blocks[0].attn.prune.token_bias.weight, bias)
    half = {key: value for key, value in model.state_dict().items() if not key.startswith("blocks.1.attn.prune.token")}
    half["blocks.1.attn.prune.other"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"blocks.1.attn.prune.token_bias.weight"):
        model.load_state_dict(half)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("method", METHODS)
def test_models_in_other_dtypes_run_and_agree(dtype, method):
    model = patched_vit(method)
    expected = model(images())
    out = model.to(dtype)(images().to(dtype))
    assert out.dtype == dtype
    assert (out.float() - expected).abs().max() / expected.abs().max() < (0.3 if dtype != torch.float64 else 1e-5)
    fresh = vp.patch(tiny_vit().to(dtype), METHODS[method])
    assert all(value.dtype == dtype for value in fresh.state_dict().values() if value.is_floating_point())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_training_is_finite_with_wild_weights(method, dtype):
    model = randomise_bias(patched_vit(method), scale=1e4)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[:64] *= 300
    with torch.autocast("cpu", dtype=dtype):
        out = model.train()(images())
    out.float().sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_named_models_keep_timms_methods():
    model = randomise_bias(vp.patch(tiny_named(), vp.TokenBias(keep=0.5)))
    assert {"pos_embed", "cls_token"} <= model.no_weight_decay()
    model.reset_classifier(3)
    assert model(images()).shape == (3, 3)
    model.set_input_size(img_size=(48, 32))
    assert model(torch.randn(1, 3, 48, 32)).shape == (1, 3)


@pytest.mark.parametrize("how", ["forward", "backward hook"])
def test_a_wrapped_projection_is_called_not_bypassed(how):
    model, calls = patched_vit("pruned").train(), []
    qkv = model.blocks[0].attn.qkv
    if how == "forward":
        forward = qkv.forward
        qkv.forward = lambda x: (calls.append(how), forward(x))[1]
    else:
        qkv.register_full_backward_hook(lambda _m, _i, _o: calls.append(how))
    model(images()).sum().backward()
    assert calls
