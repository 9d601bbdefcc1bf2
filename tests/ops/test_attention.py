import pytest
import torch
from torch import nn

from tests.helpers import assert_within_budget
from vit_prune.ops import reference
from vit_prune.ops.attention import column_attention, query_free_attention

INF = float("inf")


def qkv(B=2, H=3, N=7, M=5, d=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, H, n, d, generator=generator, dtype=torch.float64).to(dtype) for n in (N, M, M)]


def test_reference_is_multihead_attention_in_float64():
    torch.manual_seed(0)
    mha = nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    q, k, v = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in (x @ mha.in_proj_weight.T + mha.in_proj_bias).chunk(3, -1))
    ours = mha.out_proj(reference.column_attention(q, k, v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(ours, mha(x, x, x, need_weights=False)[0], rtol=0, atol=1e-12)


def test_reference_gradients():
    q, k, v = qkv(B=1, H=2, N=3, M=4, d=2)
    bias = torch.randn(1, 2, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(reference.column_attention, [t.requires_grad_() for t in (q, k, v, bias)])


@pytest.mark.parametrize("impl", ["sdpa", "channel", "math", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_every_impl_stays_within_the_error_budget(impl, dtype, heads, masked):
    q, k, v = qkv()
    bias = torch.randn(2, heads, 5, dtype=torch.float64)
    mask = torch.rand(2, 1, 7, 5) > 0.3 if masked else None
    narrow = [t.to(dtype) for t in (q, k, v)]
    wide = [t.double() for t in narrow]
    bias = bias.to(dtype).double()  # the error of rounding the inputs is nobody's
    exact = reference.column_attention(*wide, bias, mask=mask)
    eager = reference.column_attention(*narrow, bias.to(dtype), mask=mask)
    assert_within_budget(column_attention(*narrow, bias.float(), mask=mask, impl=impl), exact=exact, eager=eager)


@pytest.mark.parametrize("impl", ["sdpa", "channel", "math"])
def test_bias_is_added_after_scaling_and_in_no_other_place(impl):
    q, k, v = qkv(dtype=torch.float32)
    bias = torch.randn(2, 3, 5)
    by_hand = ((q @ k.mT * 0.5 + bias[:, :, None]).softmax(-1)) @ v
    torch.testing.assert_close(column_attention(q, k, v, bias, scale=0.5, impl=impl), by_hand)


@pytest.mark.parametrize("impl", ["sdpa", "channel", "math"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["bool", "float", "bias"])
def test_a_fully_masked_sample_gives_zeros_and_finite_gradients(impl, dtype, kind):
    q, k, v = (t.requires_grad_() for t in qkv(dtype=dtype))
    visible = torch.tensor([True, False])[:, None, None, None].expand(2, 1, 1, 5)
    bias, mask = torch.zeros(2, 1, 5, requires_grad=True), visible
    additive = torch.zeros(2, 1, 1, 5).masked_fill(~visible, -INF)
    if kind == "float":
        mask = additive
    if kind == "bias":
        bias, mask = additive[:, :, 0].requires_grad_(), None
    out = column_attention(q, k, v, bias, mask=mask, impl=impl)
    out.float().pow(2).sum().backward()
    assert out[1].abs().max() == 0
    assert out[0].abs().max() > 0
    assert all(t.grad.isfinite().all() for t in (q, k, v, bias))


@pytest.mark.parametrize("impl", ["sdpa", "channel", "math"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_overflow_stays_finite_and_right(impl, dtype):
    q, k, v = qkv(d=64, dtype=dtype)
    q, k = q * 100, k * 100  # |q k| beyond 65,504
    bias = torch.tensor([1e5, 1e5 - 1, 0.0, -1e5, -INF]).expand(2, 3, 5)
    assert (q.double() @ k.double().mT).abs().max() > 65_504
    out = column_attention(q, k, v, bias, scale=0.01, impl=impl)
    exact = reference.column_attention(q.double(), k.double(), v.double(), bias.double(), scale=0.01)
    assert out.isfinite().all()
    assert (out.double() - exact).abs().max() < 0.2
    assert column_attention(q, k, v, None, scale=1.0, impl=impl).isfinite().all()


def test_size_zero_columns_are_invisible():
    q, k, v = qkv(dtype=torch.float32)
    sizes = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0]).expand(2, 1, 5)
    keep = [0, 2, 3]
    expected = column_attention(q, k[:, :, keep], v[:, :, keep], sizes[:, :, keep].log())
    torch.testing.assert_close(column_attention(q, k, v, sizes.log()), expected)


def test_query_free_is_column_attention_with_queries_of_zero():
    q, k, v = qkv(dtype=torch.float32)
    bias = torch.randn(2, 3, 5)
    mask = torch.tensor([True, True, False, True, True])[None, None, None]
    expected = column_attention(torch.zeros_like(q), k, v, bias, mask=mask)
    torch.testing.assert_close(query_free_attention(v, bias, mask=mask).expand_as(expected), expected)


def test_query_free_refuses_a_mask_per_query():
    _, _, v = qkv(dtype=torch.float32)
    with pytest.raises(ValueError, match=r"mask per query"):
        query_free_attention(v, torch.zeros(2, 1, 5), mask=torch.ones(1, 1, 7, 5, dtype=torch.bool))


def test_only_the_bias_trains_and_its_gradient_is_that_of_math():
    q, k, v = qkv(dtype=torch.float32)
    gradients = []
    for impl in ("auto", "math"):
        bias = torch.zeros(2, 1, 5, requires_grad=True)
        column_attention(q, k, v, bias, impl=impl).pow(2).sum().backward()
        gradients.append(bias.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
    assert gradients[0].abs().max() > 1e-3


@pytest.mark.parametrize("d", [6, 7, 8, 64])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_the_channel_are_those_of_the_formula(d, heads, masked):
    mask = torch.rand(2, 1, 7, 5, generator=torch.Generator().manual_seed(2)) > 0.3 if masked else None
    bias = torch.randn(2, heads, 5, generator=torch.Generator().manual_seed(1))

    def gradients(call, dtype):
        inputs = [t.detach().to(dtype).requires_grad_() for t in (*qkv(d=d), bias)]
        call(*inputs, mask=mask).pow(2).sum().backward()
        return [t.grad for t in inputs]

    fused = gradients(lambda q, k, v, b, mask: column_attention(q, k, v, b.detach(), mask=mask, impl="sdpa") + 0 * b.sum(), torch.float32)
    exact = gradients(reference.column_attention, torch.float64)
    actual = gradients(column_attention, torch.float32)
    for part in range(3):  # q, k, v
        assert_within_budget(actual[part], exact=exact[part], eager=fused[part], factor=3)
    error = (actual[3].double() - exact[3]).abs().max()
    assert error < 1e-5 * exact[3].abs().max()  # PyTorch's kernel has an exponential of 20 bits


def test_a_bias_that_learns_stays_on_the_fused_kernel_and_needs_no_square_of_memory():
    q, k, v = (t.requires_grad_() for t in qkv(N=64, M=64, dtype=torch.float32))
    saved = []
    for bias, keeps_weights in ((torch.zeros(2, 3, 64, requires_grad=True), False), (torch.zeros(2, 3, 64), False)):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
            column_attention(q, k, v, bias)
        assert any(shape[-2:] == (64, 64) for shape in saved) == keeps_weights
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        column_attention(q, k, v, torch.zeros(2, 3, 64, requires_grad=True), impl="sdpa")
    assert any(shape[-2:] == (64, 64) for shape in saved)  # what the channel avoids


def test_a_hidden_column_stays_hidden_in_float16_while_the_bias_learns():
    q = torch.full((1, 1, 1, 8), 200.0, dtype=torch.float16)
    k = torch.stack([torch.full((8,), -200.0), torch.full((8,), 200.0)])[None, None].half()
    v = torch.tensor([1.0, 5.0]).half()[None, None, :, None].expand(1, 1, 2, 8)
    bias = torch.tensor([[[0.0, -INF]]], requires_grad=True)
    assert (column_attention(q, k, v, bias) == 1).all()


def test_a_narrow_bias_that_learns_beside_wide_queries():
    q, k, v = qkv(dtype=torch.float64)
    bias = torch.randn(2, 3, 5, dtype=torch.float16, requires_grad=True)
    torch.testing.assert_close(column_attention(q, k, v, bias), reference.column_attention(q, k, v, bias.double()))


def test_wrong_arguments_are_named():
    q, k, v = qkv(dtype=torch.float32)
    with pytest.raises(NotImplementedError, match=r"triton"):
        column_attention(q, k, v, impl="triton")
    with pytest.raises(ValueError, match=r"impl must be one of .*'flash3'"):
        column_attention(q, k, v, impl="flash3")
    with pytest.raises(ValueError, match=r"bias must be .*\(2, 3, 4\)"):
        column_attention(q, k, v, torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match=r"mask must have 4 dims"):
        column_attention(q, k, v, mask=torch.zeros(5))
    with pytest.raises(ValueError, match=r"no dropout"):
        column_attention(q, k, v, dropout_p=0.1, impl="reference")


@pytest.mark.parametrize("impl", ["sdpa", "channel", "math", "reference"])
def test_a_wide_bias_beside_half_queries_neither_overflows_nor_fails(impl):
    q, k, v = qkv(dtype=torch.float16)
    bias = torch.tensor([1e5, 1e5, 0.0, 0.0, 0.0], dtype=torch.bfloat16).expand(2, 3, 5)  # beyond float16, as wide in bits
    out = column_attention(q, k, v, bias if impl != "reference" else bias.float(), impl=impl)
    assert out.dtype == torch.float16
    exact = reference.column_attention(q.double(), k.double(), v.double(), bias.double())
    assert (out.double() - exact).abs().max() < 1e-2
