import importlib.util
from dataclasses import replace

import pytest
import timm
import torch
from torch import nn

import vit_prune as vp
from tests.helpers import tiny_vit
from vit_prune.measure.counter import CountMismatch, count_macs, count_macs_fvcore, cross_check
from vit_prune.measure.macs import macs
from vit_prune.methods.base import BlockCalibration
from vit_prune.ops.attention import column_attention, query_free_attention
from vit_prune.ops.columns import num_kept

pytestmark = pytest.mark.filterwarnings("ignore:the token bias is all zero")
H, N, d = 2, 17, 8
M = num_kept(N, 1, 0.5)  # 1 + 8


class AttentionOnly(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.options = options

    def forward(self, q, k, v, bias=None):
        return column_attention(q, k, v, bias, **self.options)


class QueryFree(nn.Module):
    def forward(self, v, bias):
        return query_free_attention(v, bias)


def test_linear_8_16_on_one_row_is_128_macs_not_256():
    assert count_macs(nn.Linear(8, 16), inputs=torch.empty(1, 8)) == 128


@pytest.mark.parametrize("impl", ["auto", "sdpa", "math", "reference"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_attention_is_counted_fused_or_not_with_or_without_bias(impl, with_bias, requires_grad):
    """PyTorch's counter has no formula for the CPU's fused kernel and would count nothing."""
    inputs = [torch.empty(1, H, N, d), torch.empty(1, H, M, d), torch.empty(1, H, M, d)]
    inputs += [torch.empty(1, H, M)] if with_bias else []
    assert count_macs(AttentionOnly(impl=impl), inputs=[tensor.requires_grad_(requires_grad) for tensor in inputs]) == 2 * H * N * M * d == 4_896


def test_query_free_attention_is_one_row():
    assert count_macs(QueryFree(), inputs=(torch.empty(1, H, M, d), torch.empty(1, 1, M))) == H * M * d


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("impl", ["auto", "sdpa", "math", "reference"])
@pytest.mark.parametrize("methods", [vp.Columns(keep=0.5, importance="random"), [vp.TokenBias(query_key_free=1), vp.Columns(keep=0.5)]])
def test_a_patched_model_counts_the_same_by_every_impl(fused, impl, methods):
    model = tiny_vit()
    for block in model.blocks:
        block.attn.fused_attn = fused
    vp.patch(model, methods, impl=impl)
    assert count_macs(model) == macs(model).total


def test_tensors_that_are_plain_attributes_do_not_break_the_copy():
    model = tiny_vit()
    model.calibration = [BlockCalibration(torch.randn(4, 8), torch.randn(32, 4)) for _ in model.blocks]
    model.blocks[0].attn.last_logits = torch.ones(3, requires_grad=True) * 2  # not a leaf: deepcopy refuses it
    vp.patch(model, vp.Columns(keep=0.5, importance="column_mean", dropped="merge"))
    assert count_macs(model) == macs(model).total


def test_a_tensor_attribute_that_the_forward_multiplies_with_is_counted():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrices = {"first": torch.randn(8, 16)}

        def forward(self, x):
            return x @ self.matrices["first"]

    assert count_macs(Fixed(), inputs=torch.empty(1, 8)) == 128


def test_counting_leaves_the_model_as_it_was():
    model = vp.patch(tiny_vit(), vp.TokenBias(keep=0.5)).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    count_macs(model)
    macs(model)
    assert model.training
    assert all(parameter.requires_grad and parameter.device.type == "cpu" for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model(torch.randn(1, 3, 32, 32)).isfinite().all()


def test_a_model_in_training_is_counted_in_evaluation_mode():
    model = tiny_vit(patch_drop_rate=0.5).train()
    assert count_macs(model) == macs(model).total


def test_other_dtypes_and_a_default_device_of_meta():
    model = vp.patch(tiny_vit().bfloat16(), vp.TokenBias(keep=0.5))
    with torch.device("meta"):
        assert count_macs(model) == macs(model).total


def test_a_rule_whose_m_depends_on_the_image_is_refused():
    model = vp.patch(tiny_vit(), [vp.TokenBias(), vp.Columns(rule="mass", tau=0.9)])
    with pytest.raises(ValueError, match=r"blocks.0.attn.prune.columns keeps as many columns as the image asks for"):
        count_macs(model)


def test_a_module_without_a_size_asks_for_one():
    with pytest.raises(ValueError, match="Linear has no image size of its own: give img_size"):
        count_macs(nn.Linear(8, 16))


def test_a_model_of_another_kind_is_counted_at_its_own_size():
    with torch.device("meta"):
        resnet = timm.create_model("resnet18")
    assert count_macs(resnet) == pytest.approx(1.82e9, rel=0.01)  # the figure in the literature


@pytest.mark.skipif(importlib.util.find_spec("fvcore") is None, reason="fvcore is not installed")
def test_fvcore_agrees_without_its_layer_norms_and_with_attention():
    model = tiny_vit(global_pool="map", class_token=False)
    assert count_macs_fvcore(model) == macs(model).total
    with pytest.raises(ValueError, match="fvcore hooks every module"):
        count_macs_fvcore(vp.patch(model, vp.TokenBias(keep=0.5)))
    assert cross_check(model, macs(model), name="tiny", fvcore=True)["dense, by fvcore"] == macs(model).dense


def test_a_wrong_figure_does_not_pass_the_cross_check():
    model = vp.patch(tiny_vit(), vp.TokenBias(keep=0.5))
    right = macs(model)
    assert cross_check(model, right, name="tiny", fvcore=False) == {"pruned": right.total, "dense": right.dense}
    with pytest.raises(CountMismatch, match="tiny, pruned: counted"):
        cross_check(model, replace(right, head=right.head + 1), name="tiny", fvcore=False)
