import pytest
import torch
from torch._dynamo.testing import CompileCounter

import vit_prune as vp
from tests.helpers import randomise_bias, tiny_vit

pytestmark = pytest.mark.filterwarnings("ignore:the token bias is all zero")
METHODS = {
    "pruned": vp.TokenBias(keep=0.5),
    "merged": [vp.TokenBias(), vp.Columns(keep="1,.5", dropped="merge")],
    "gumbel": [vp.TokenBias(), vp.Columns(keep=0.5, sampling="gumbel")],
    "query-key-free": vp.TokenBias(keep=0.5, query_key_free=1),
    "column_mean": vp.Columns(keep=0.5, importance="column_mean", dropped="merge"),
    "systematic": [vp.TokenBias(), vp.Columns(keep=0.5, importance="prob", dropped="merge", sampling="systematic")],
    "tome": vp.ToMe(r=3),
    "heads": [vp.TokenBias(), vp.Columns(keep=0.5), vp.BudgetFormer(heads=2, sigma_max=0.0)],
    "tome, merged": [vp.ToMe(r=3), vp.TokenBias(), vp.Columns(keep=0.5, dropped="merge")],
}


def dynamic_model(method):
    model = tiny_vit(dynamic_img_size=True)
    if method == "column_mean":
        vp.calibrate(model, [torch.randn(4, 3, 32, 32)], rank=8)
    return randomise_bias(vp.patch(model, METHODS[method]))


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compilations(model):
    """How many graphs three sizes and three batches need, without a graph break; every output equals eager mode's."""
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for size in (32, 48, 64):
        for batch in (4, 1, 3):
            images = torch.randn(batch, 3, size, size)
            torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    return counter.frame_count


@pytest.fixture(scope="module")
def plain_compilations():
    torch._dynamo.reset()
    return compilations(tiny_vit(dynamic_img_size=True))  # timm's own: a position embedding per size, batch 1 apart


@pytest.mark.parametrize(("method", "training"), [*((method, False) for method in METHODS), ("pruned", True)])
def test_no_graph_break_and_no_compilation_beyond_timms_own(method, training, plain_compilations):
    assert compilations(dynamic_model(method).train(training)) <= plain_compilations <= 7


@pytest.mark.parametrize("method", ["pruned", "column_mean", "query-key-free"])
def test_a_fused_model_compiles_as_often(method, plain_compilations):
    assert compilations(vp.fuse(dynamic_model(method))) <= plain_compilations


def test_set_keep_compiles_once_for_each_schedule():
    model, counter = dynamic_model("pruned"), CompileCounter()
    compiled, images = torch.compile(model, backend=counter, fullgraph=True), torch.randn(2, 3, 32, 32)
    for keep in (0.5, 0.25, 0.5, 0.25):
        vp.set_keep(model, keep)
        torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 3


def test_set_progress_compiles_nothing_anew():
    model, counter = dynamic_model("gumbel").train(), CompileCounter()
    compiled, images = torch.compile(model, backend=counter, fullgraph=True), torch.randn(2, 3, 32, 32)
    for progress in (0.0, 0.5, 1.0):
        vp.set_progress(model, progress)
        torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_inductor_agrees_forward_and_backward(method):
    model, images = dynamic_model(method).train(), torch.randn(2, 3, 32, 32)
    compiled = torch.compile(model, fullgraph=True)
    gradients = []
    for run in (model, compiled):
        model.zero_grad()
        run(images).pow(2).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-5, msg=name)
