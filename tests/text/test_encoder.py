"""The text encoder: padding changes nothing, and everything that a timm ViT goes through."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F

import vit_prune as vp
from tests.helpers import kept_indices, randomise_bias, single_thread
from vit_prune.analysis.noop import perturb
from vit_prune.methods.stack import prune_stacks
from vit_prune.patch.check import UnsupportedModel
from vit_prune.text.encoder import mean_of

TINY = {"vocab_size": 50, "max_length": 24, "num_classes": 5, "embed_dim": 32, "depth": 2, "num_heads": 4}
BIAS_AND_COLUMNS = [vp.TokenBias(), vp.Columns(keep=0.5)]
PATCHES = {
    "dense": None,
    "bias and columns": BIAS_AND_COLUMNS,
    "merged columns": [vp.TokenBias(), vp.Columns(keep=0.5, dropped="merge")],
    "mass": [vp.TokenBias(), vp.Columns(rule="mass", tau=0.6)],
}


pytestmark = pytest.mark.filterwarnings("ignore:the token bias is all zero")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    with single_thread():
        yield


def encoder(methods=None, **kwargs):
    torch.manual_seed(0)
    model = perturb(timm.create_model("text_mini", **TINY | kwargs)).eval()
    return model if methods is None else randomise_bias(vp.patch(model, methods))


def texts(*lengths: int, padded_to: int | None = None) -> torch.Tensor:
    """Random ids [B, L], padded on the right."""
    generator = torch.Generator().manual_seed(3)
    width = padded_to or max(lengths)
    return torch.stack([F.pad(torch.randint(1, 50, (length,), generator=generator), (0, width - length)) for length in lengths])


@pytest.mark.parametrize("methods", PATCHES.values(), ids=PATCHES)
def test_a_text_alone_and_padded_to_any_length_beside_others_gives_the_same(methods):
    model, ids = encoder(methods), texts(3, 1, 11, 7)
    together = model(ids)
    for row, length in enumerate((3, 1, 11, 7)):
        for width in (length, length + 1, 16, 24):
            alone = model(F.pad(ids[row : row + 1, :length], (0, width - length)))
            torch.testing.assert_close(alone[0], together[row], rtol=0, atol=1e-6)


def test_what_the_padding_embeds_to_does_not_matter():
    model, ids = encoder(), texts(3, 9)
    expected = model(ids)
    with torch.no_grad():
        model.patch_embed.weight[0] = 100.0
    torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-6)


def test_padding_never_wins_a_column_however_large_its_bias():
    model, ids = encoder(BIAS_AND_COLUMNS), texts(3, 8)
    with torch.no_grad():
        model.patch_embed.weight[0] = 100.0 * model.blocks[0].attn.prune.token_bias.weight.sum(0)  # the first block's bias of the padding is huge
    seen = {index: set() for index in range(2)}
    for kept in kept_indices(model, ids):
        seen[0] |= set(kept[0, :2].tolist())  # ceil(3 / 2) of the first text
        seen[1] |= set(kept[1].tolist())
    assert seen[0] <= {0, 1, 2}
    assert seen[1] <= set(range(8))


@pytest.mark.parametrize("methods", PATCHES.values(), ids=PATCHES)
def test_a_text_of_padding_alone_is_finite_and_harms_no_other(methods):
    model, ids = encoder(methods), texts(5, 2)
    both = model(torch.cat([ids, torch.zeros(1, 5, dtype=torch.long)]))
    assert both.isfinite().all()
    torch.testing.assert_close(both[:2], model(ids), rtol=0, atol=1e-6)


def test_the_mean_is_of_the_real_tokens_alone():
    x = torch.tensor([[[1.0], [3.0], [100.0]], [[1.0], [2.0], [6.0]]])
    visible = torch.tensor([[True, True, False], [True, True, True]])
    assert mean_of(x, visible).tolist() == [[2.0], [3.0]]
    model, ids = encoder(), texts(2, 6)
    features = model.forward_features(ids)
    assert features.shape == (2, 6, 32)
    torch.testing.assert_close(model.head(features[0, :2].mean(0)), model(ids)[0])


def test_the_order_of_the_tokens_matters():
    model, ids = encoder(), texts(6)
    assert not torch.allclose(model(ids), model(ids.flip(1)), atol=1e-3)


@pytest.mark.parametrize("left", [0, 3])
def test_a_causal_mask_hides_what_comes_after_and_padding_on_the_left_is_finite(left):
    model, ids = encoder(), F.pad(texts(6), (left, 0))
    changed = ids.clone()
    changed[0, -1] = 7 if ids[0, -1] != 7 else 8
    before, after = model.forward_features(ids, is_causal=True), model.forward_features(changed, is_causal=True)
    assert before.isfinite().all()
    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.allclose(model.forward_features(ids)[:, left], model.forward_features(changed)[:, left])


def test_a_mask_of_the_caller_comes_on_top_of_the_padding_bool_or_additive():
    model, ids = encoder(), texts(4, 6)
    hidden = torch.ones(6, 6, dtype=torch.bool)
    hidden[:, 1] = False
    additive = torch.zeros(6, 6).masked_fill(~hidden, float("-inf"))
    torch.testing.assert_close(model(ids, attn_mask=hidden), model(ids, attn_mask=additive))
    assert not torch.allclose(model(ids, attn_mask=hidden), model(ids), atol=1e-4)


@pytest.mark.parametrize("methods", [None, BIAS_AND_COLUMNS], ids=["dense", "patched"])
def test_checkpointing_runs_each_block_again_and_gives_the_same_gradients(methods):
    plain, ids = encoder(methods).train(), texts(3, 8)
    checkpointed = copy.deepcopy(plain)
    checkpointed.set_grad_checkpointing(True)
    calls = []
    checkpointed.blocks[0].norm1.register_forward_hook(lambda *_: calls.append(1))
    for model in (plain, checkpointed):
        model(ids).square().sum().backward()
    assert len(calls) == 2, "timm checkpoints no block that has a mask"
    for (name, one), other in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_compiled_in_one_graph_it_gives_the_same_for_several_lengths():
    model = encoder(BIAS_AND_COLUMNS)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for ids in (texts(3, 8), texts(5, 16)):
        torch.testing.assert_close(compiled(ids), model(ids))


@pytest.mark.parametrize("methods", [None, BIAS_AND_COLUMNS], ids=["dense", "patched"])
def test_saved_and_loaded_it_is_the_same_bit_for_bit(methods, tmp_path):
    model, ids = encoder(methods, vocab_size=60, proj_drop_rate=0.1), texts(3, 8)
    model.reset_classifier(7)
    vp.save(model, tmp_path)
    loaded = vp.load(tmp_path).eval()
    assert (loaded.vocab_size, loaded.max_length, loaded.num_classes) == (60, 24, 7)
    assert torch.equal(loaded(ids), model.eval()(ids))


def test_unpatched_it_is_what_it_was():
    model, ids = encoder(), texts(3, 8)
    expected = model(ids)
    with vp.patched(model, BIAS_AND_COLUMNS):
        assert not torch.equal(randomise_bias(model)(ids), expected)
    assert torch.equal(model(ids), expected)


def test_intermediate_features_are_those_of_the_forward():
    model, ids = encoder(), texts(3, 8)
    final, taken = model.forward_intermediates(ids, norm=True)
    assert torch.equal(final, model.forward_features(ids))
    assert torch.equal(taken[-1], final)
    assert torch.equal(model.get_intermediate_layers(ids, n=1, norm=True)[0], final)


def test_merging_is_refused_in_one_sentence_and_nothing_is_changed():
    model = encoder()
    with pytest.raises(UnsupportedModel, match="tokens of a TextTransformer cannot be merged; ToMe takes VisionTransformer, "):
        vp.patch(model, vp.ToMe(r=1))
    assert not [name for name, _ in model.named_modules() if "prune" in name]


def test_too_many_tokens_are_named_with_the_most_that_fit():
    with pytest.raises(ValueError, match="the texts have 25 tokens, the model takes at most 24"):
        encoder()(torch.ones(1, 25, dtype=torch.long))


@pytest.mark.parametrize(
    ("name", "depth", "num_heads", "width"),
    [("text_mini", 4, 8, 256), ("text_4l8h", 4, 8, 768), ("text_4l12h", 4, 12, 768), ("text_6l12h", 6, 12, 768), ("text_12l12h", 12, 12, 768)],
)
def test_a_name_in_timms_registry_has_the_size_that_it_says(name, depth, num_heads, width):
    with torch.device("meta"):
        model = timm.create_model(name, vocab_size=100, max_length=16, num_classes=4)
    assert (len(model.blocks), model.blocks[0].attn.num_heads, model.embed_dim) == (depth, num_heads, width)
    assert model.blocks[0].mlp.fc1.out_features == 4 * width
    assert (model.patch_embed.num_embeddings, model.pos_embed.shape[1], model.head.out_features) == (100, 16, 4)


def test_the_models_with_bias_take_the_fields_of_the_methods():
    model = timm.create_model("text_mini_bias", keep=0.5, **TINY)
    assert [stack.columns.keep_ratio for stack in prune_stacks(model)] == [0.5, 0.5]


def test_a_width_that_the_heads_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="embed_dim must be a multiple of num_heads, got 30 and 4"):
        timm.create_model("text_mini", **TINY | {"embed_dim": 30})
