import json

import pytest
import timm
import torch

import vit_prune as vp
from tests.helpers import tiny_named
from vit_prune.measure.candidates import Candidate, build
from vit_prune.measure.compare import SideBySide
from vit_prune.measure.latency import PairedLatency
from vit_prune.measure.macs import macs
from vit_prune.measure.memory import Peak
from vit_prune.measure.setting import Setting
from vit_prune.patch.fused import is_fused

CPU = torch.device("cpu")
TIMES = PairedLatency({"dense": (3.0,) * 8, "pruned": (2.0,) * 8})

pytestmark = pytest.mark.filterwarnings("ignore:the token bias is all zero")


@pytest.fixture
def candidates():
    return [Candidate("dense", tiny_named(), None), Candidate("pruned", vp.patch(tiny_named(), vp.TokenBias(keep=0.5)), "dense")]


def test_rows_compare_what_was_measured_with_what_the_macs_predict(candidates):
    comparison = SideBySide(Setting(batch_size=4), candidates, CPU)
    dense, pruned = comparison.rows(TIMES, {"pruned": Peak(120.0, 100.0)})
    counted = macs(candidates[1].model)
    assert (dense.speedup, dense.predicted, dense.ceiling, dense.peak_mib) == (None,) * 4
    assert (pruned.speedup, pruned.predicted, pruned.ceiling) == (1.5, counted.speedup, counted.ceiling_speedup)
    assert pruned.efficiency == 1.5 / counted.speedup
    assert (pruned.macs, pruned.flops, pruned.dense_macs) == (counted.total, 2 * counted.total, counted.dense)
    assert (pruned.peak_mib, pruned.above_rest_mib, pruned.throughput, pruned.noise) == (120.0, 20.0, 2000.0, None)
    assert json.loads(json.dumps(pruned.to_dict()))["img_size"] == "32x32"


def test_the_prediction_is_against_the_baseline_not_against_the_models_own_original(candidates):
    """A baseline of half the depth: the pruned model is predicted to be slower."""
    other = Candidate("dense", tiny_named(depth=1), None)
    _, pruned = SideBySide(Setting(), [other, candidates[1]], CPU).rows(TIMES, {})
    assert pruned.predicted == macs(other.model).total / macs(candidates[1].model).total < 1


def test_a_model_without_a_closed_form_has_no_macs_and_no_crash():
    with torch.device("cpu"):
        model = timm.create_model("test_resnet").eval()
    comparison = SideBySide(Setting(img_size=32), [Candidate("dense", model, None), Candidate("pruned", tiny_named(), "dense")], CPU)
    resnet, vit = comparison.rows(comparison.latency(runs=1, warmup=0, threads=1), {})
    assert (resnet.macs, resnet.flops, vit.predicted, vit.efficiency) == (None,) * 4
    assert vit.macs > 0


def test_the_models_themselves_are_neither_fused_nor_cast_nor_run(candidates):
    pruned = candidates[1].model.train()
    calls = []
    pruned.register_forward_hook(lambda *_: calls.append(1))
    comparison = SideBySide(Setting(dtype="bfloat16"), candidates, CPU)
    comparison.latency(runs=1, warmup=0, threads=1)
    assert is_fused(comparison.models["pruned"])
    assert not is_fused(pruned)
    assert pruned.training
    assert pruned.head.weight.dtype == torch.float32
    assert pruned.head.weight.requires_grad
    assert calls == []


def test_training_is_never_fused(candidates):
    comparison = SideBySide(Setting(mode="train"), candidates, CPU)
    assert not is_fused(comparison.models["pruned"])
    comparison.latency(runs=1, warmup=0, threads=1)
    assert comparison.models["pruned"].blocks[0].attn.prune.token_bias.weight.grad is not None


def test_all_models_run_in_one_paired_run_on_images_of_their_own_size(candidates):
    small = Candidate("small", tiny_named(img_size=16), "dense")
    comparison = SideBySide(Setting(batch_size=3), [*candidates, small], CPU)
    latency = comparison.latency(runs=2, warmup=0, threads=1)
    assert [len(times) for times in latency.times_ms.values()] == [2, 2, 2]
    assert [tuple(images.shape) for images in comparison.images.values()] == [(3, 3, 32, 32), (3, 3, 32, 32), (3, 3, 16, 16)]


def test_what_cannot_be_fused_says_how_to_go_on(candidates):
    class Adapter(torch.nn.Linear):
        pass

    attn = candidates[1].model.blocks[0].attn
    adapter = Adapter(*attn.qkv.weight.T.shape)
    adapter.load_state_dict(attn.qkv.state_dict())
    attn.qkv = adapter
    with pytest.raises(ValueError, match=r"pruned cannot be fused \(--no-fuse times it as it is\): blocks.0.attn.qkv"):
        SideBySide(Setting(), candidates, CPU)
    SideBySide(Setting(), candidates, CPU, fused=False)


def test_training_with_gates_computes_all_heads_so_that_no_saving_is_predicted():
    candidates = [Candidate("dense", build("vit_mini28"), None), Candidate("gated", build("vit_mini28", methods={"heads": "1"}), "dense")]
    for mode, known in (("inference", True), ("train", False)):
        compared = SideBySide(Setting(batch_size=2, mode=mode), candidates, CPU)
        assert (compared.costs["gated"] is not None) == known
