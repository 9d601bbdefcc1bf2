import pytest
import torch

from vit_prune.analysis import noop
from vit_prune.analysis.noop import CASES, Case, build, differences
from vit_prune.patch.timm import PrunedAttention

TOLERANCE = 1e-5  # of the largest output, float32


def ids(case):
    return case.title.replace(" ", "-")


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_a_zero_bias_with_all_columns_and_no_merges_are_the_same_function(case):
    model, images = build(case, depth=2)
    for methods in (noop.COLUMNS, noop.MERGING, noop.GATES):
        result = differences(model, images, methods=methods)
        assert max(result[name] for name in noop.OUTPUTS) <= TOLERANCE
        assert result["restored"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_nothing_to_do_is_the_same_function_at_full_depth(case):
    model, images = build(case)
    for methods in (noop.COLUMNS, noop.MERGING, noop.GATES):
        result = differences(model, images[:1], methods=methods)
        assert max(result[name] for name in noop.OUTPUTS) <= TOLERANCE
        assert result["restored"] == 0


@pytest.mark.parametrize("case", [Case("deit_tiny_patch16_224"), Case("beit3_base_patch16_224"), Case("vit_small_patch16_224", gated=True)], ids=ids)
def test_the_unfused_path_is_the_same_function(case):
    model, images = build(case, depth=2)
    for block in model.blocks:
        block.attn.fused_attn = False
    assert max(differences(model, images).values()) <= TOLERANCE
    assert max(differences(model, images, impl="sdpa").values()) <= TOLERANCE


@pytest.mark.parametrize(
    "case", [Case("deit_tiny_patch16_224"), Case("vit_small_patch14_dinov2", (("img_size", 224),)), Case("naflexvit_base_patch16_gap")], ids=ids
)
def test_the_comparison_notices_a_scale_that_is_off_by_a_thousandth(case, monkeypatch):
    attend = PrunedAttention.attend

    def wrong(self, *args):
        self.scale *= 1.001
        try:
            return attend(self, *args)
        finally:
            self.scale /= 1.001

    monkeypatch.setattr(PrunedAttention, "attend", wrong)
    model, images = build(case, depth=2)
    result = differences(model, images)
    assert min(result[name] for name in noop.OUTPUTS) > TOLERANCE


@pytest.mark.parametrize("dropped", ["norm", "ls1", "q_norm", "gate"])
def test_the_comparison_notices_a_module_that_is_left_out(dropped, monkeypatch):
    case = Case("test_vit2", (("qk_norm", True), ("scale_attn_norm", True)), gated=dropped == "gate")
    model, images = build(case)
    before = noop.outputs(model, images)
    for block in model.blocks:
        owner = block if dropped == "ls1" else block.attn
        setattr(owner, dropped, None if dropped == "gate" else torch.nn.Identity())
    after = noop.outputs(model, images)
    assert min(noop.relative(after[name], before[name]) for name in noop.OUTPUTS) > 100 * TOLERANCE


def test_drop_path_and_dropout_draw_as_in_timm_under_a_seed():
    case = Case("deit_tiny_patch16_224", (("drop_path_rate", 0.5), ("proj_drop_rate", 0.3), ("img_size", 64)))
    model, images = build(case, depth=3)
    model.train()
    results = []
    for patched in (False, True):
        if patched:
            noop.patched(model, noop.TokenBias()).__enter__()
        torch.manual_seed(0)
        results.append(model(images))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    torch.manual_seed(1)
    assert not torch.allclose(model(images), results[0], atol=1e-2)


def test_attention_dropout_is_applied_in_training_only():
    model, images = build(Case("deit_tiny_patch16_224", (("attn_drop_rate", 0.5), ("img_size", 64))), depth=2)
    with noop.patched(model, noop.TokenBias()):
        assert torch.equal(model(images), model(images))
        model.train()
        assert not torch.equal(model(images), model(images))


@pytest.mark.slow
def test_every_registered_host_can_be_patched():
    import timm

    from vit_prune.patch import patch
    from vit_prune.patch.check import check_host

    count = 0
    for name in timm.list_models():
        if timm.models.model_entrypoint(name).__module__.split(".")[-1] not in ("vision_transformer", "vision_transformer_hybrid", "deit", "naflexvit"):
            continue
        with torch.device("meta"):
            model = timm.create_model(name)
            try:
                check_host(model)
            except TypeError:
                continue
            patch(model, noop.TokenBias())
        count += 1
    assert count >= 197
