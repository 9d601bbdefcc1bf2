import json

import pytest
import torch

import vit_prune as vp
from tests.helpers import randomise_bias, randomise_gates, tiny_named
from vit_prune.measure.macs import macs
from vit_prune.measure.summary import report

QUICK = {"runs": 2, "warmup": 0, "memory": False}
METHODS = [vp.TokenBias(), vp.Columns(keep=0.5, dropped="merge")]

pytestmark = pytest.mark.filterwarnings("ignore:the token bias is all zero")


def test_a_pruned_model_is_reported_beside_its_own_original():
    model = tiny_named()
    with vp.patched(model, METHODS):
        found = report(model, **QUICK)
        counted = macs(model)
    assert [row.model for row in found.rows] == ["unpruned", "this model"]
    assert found.rows[1].predicted == counted.speedup
    assert found.rows[1].ceiling == counted.ceiling_speedup
    assert found.kept == (9.0, 9.0)
    data = json.loads(json.dumps(found.to_dict()))
    assert data["kept_columns"] == [9.0, 9.0]
    assert data["running_heads"] == []
    assert data["macs"]["blocks"][0]["num_columns"] == 9
    text = str(found)
    for part in ("float32, eager", "this model", "blocks.1", "GFLOPs", "ceiling saved", "torch"):
        assert part in text


def test_the_model_is_left_as_it_was_found():
    model = vp.patch(tiny_named(), METHODS).train()
    model.blocks[0].eval()
    model.head.weight.requires_grad_(False)
    model(torch.randn(1, 3, 32, 32)).sum().backward()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    before = {name: (tensor.clone(), tensor.grad) for name, tensor in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    report(model, **QUICK)
    assert calls == []
    assert [module.training for module in model.modules()] == modes
    assert not model.head.weight.requires_grad
    assert len(model._forward_hooks) == 1
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, before[name][0])
        assert tensor.grad is before[name][1]


def test_against_takes_a_name_a_folder_or_a_module(tmp_path):
    model = vp.patch(tiny_named(), METHODS)
    vp.save(tiny_named(), tmp_path / "dense")
    for against, label in (("vit_mini28", "vit_mini28"), (str(tmp_path / "dense"), str(tmp_path / "dense")), (tiny_named(), "against (VisionTransformer)")):
        assert [row.baseline for row in report(model, against, **QUICK).rows] == [None, label]
    with pytest.raises(ValueError, match="unknown model 'vit_mini29'"):
        report(model, "vit_mini29", **QUICK)


def test_a_model_that_is_not_pruned_has_nothing_to_compare_with():
    (row,) = report(tiny_named(), **QUICK).rows
    assert (row.speedup, row.median_ms > 0) == (None, True)


def test_rules_by_image_report_what_they_kept_of_the_given_images():
    model = randomise_bias(vp.patch(tiny_named(), [vp.TokenBias(), vp.Columns(rule="mass", tau=0.3)]))
    found = report(model, images=torch.randn(3, 3, 32, 32), **QUICK)
    assert all(1 < columns < 17 for columns in found.kept)
    assert found.macs.total == macs(model, num_columns=[round(columns) for columns in found.kept]).total
    assert found.rows[1].setting.batch_size == 3


def test_peak_memory_is_measured_in_a_process_of_its_own():
    (row,) = report(tiny_named(), runs=1, warmup=0).rows
    assert row.peak_mib > 100
    assert row.above_rest_mib < 50


@pytest.mark.parametrize(("model", "message"), [(torch.nn.Identity(), "got no weights"), (tiny_named().double(), "got torch.float64 on cpu")])
def test_a_model_without_one_dtype_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        report(model, **QUICK)


def test_heads_are_those_that_ran_and_their_macs_are_counted():
    model = randomise_gates(vp.patch(tiny_named(), vp.BudgetFormer(tau_min=1.0)))
    found = report(model, images=torch.randn(4, 3, 32, 32), runs=3, warmup=1, memory=False)
    assert all(1 <= heads < 4 for heads in found.heads)
    assert found.macs.total == macs(model, num_heads=found.heads).total < found.macs.dense
