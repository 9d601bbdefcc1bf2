import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import vit_prune as vp
from tests.helpers import tiny_named
from vit_prune.measure.backends import check_backend, check_served, pinned
from vit_prune.measure.candidates import Candidate
from vit_prune.measure.compare import SideBySide
from vit_prune.measure.engines import build_call, prepare
from vit_prune.measure.latency import paired_latency
from vit_prune.measure.setting import Setting

CPU = torch.device("cpu")
FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"
IMAGES = torch.zeros(1, 3, 32, 32)

pytestmark = pytest.mark.filterwarnings("ignore:the token bias is all zero")


class Operators(TorchDispatchMode):
    """The names of all that runs."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def bias_model(impl="auto", **kwargs):
    return vp.patch(tiny_named(**kwargs), vp.TokenBias(keep=0.5), impl=impl).requires_grad_(False)


@pytest.mark.parametrize(("backend", "flash_calls"), [("flash", 2), ("math", 0), ("auto", 2)])
@pytest.mark.parametrize("make", [tiny_named, bias_model])
def test_the_pin_holds_during_every_timed_call(backend, flash_calls, make):
    """Which kernel ran is asked of the dispatcher, inside the call that is timed."""
    model, seen = make(), []

    def call():
        with torch.no_grad(), Operators() as operators:  # under inference_mode attention is not taken apart before the dispatcher sees it
            model(IMAGES)
        seen.append(operators.names.count(FLASH))

    with pinned(backend):
        paired_latency({"a": call}, runs=2, warmup=1)
    assert seen == [flash_calls] * 3  # one per block


@pytest.mark.parametrize("backend", ["flash", "math"])
def test_a_comparison_pins_what_it_times(backend, monkeypatch):
    seen = []

    def call_of(model, inputs, **_):
        def call():
            seen.append((torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()))

        return call

    monkeypatch.setattr("vit_prune.measure.compare.build_call", call_of)
    SideBySide(Setting(backend=backend), [Candidate("a", tiny_named(), None)], CPU).latency(runs=2, warmup=0, threads=1)
    assert seen == [(backend == "flash", backend == "math")] * 2
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.math_sdp_enabled()


@pytest.mark.parametrize("backend", ["efficient", "cudnn"])
def test_kernels_that_the_cpu_has_not_are_refused(backend):
    with pytest.raises(ValueError, match=f"backend {backend} cannot serve on the CPU, where PyTorch has the kernels flash and math alone"):
        check_backend(backend, device=CPU, engine="eager")


def test_onnxruntime_takes_none_of_pytorchs_kernels():
    with pytest.raises(ValueError, match="backend math is one of PyTorch's kernels, and onnxruntime has its own: use --backend auto"):
        check_backend("math", device=CPU, engine="onnxruntime")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["inference", "train"])
def test_each_compiled_graph_has_the_kernel_that_was_pinned_when_it_was_compiled(mode):
    """PyTorch's caches of compiled graphs on the disk do not tell the pins apart: the second of these would be given the first one's graph."""
    flash_calls = {}
    for backend in ("math", "flash", "math"):
        model = prepare(tiny_named(depth=3), mode=mode, dtype="float32", device=CPU)
        torch._dynamo.reset()
        with pinned(backend):
            call = build_call(model, (IMAGES,), engine="compile", mode=mode)
            with torch.profiler.profile() as profile:
                call()
        flash_calls[backend] = sum(event.count for event in profile.key_averages() if event.key == "aten::_scaled_dot_product_flash_attention_for_cpu")
        assert flash_calls[backend] == (3 if backend == "flash" else 0)


def refused(model, backend="flash", mode="inference"):
    with pytest.raises(ValueError, match=rf"backend {backend} cannot (serve|be pinned for) tiny: ") as found:
        check_served(backend, "tiny", model, build_call(model, (IMAGES,), mode=mode))
    return str(found.value)


def test_attention_that_goes_another_way_can_be_pinned_to_math_alone():
    """Silently, the pin would be on a kernel that nothing calls."""
    model = tiny_named()
    model.blocks[1].attn.fused_attn = False
    assert "blocks.1.attn computes attention by itself" in refused(model)
    assert "blocks.0.attn.prune computes attention by itself" in refused(bias_model(impl="math"))
    assert "it never calls scaled_dot_product_attention" in refused(vp.patch(tiny_named(), vp.TokenBias(query_key_free=2)))
    for served in (model, bias_model(impl="math")):
        check_served("math", "tiny", served, build_call(served, (IMAGES,)))


def test_a_bias_that_needs_a_gradient_leaves_flash_and_the_error_says_so():
    model = vp.patch(tiny_named(), vp.TokenBias(keep=0.5), impl="sdpa").train()
    assert "a mask that needs a gradient" in refused(model, mode="train")
    check_served("math", "tiny", model, build_call(model, (IMAGES,), mode="train"))
    check_served("flash", "tiny", model.eval(), build_call(model, (IMAGES,)))


def test_other_errors_are_not_taken_for_a_missing_kernel():
    def broken():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        check_served("math", "tiny", tiny_named(), broken)


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "dtype"), [("flash", "float32"), ("flash", "float16")])
def test_flash_on_cuda_takes_neither_float32_nor_a_bias(backend, dtype):
    model = bias_model()
    with pytest.raises(ValueError, match="backend flash cannot serve a"):
        SideBySide(Setting(backend=backend, dtype=dtype), [Candidate("a", model, None)], torch.device("cuda"), fused=False).check_served()
