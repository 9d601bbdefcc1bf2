import pytest
import torch

import vit_prune as vp
from tests.helpers import randomise_bias, tiny_vit
from vit_prune.ops.reference import column_attention


def attention_by_hand(attn, x, bias=None):
    q, k, v = attn.qkv(x).unflatten(-1, (3, attn.num_heads, attn.head_dim)).permute(2, 0, 3, 1, 4)
    return attn.proj(column_attention(q, k, v, bias).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("per_head", "rows"), [(True, 4), (False, 1)])
def test_bias_is_x_times_w_on_the_logits(per_head, rows):
    model = randomise_bias(vp.patch(tiny_vit(), vp.TokenBias(per_head=per_head)))
    attn, x = model.blocks[0].attn, torch.randn(2, 17, 32)
    weight = attn.prune.token_bias.weight
    assert weight.shape == (rows, 32)
    torch.testing.assert_close(attn(x), attention_by_hand(attn, x, (x @ weight.T).mT))


def test_bias_is_contiguous_over_the_tokens():
    model = vp.patch(tiny_vit(), vp.TokenBias())
    bias = model.blocks[0].attn.prune.token_bias.bias(torch.randn(2, 17, 32))
    assert bias.shape == (2, 4, 17)
    assert bias.stride(-1) == 1  # a view transposed from [B, N, H] costs more than half of SDPA's speed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bias_under_autocast_keeps_float32(dtype):
    model = randomise_bias(vp.patch(tiny_vit(), vp.TokenBias()), scale=2e4)  # beyond float16's 65,504
    with torch.autocast("cpu", dtype=dtype):
        bias = model.blocks[0].attn.prune.token_bias.bias(torch.randn(2, 17, 32))
        out = model(torch.randn(2, 3, 32, 32))
    assert bias.dtype == torch.float32
    assert bias.abs().max() > 65_504
    assert out.isfinite().all()


def test_query_key_free_blocks_are_softmax_of_the_bias_times_v():
    model = randomise_bias(vp.patch(tiny_vit(), vp.TokenBias(query_key_free=1)))
    first, last = (block.attn for block in model.blocks)
    x = torch.randn(2, 17, 32)
    v = last.qkv(x)[..., 64:].unflatten(-1, (4, 8)).transpose(1, 2)
    weights = (x @ last.prune.token_bias.weight.T).mT.softmax(-1)[:, :, None]
    by_hand = last.proj((weights @ v).transpose(1, 2).flatten(2)).expand(-1, 17, -1)
    torch.testing.assert_close(last(x), by_hand)
    torch.testing.assert_close(first(x), attention_by_hand(first, x, (x @ first.prune.token_bias.weight.T).mT))


def test_query_key_free_computes_neither_q_nor_k():
    model = randomise_bias(vp.patch(tiny_vit(), vp.TokenBias(query_key_free=2)))
    x = torch.randn(1, 3, 32, 32)
    before = model(x)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[:64] = float("nan")
    assert torch.equal(model(x), before)


def test_query_key_free_freezes_norms_that_nothing_reads_and_unpatch_thaws_them():
    model = tiny_vit(qk_norm=True)
    model.blocks[1].attn.q_norm.bias.requires_grad_(False)  # frozen by its owner: stays so
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    vp.patch(model, vp.TokenBias(query_key_free=1)).train()(torch.randn(2, 3, 32, 32)).sum().backward()
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert unused == []
    assert not model.blocks[1].attn.k_norm.weight.requires_grad
    vp.unpatch(model)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trainable


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_wrong_query_key_free_is_refused(value):
    with pytest.raises(ValueError, match=r"query_key_free must be a number of blocks"):
        vp.TokenBias(query_key_free=value)


def test_more_query_key_free_blocks_than_blocks_are_refused_and_nothing_is_patched():
    model = tiny_vit()
    with pytest.raises(ValueError, match=r"query_key_free is 3, the model has 2 blocks"):
        vp.patch(model, vp.TokenBias(query_key_free=3))
    assert not any("prune" in name for name, _ in model.named_modules())


def test_only_the_bias_trains_on_a_frozen_model():
    gradients = []
    for impl in ("auto", "math"):
        model = randomise_bias(vp.patch(tiny_vit(), vp.TokenBias(), impl=impl), scale=0.1)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("token_bias" in name)
        model(torch.ones(2, 3, 32, 32)).pow(2).sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert len(gradients[0]) == 2
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
        assert actual.abs().max() > 0


def test_per_head_is_a_bool():
    with pytest.raises(ValueError, match=r"per_head must be True or False, got 'no'"):
        vp.TokenBias(per_head="no")
