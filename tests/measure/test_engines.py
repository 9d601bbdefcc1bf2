import numpy as np
import pytest
import torch
from torch import nn

import vit_prune as vp
from tests.helpers import tiny_named
from vit_prune.measure import engines
from vit_prune.measure.engines import build_call, check_engine, prepare

CPU = torch.device("cpu")
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.filterwarnings("ignore:the token bias is all zero")


def ready(model, mode="inference", dtype="float32", device=CPU):
    return prepare(model, mode=mode, dtype=dtype, device=device)


def bias_model(**kwargs):
    return vp.patch(tiny_named(**kwargs), vp.TokenBias(keep=0.5))


def test_eager_is_the_model_without_gradients():
    model = ready(tiny_named())
    out = build_call(model, (IMAGES,))()
    assert torch.equal(out, model(IMAGES))
    assert out.is_inference()


def test_half_precision_is_of_weights_in_inference_and_of_autocast_in_training():
    assert next(ready(tiny_named(), dtype="bfloat16").parameters()).dtype == torch.bfloat16
    model = ready(tiny_named().bfloat16(), mode="train", dtype="bfloat16")
    assert next(model.parameters()).dtype == torch.float32
    seen = []
    model.blocks[0].mlp.fc1.register_forward_hook(lambda _module, _args, output: seen.append(output.dtype))
    build_call(model, (IMAGES,), mode="train", dtype="bfloat16")()
    assert seen == [torch.bfloat16]


def test_a_training_step_is_forward_and_backward_from_fresh_gradients():
    """Gradients that pile up, or a forward in evaluation mode, would be another step."""
    model = ready(bias_model(), mode="train")
    assert model.training
    step = build_call(model, (IMAGES,), mode="train")
    step()
    first = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    step()
    assert all(torch.equal(parameter.grad, first[name]) for name, parameter in model.named_parameters())
    model.zero_grad()
    model(IMAGES).sum().backward()
    assert all(torch.allclose(parameter.grad, first[name]) for name, parameter in model.named_parameters())


def test_all_outputs_take_part_in_the_step():
    model = ready(tiny_named("deit_tiny_distilled_patch16_224"), mode="train")
    model.set_distilled_training(True)
    build_call(model, (IMAGES,), mode="train")()
    assert model.head.weight.grad.any()
    assert model.head_dist.weight.grad.any()


def test_any_module_with_any_inputs_runs():
    class Sum(nn.Module):
        def forward(self, x, extra):
            return x + sum(extra)

    assert build_call(Sum(), (torch.ones(1), [torch.ones(1), torch.ones(1)]))().item() == 3


@pytest.mark.parametrize("make", [tiny_named, bias_model])
def test_compile_is_one_graph_compiled_before_the_first_timed_call(make, monkeypatch):
    model = ready(make())
    backends = []
    monkeypatch.setattr(torch, "compile", lambda module, original=torch.compile, **kw: backends.append(kw) or original(module, backend="eager", **kw))
    call = build_call(model, (IMAGES,), engine="compile")
    torch._dynamo.utils.counters.clear()
    torch.testing.assert_close(call(), model(IMAGES))
    assert backends == [{"fullgraph": True, "dynamic": False}]
    assert not torch._dynamo.utils.counters["frames"]  # nothing was compiled any more


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["inference", "train"])
def test_inductor_compiles_both_modes(mode):
    model = ready(bias_model(), mode=mode)
    out = build_call(model, (IMAGES,), engine="compile", mode=mode)()
    if mode == "inference":
        torch.testing.assert_close(out, model(IMAGES), rtol=1e-4, atol=1e-4)
    else:
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_onnxruntime_computes_the_same_with_the_asked_number_of_threads():
    pytest.importorskip("onnxruntime")
    pytest.importorskip("vit_prune.export")
    model = ready(bias_model())
    (out,) = build_call(model, (IMAGES,), engine="onnxruntime", threads=1)()
    np.testing.assert_allclose(out, model(IMAGES).numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("engine", "how", "message"),
    [
        ("cuda-graph", {}, "engine cuda-graph captures the launches of a CUDA device, and the device is cpu"),
        ("onnxruntime", {"mode": "train"}, "engine onnxruntime has no backward pass: mode train takes eager and compile"),
        ("cuda-graph", {"mode": "train"}, "engine cuda-graph has no backward pass"),
        ("onnxruntime", {"dtype": "bfloat16"}, "engine onnxruntime runs on the CPU in float32 here, got cpu and bfloat16"),
        ("onnxruntime", {"device": torch.device("cuda")}, "engine onnxruntime runs on the CPU in float32 here, got cuda and float32"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(engine, how, message):
    pytest.importorskip("onnxruntime")
    with pytest.raises(ValueError, match=message):
        check_engine(engine, **{"mode": "inference", "dtype": "float32", "device": CPU, **how})


def test_a_missing_onnxruntime_is_one_sentence(monkeypatch):
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"engine onnxruntime needs onnx, onnxscript, onnxruntime: pip install 'vit_prune\[export\]'"):
        check_engine("onnxruntime", mode="inference", dtype="float32", device=CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [tiny_named, bias_model])
def test_a_cuda_graph_replays_the_model_on_what_its_input_holds(make):
    device = torch.device("cuda")
    model = ready(make(), device=device)
    call = build_call(model, (IMAGES.to(device),), engine="cuda-graph")
    torch.testing.assert_close(call(), model(IMAGES.to(device)), rtol=1e-4, atol=1e-4)
    call.inputs[0].zero_()
    torch.testing.assert_close(call(), model(torch.zeros(2, 3, 32, 32, device=device)), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_a_model_that_asks_the_device_on_the_way_is_refused_by_the_capture():
    class Asks(nn.Module):
        def forward(self, x):
            return x * x.sum().item()

    with pytest.raises(ValueError, match="cannot be captured in a CUDA graph"):
        build_call(Asks(), (torch.ones(2, device="cuda"),), engine="cuda-graph")
