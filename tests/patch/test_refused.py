import copy
from functools import partial

import pytest
import timm
import torch
from timm.layers import DiffAttention
from timm.models.vision_transformer import ParallelScalingBlock, ParallelThingsBlock, ResPostBlock, VisionTransformer
from torch import nn

import vit_prune as vp
from tests.helpers import tiny_vit
from vit_prune.methods.base import Host, Method, MethodConfig
from vit_prune.patch.timm import ATTENTION_READS, BLOCK_READS, ROOT_READS


def is_untouched(model):
    return not any("prune" in name for name, _ in model.named_modules())


@pytest.mark.parametrize("block", [ParallelScalingBlock, ParallelThingsBlock, ResPostBlock])
def test_other_blocks_are_refused_by_name(block):
    model = tiny_vit(block_fn=block)
    with pytest.raises(TypeError, match=rf"blocks.0 is .*{block.__name__}, which cannot be patched; supported: .*Block"):
        vp.patch(model, vp.TokenBias())
    assert is_untouched(model)


def test_other_attention_is_refused_by_name():
    with pytest.raises(TypeError, match=r"blocks.0.attn is .*DiffAttention, which cannot be patched; supported: .*Attention"):
        vp.patch(tiny_vit(attn_layer=DiffAttention), vp.TokenBias())


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("eva02_tiny_patch14_224", "Eva"),
        ("vit_small_patch16_dinov3", "Eva"),
        ("vit_relpos_small_patch16_224", "VisionTransformerRelPos"),
        ("beit_base_patch16_224", "Beit"),
        ("samvit_base_patch16", "VisionTransformerSAM"),
        ("swin_tiny_patch4_window7_224", "SwinTransformer"),
        ("resnet18", "ResNet"),
        ("vit_small_patch16_18x2_224", "ParallelThingsBlock"),
        ("vit_pwee_patch16_reg1_gap_256", "ParallelScalingBlock"),
        ("vit_dwee_patch16_reg1_gap_256", "DiffAttention"),
        ("vit_dpwee_patch16_reg1_gap_256", "DiffParallelScalingBlock"),
    ],
)
def test_other_families_of_timm_are_refused_by_name(name, family):
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(TypeError, match=f"{family}, which cannot be patched|{family} cannot be patched"):
        vp.patch(model, vp.TokenBias())
    assert is_untouched(model)


def test_a_later_block_of_another_kind_is_refused_before_the_first_is_touched():
    model = tiny_vit()
    model.blocks[1].attn = DiffAttention(32, 4)
    with pytest.raises(TypeError, match=r"blocks.1.attn is .*DiffAttention"):
        vp.patch(model, vp.TokenBias())
    assert is_untouched(model)


def test_subclasses_are_not_taken_for_their_parents():
    class Mine(VisionTransformer):
        pass

    model = Mine(img_size=16, patch_size=16, embed_dim=32, depth=1, num_heads=2)
    with pytest.raises(TypeError, match=r"Mine cannot be patched"):
        vp.patch(model, vp.TokenBias())


@pytest.mark.parametrize(
    ("where", "attribute"), [*(("model", a) for a in ROOT_READS), *(("block", a) for a in BLOCK_READS), *(("attn", a) for a in ATTENTION_READS)]
)
def test_a_missing_attribute_fails_the_patch_call_and_is_named(where, attribute):
    model = VisionTransformer(img_size=32, patch_size=16, embed_dim=32, depth=1, num_heads=2)
    owner = {"model": model, "block": model.blocks[0], "attn": model.blocks[0].attn}[where]
    delattr(owner, attribute)
    with pytest.raises(AttributeError, match=f"`{attribute}`"):
        vp.patch(model, vp.TokenBias())
    assert is_untouched(model)


def test_patching_twice_is_refused():
    model = vp.patch(tiny_vit(), vp.TokenBias())
    with pytest.raises(ValueError, match=r"patched already"):
        vp.patch(model, vp.TokenBias())
    with pytest.raises(ValueError, match=r"not patched"):
        vp.unpatch(vp.unpatch(model))


def test_compiled_and_wrapped_models_are_refused_whole():
    plain = tiny_vit()
    in_place = copy.deepcopy(plain)
    in_place.compile(backend="eager")
    block = copy.deepcopy(plain)
    block.blocks[1] = torch.compile(block.blocks[1], backend="eager")
    cases = [
        (torch.compile(plain, backend="eager"), "compiled: patch it first"),
        (in_place, "compiled: patch it first"),
        (block, "blocks.1 is .*OptimizedModule"),
        (nn.DataParallel(plain), "DataParallel does not see parameters that come later"),
        (nn.Sequential(plain), "Sequential cannot be patched"),
    ]
    for model, message in cases:
        with pytest.raises(TypeError, match=message):
            vp.patch(model, vp.TokenBias())
        assert is_untouched(model)


@pytest.mark.parametrize(("methods", "message"), [("topk", "got 't'"), ([0.5], "got 0.5"), ([vp.TokenBias], "got <class")])
def test_what_is_not_a_method_is_refused(methods, message):
    with pytest.raises(TypeError, match=f"methods must be configs.*{message}"):
        vp.patch(tiny_vit(), methods)


def test_no_method_and_an_unknown_impl_are_refused():
    with pytest.raises(ValueError, match=r"no method given"):
        vp.patch(tiny_vit(), [])
    with pytest.raises(ValueError, match=r"impl must be one of .*'flash'"):
        vp.patch(tiny_vit(), vp.TokenBias(), impl="flash")


class Other(MethodConfig):
    """Answers one hook, by doing nothing."""

    name = "other"

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def build(self, host: Host) -> Method:
        return type("OtherMethod", (Method,), {"config": self, self.hook: lambda self, *args, **kwargs: None})()


class Span(MethodConfig):
    name = "spans"

    def build(self, host: Host) -> Method:
        class SpanMethod(Method):
            config = self

            def span(self, x, *, mask):
                return None

        return SpanMethod()


@pytest.mark.parametrize(
    ("hook", "methods", "name"),
    [
        ("columns", [vp.TokenBias(), vp.Columns()], "ColumnsMethod"),
        ("gate", [vp.BudgetFormer()], "BudgetFormerMethod"),
        ("merge", [vp.ToMe(r=1)], "ToMeMethod"),
    ],
)
def test_a_second_provider_of_a_hook_is_refused_and_both_are_named(hook, methods, name):
    with pytest.raises(ValueError, match=rf"OtherMethod and {name} both provide `{hook}`"):
        vp.patch(tiny_vit(), [Other(hook), *methods])


def test_a_hook_that_no_block_runs_is_refused_not_ignored():
    with pytest.raises(NotImplementedError, match=r"blocks.0.attn: SpanMethod provides `span`"):
        vp.patch(tiny_vit(), Span())


def test_patched_restores_after_an_exception():
    model, failure = tiny_vit(), partial(pytest.raises, RuntimeError, match=r"inside")
    with failure(), vp.patched(model, vp.TokenBias()):
        raise RuntimeError("inside")
    assert is_untouched(model)


def test_a_zero_bias_that_prunes_warns_and_a_trained_one_does_not():
    model = tiny_vit()
    with pytest.warns(UserWarning, match=r"the token bias is all zero and keep < 1"):
        vp.patch(model, vp.TokenBias(keep=0.5))
    with torch.no_grad():
        model.blocks[0].attn.prune.token_bias.weight.fill_(1.0)
        model.blocks[1].attn.prune.token_bias.weight.fill_(1.0)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vp.set_keep(model, 0.25)
        with vp.patched(tiny_vit(), vp.TokenBias()):
            pass
