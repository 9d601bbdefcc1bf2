import pytest
import torch

import vit_prune as vp
from tests.helpers import tiny_named
from vit_prune.measure.candidates import build, own_name, unpruned
from vit_prune.measure.config import LatencyConfig
from vit_prune.measure.inputs import image_size
from vit_prune.measure.macs import macs
from vit_prune.measure.plan import candidates_of
from vit_prune.methods.stack import columns_methods, prune_stacks

MINI, BIAS = "vit_mini28", "vit_mini28_bias"


pytestmark = pytest.mark.filterwarnings("ignore:the token bias is all zero")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What vp.save wrote, with weights of a bias that are not zero."""
    path = tmp_path_factory.mktemp("saved") / "model"
    model = vp.patch(tiny_named(), vp.TokenBias(keep=0.5))
    for stack in prune_stacks(model):
        torch.nn.init.ones_(stack.token_bias.weight)
    vp.save(model, path)
    return str(path)


def plan(*models, **fields):
    """[(label, label of the baseline)]."""
    return [(one.label, one.baseline) for one in candidates_of(LatencyConfig(model=models, device="cpu", **fields), None)]


def test_a_pruned_model_is_compared_with_its_own_original():
    assert plan(BIAS, keep="0.5") == [(MINI, None), (f"{BIAS}, keep 0.5", MINI)]
    dense, pruned = candidates_of(LatencyConfig(model=(BIAS,), keep="0.5", device="cpu"), None)
    assert not prune_stacks(dense.model)
    assert torch.equal(dense.model.blocks[0].attn.qkv.weight, pruned.model.blocks[0].attn.qkv.weight)
    assert own_name(dense.model) == MINI


def test_the_first_of_against_is_the_baseline_of_all(folder):
    assert plan(BIAS, folder, against=(MINI, "test_vit")) == [(MINI, None), ("test_vit", MINI), (BIAS, MINI), (folder, MINI)]


def test_models_that_are_not_pruned_are_compared_with_the_first_of_them():
    assert plan("test_vit", BIAS, "test_vit2") == [("test_vit", None), (MINI, None), (BIAS, MINI), ("test_vit2", "test_vit")]


def test_two_of_one_architecture_have_an_original_each(folder):
    assert plan(BIAS, MINI, keep="0.5") == [
        (MINI, None),
        (f"{BIAS}, keep 0.5", MINI),
        (f"{MINI}, keep 0.5, unpruned", None),
        (f"{MINI}, keep 0.5", f"{MINI}, keep 0.5, unpruned"),
    ]


def test_heads_that_run_differ_from_image_to_image_and_in_a_mixed_batch_their_number_too():
    images = torch.randn(8, 3, 28, 28)
    for heads, numbers in (("2", {2}), ("mixed", None)):
        model = build(MINI, methods={"heads": heads})
        seen = []
        handle = prune_stacks(model)[0].register_forward_hook(lambda _stack, _args, kept, seen=seen: seen.append(kept.gate))
        model(images)
        handle.remove()
        chosen = [tuple(sorted(row)) for group in seen[0].groups for row in group.heads.tolist()]
        assert len(set(chosen)) > 1
        assert {len(row) for row in chosen} == numbers if numbers else len({len(row) for row in chosen}) > 1
    assert plan(MINI, heads="2") == [(MINI, None), (f"{MINI}, heads 2", MINI)]
    assert build("vit_mini28_budget", methods={"heads": "1"}).blocks[0].attn.prune.budgetformer.heads == 1


def test_a_plain_model_takes_methods_and_keeps_columns_from_everywhere():
    """A zero bias would keep the top of each image, and warn of it."""
    model = build(MINI, methods={"keep": "0.5", "dropped": "merge", "importance": "column_mean", "merge_rank": 8})
    assert [method.keep_ratio for method in columns_methods(model)] == [0.5] * 6
    assert all(stack.token_bias.weight.any() for stack in prune_stacks(model))
    assert model(torch.randn(1, 3, 28, 28)).isfinite().all()


def test_a_plain_model_is_given_merging_alone_or_beside_columns():
    alone = build(MINI, methods={"tome_r": "3"})
    assert [[method.config.name for method in stack.children()] for stack in prune_stacks(alone)] == [["tome"]] * 6
    both = build(MINI, methods={"tome_r": "3", "keep": "0.5", "importance": "prob", "sampling": "systematic"})
    assert [[method.config.name for method in stack.children()] for stack in prune_stacks(both)] == [["token_bias", "columns", "tome"]] * 6
    assert macs(both).total < macs(alone).total < macs(build(MINI)).total
    assert both(torch.randn(1, 3, 28, 28)).isfinite().all()


def test_trained_biases_are_left_as_they_are(folder):
    model = build(folder, methods={"keep": "0.25"})
    assert all((stack.token_bias.weight == 1).all() for stack in prune_stacks(model))
    assert columns_methods(model)[0].keep_ratio == 0.25
    assert not prune_stacks(unpruned(model))


def test_names_and_folders_take_another_size(folder):
    for name, size in ((BIAS, 56), (folder, 64)):
        model = build(name, img_size=size)
        assert image_size(model) == (size, size)
        assert model(torch.randn(1, 3, size, size)).isfinite().all()


@pytest.mark.parametrize(
    ("name", "how", "message"),
    [
        ("vit_mini28_bais", {}, "unknown model 'vit_mini28_bais'; nearest: vit_mini28_bias"),
        (BIAS, {"img_size": 30}, "30 pixels cannot be cut into the patches of vit_mini28_bias, 4 x 4: choose a multiple"),
        (
            BIAS,
            {"methods": {"keep": "0.5", "dropped": "merge"}},
            "vit_mini28_bias is pruned already and takes keep and heads alone; give dropped with timm's own model",
        ),
        (MINI, {"methods": {"dropped": "merge", "merge_rank": 129}}, r"merge-rank must be in 1..128, the width of vit_mini28, got 129"),
        ("test_resnet", {"methods": {"keep": "0.5"}}, "ResNet cannot be patched"),
    ],
)
def test_what_cannot_be_built_is_refused(name, how, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build(name, **how)


def test_a_model_is_not_compared_with_itself():
    with pytest.raises(ValueError, match="vit_mini28 would be compared with itself"):
        plan(MINI, against=(MINI,))
    assert plan(MINI, keep="0.5", against=(MINI,)) == [(MINI, None), (f"{MINI}, keep 0.5", MINI)]


def test_checkpoints_are_read_by_name(tmp_path):
    source = build(BIAS, num_classes=7, seed=3)
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    config = LatencyConfig(model=(BIAS,), checkpoint=(str(tmp_path / "weights.pth"),), num_classes=7, device="cpu")
    assert torch.equal(candidates_of(config, None)[-1].model.head.weight, source.head.weight)
    for checkpoint, error, message in (
        (f"vit_mini={tmp_path / 'weights.pth'}", ValueError, "unknown name in checkpoint 'vit_mini'; did you mean"),
        ("nowhere.pth", FileNotFoundError, "no checkpoint nowhere.pth"),
    ):
        with pytest.raises(error, match=message):
            candidates_of(LatencyConfig(model=(BIAS,), checkpoint=(checkpoint,), device="cpu"), None)
    with pytest.raises(ValueError, match="checkpoint must be NAME=PATH where there are several models"):
        candidates_of(LatencyConfig(model=(BIAS, MINI), checkpoint=("weights.pth",), device="cpu"), None)
