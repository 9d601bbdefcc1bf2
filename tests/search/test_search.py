"""The best mix of methods at a cost: what it keeps to, and what it refuses."""

import copy
import warnings
from dataclasses import replace

import pytest
import timm
import torch

import vit_prune as vp
from tests.helpers import tiny_named
from tests.search.test_cost import fit_by_macs
from vit_prune.measure.macs import macs
from vit_prune.methods.stack import prune_stacks
from vit_prune.patch.check import UnsupportedModel
from vit_prune.search import CannotReach, Found, LatencyCost, Search, load_found, mixtures
from vit_prune.search.found import configured, text_of
from vit_prune.search.levels import Setting

TOME, COLUMNS, L1 = vp.ToMe(), vp.Columns(importance="column_mean", dropped="merge"), vp.L1(0.5, 0.5)
MIXES = {"merges and columns": [TOME, COLUMNS], "L1": [L1], "all": [TOME, COLUMNS, L1]}


def share_of(found: Found, model, images) -> float:
    """Of the MACs, of a fresh copy that the recipe is applied to."""
    return macs(found.apply(copy.deepcopy(model), images)).total / macs(model).total


@pytest.mark.parametrize("methods", MIXES.values(), ids=MIXES)
def test_the_target_is_reached_and_not_left_far_behind(tiny, images, methods):
    found = vp.search(tiny(), images, "macs:0.8", methods)
    assert 0.75 <= found.share <= 0.8
    assert (found.target, found.fidelity, found.measured) == ("macs:0.8", "features", None)
    exact = not any(isinstance(method, vp.L1) for method in methods)
    assert share_of(found, tiny(), images) == (found.share if exact else pytest.approx(found.share, rel=0.01))


def test_the_loss_is_that_of_the_model_that_the_recipe_makes(tiny, images):
    found = vp.search(tiny(), images, "macs:0.8", MIXES["all"])
    model, pruned = tiny(), found.apply(tiny(), images)
    with torch.no_grad():
        pairs = [(pruned.forward_features(batch)[:, 1:], model.forward_features(batch)[:, 1:]) for batch in images]
    cosine = torch.stack([torch.cosine_similarity(*pair, dim=-1).mean() for pair in pairs]).mean()
    assert found.loss == pytest.approx(1 - cosine.item(), rel=0.25)  # what is cut is calibrated anew


def test_a_mix_loses_no_more_than_each_method_alone(tiny, images):
    alone = {one: vp.search(tiny(), images, "macs:0.92", method).loss for one, method in (("tome", TOME), ("columns", COLUMNS), ("l1", L1))}
    both, everything = (vp.search(tiny(), images, "macs:0.92", methods).loss for methods in ([TOME, COLUMNS], MIXES["all"]))
    assert both <= min(alone["tome"], alone["columns"])
    assert everything <= min(alone.values())


def test_exchanges_only_ever_lose_less(tiny, images):
    search = Search(tiny(), images, MIXES["merges and columns"])
    losses = [search.find("macs:0.8", exchanges=rounds).loss for rounds in range(4)]
    assert losses == sorted(losses)[::-1]
    assert losses[0] > losses[-1]


def test_two_searches_find_the_same_and_one_search_serves_several_targets(tiny, images):
    methods = MIXES["all"]
    first, second = (vp.search(tiny(), images, "macs:0.8", methods) for _ in range(2))
    assert first == second
    search = Search(tiny(), images, methods)
    assert search.find("macs:0.9").share > 0.8
    assert search.find("macs:0.8") == first


def test_a_model_in_training_mode_is_searched_as_in_evaluation_and_only_gets_a_calibration(tiny, images):
    model = tiny(drop_path_rate=0.5, proj_drop_rate=0.5).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = vp.search(model, images, "macs:0.8", MIXES["merges and columns"])
    assert found == vp.search(tiny(), images, "macs:0.8", MIXES["merges and columns"])
    assert model.training
    assert model.calibration
    assert not prune_stacks(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_calibration_that_is_there_is_kept(calibrated, images):
    held = calibrated.calibration
    vp.search(calibrated, images, "macs:0.9", COLUMNS)
    assert calibrated.calibration is held


@pytest.mark.parametrize("methods", MIXES.values(), ids=MIXES)
def test_a_recipe_is_read_as_it_was_saved(tiny, images, tmp_path, methods):
    found = vp.search(tiny(), images, "macs:0.8", methods)
    path = tmp_path / "deep" / "found.yaml"
    found.save(path, comment="one\ntwo")
    assert path.read_text().startswith("# one\n# two\nmodel: null\ntarget: macs:0.8\n")
    assert load_found(path) == found
    assert [file.name for file in path.parent.iterdir()] == ["found.yaml"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [", "is not YAML"),
        ("[1, 2]", "is not a recipe of vp.search: it must have model, target, share"),
        ("target: macs:0.8", "is not a recipe of vp.search"),
        ("{model: m, target: t, share: 1, measured: 1, loss: 1, fidelity: f, methods: [{name: tomme}], prune_plan: null}", "unknown method 'tomme'"),
        ("{model: m, target: t, share: 1, measured: 1, loss: 1, fidelity: f, methods: 3, prune_plan: null}", "methods must be a list"),
        ("{model: m, target: t, share: 1, measured: 1, loss: 1, fidelity: f, methods: [], prune_plan: {}}", "a prune plan is"),
    ],
)
def test_a_file_that_is_no_recipe_is_named(tmp_path, text, sentence):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ValueError, match=f"x.yaml.*{sentence}"):
        load_found(tmp_path / "x.yaml")


def test_methods_get_the_settings_of_their_blocks_and_those_that_would_do_nothing_are_left_out():
    keeps, merges = (Setting(keep=0.5), Setting()), (Setting(), Setting(r=3))
    assert configured([TOME, COLUMNS, L1], (Setting(heads=1), Setting())) == ()
    assert configured([TOME, COLUMNS, L1], keeps) == (replace(COLUMNS, keep=(0.5, 1.0)),)
    assert configured([TOME, COLUMNS, L1], merges) == (replace(TOME, r=(0, 3)),)


def test_a_recipe_says_what_it_sets(tiny, images):
    found = vp.search(tiny(), images, "macs:0.9", [TOME, L1])
    cut = found.plan.blocks[0]
    assert f"heads {len(cut.heads)} " in text_of(found)
    assert f"channels {len(cut.channels)} " in text_of(found)


def test_applying_a_cut_with_a_loader_calibrates_anew_and_warns_of_nothing(tiny, calibrated, images):
    found = Found((vp.Columns(keep=0.5, importance="column_mean"),), vp.prune(tiny(), L1), "macs:0.5", 0.5, 0.1, "features")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = found.apply(copy.deepcopy(calibrated), images)
    assert model.calibration[0].q_mean.shape == (2, 8)
    untouched = copy.deepcopy(calibrated)
    with pytest.raises(ValueError, match=r"give apply a loader of images$"):
        found.apply(untouched)
    assert untouched.blocks[0].attn.num_heads == 4
    assert untouched.calibration
    with pytest.raises(ValueError, match=r"or run vp\.calibrate before"):
        replace(found, plan=None).apply(tiny())


@pytest.mark.parametrize("fidelity", ["logits", "labels"])
def test_other_fidelities_are_searched_by(tiny, labelled, fidelity):
    found = vp.search(tiny(), labelled, "macs:0.85", MIXES["merges and columns"], fidelity=fidelity)
    assert 0.8 <= found.share <= 0.85
    assert found.fidelity == fidelity
    assert found.loss != vp.search(tiny(), labelled, "macs:0.85", MIXES["merges and columns"]).loss


@pytest.mark.parametrize("target", ["0.8", "macs", "macs:", "macs:1", "macs:0", "macs:-1", "macs:x", "macs:nan", "flops:0.8", "latency:2", 0.8, None])
def test_a_target_that_cannot_be_read_is_refused(tiny, images, target):
    with pytest.raises(ValueError, match=r"target must be macs:SHARE or latency:SHARE .* got "):
        vp.search(tiny(), images, target, L1)


def test_a_target_out_of_reach_says_how_far_the_methods_come(tiny, images):
    with pytest.raises(CannotReach, match=r"r at full strength come to 0\.\d+ of the unpruned cost, not to 0\.3"):
        vp.search(tiny(), images, "macs:0.3", TOME)


@pytest.mark.parametrize(
    ("batches", "settings", "sentence"),
    [
        ([], {}, "the loader gave no batch: nothing to search on"),
        ([torch.zeros(3, 32, 32)], {}, r"batches of float images \[B, C, H, W\], got torch.float32 \(3, 32, 32\)"),
        ([torch.zeros(1, 3, 32, 32, dtype=torch.uint8)], {}, "batches of float images"),
        ([torch.zeros(1, 3, 32, 32), torch.zeros(1, 3, 16, 16)], {}, "the images must be of one size"),
        ([torch.zeros(1, 3, 32, 32)], {"fidelity": "labels"}, r"fidelity labels needs batches \(images, labels\)"),
        ([(torch.zeros(1, 3, 32, 32),)], {"fidelity": "labels"}, "fidelity labels needs batches"),
        ([torch.zeros(1, 3, 32, 32)], {"fidelity": "cosine"}, "fidelity must be one of features, logits, labels, got 'cosine'"),
    ],
)
def test_a_loader_that_cannot_be_searched_on_is_refused(tiny, batches, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        vp.search(tiny(), batches, "macs:0.8", L1, **settings)


@pytest.mark.parametrize("fidelity", ["logits", "labels"])
def test_predictions_need_a_classifier(tiny, labelled, fidelity):
    with pytest.raises(ValueError, match=f"fidelity {fidelity} needs a classifier, and this model has none"):
        vp.search(tiny(num_classes=0), labelled, "macs:0.8", L1, fidelity=fidelity)
    assert vp.search(tiny(num_classes=0), labelled, "macs:0.8", L1).share <= 0.8


def test_models_that_cannot_be_patched_are_refused(tiny, images):
    with pytest.raises(ValueError, match="the model is patched already"):
        vp.search(vp.patch(tiny(), TOME), images, "macs:0.8", TOME)
    with pytest.raises(UnsupportedModel, match="the model is compiled"):
        vp.search(torch.compile(tiny(), backend="eager"), images, "macs:0.8", TOME)
    with pytest.raises(UnsupportedModel, match="cannot be patched"):
        vp.search(timm.create_model("test_resnet"), images, "macs:0.8", TOME)
    with pytest.raises(UnsupportedModel, match="over all units"):
        vp.search(tiny(scale_mlp_norm=True), images, "macs:0.8", vp.L1(0, 0.5))


@pytest.mark.parametrize(
    ("methods", "error", "sentence"),
    [
        ([], ValueError, "nothing to search"),
        (vp.TokenBias(), ValueError, "nothing to search"),
        (["tome"], TypeError, "got 'tome'"),
        (vp.Columns(rule="mass", tau=0.5, importance="column_mean"), ValueError, "a search turns keep, and the rule mass takes tau"),
    ],
)
def test_methods_that_cannot_be_searched_are_refused_before_anything_runs(tiny, methods, error, sentence):
    with pytest.raises(error, match=sentence):
        vp.search(tiny(), (pytest.fail("the loader was read") for _ in range(1)), "macs:0.8", methods)


def test_a_model_that_was_cut_before_is_cut_further(tiny, images):
    model = tiny()
    vp.prune(model, vp.L1(0.25, 0.25))
    found = vp.search(copy.deepcopy(model), images, "macs:0.8", L1)
    assert share_of(found, model, None) == pytest.approx(found.share, rel=1e-12)


def test_mixtures_begin_with_each_knob_alone_and_hold_none_twice():
    assert mixtures(("r",)) == [{"r": 1.0}]
    pair = mixtures(("r", "keep"))
    assert pair[:2] == [{"r": 1.0}, {"keep": 1.0}]
    assert {"r": 4.0, "keep": 1.0} in pair
    assert {"r": 0.25, "keep": 1.0} in pair
    three = mixtures(("r", "heads", "channels"))
    assert len(three) == 3 + 3 * 5 - 2  # all alike is there once
    assert all(three.count(one) == 1 for one in three)


@pytest.fixture
def nothing_timed(monkeypatch):
    monkeypatch.setattr(LatencyCost, "_fit", fit_by_macs)


def test_a_model_that_is_slower_than_its_blocks_add_up_to_is_asked_for_more(tiny, images, monkeypatch, nothing_timed):
    asked = []
    monkeypatch.setattr(LatencyCost, "measure", lambda self, found: asked.append(found) or [0.9, 0.84, 0.805][len(asked) - 1])
    found = vp.search(tiny(depth=2), images, "latency:0.8", [COLUMNS, L1], exchanges=0)
    tokens = [macs(model).total for model in asked]
    assert tokens == sorted(tokens)[::-1]
    assert (len(asked), found.measured, found.target) == (3, 0.805, "latency:0.8")
    assert all(prune_stacks(model) or model.prune_plan for model in asked)


def test_the_nearest_is_kept_where_no_correction_comes_close(tiny, images, monkeypatch, nothing_timed):
    ratios = iter([0.9, 0.82, 0.85, 0.87])
    monkeypatch.setattr(LatencyCost, "measure", lambda *_: next(ratios))
    assert vp.search(tiny(depth=2), images, "latency:0.8", [COLUMNS, L1], exchanges=0).measured == 0.82
    monkeypatch.setattr(LatencyCost, "measure", lambda *_: 1.3)
    with pytest.warns(UserWarning, match="the nearest to latency:0.8 that was found measures 1.300"):
        vp.search(tiny(depth=2), images, "latency:0.8", [COLUMNS, L1], exchanges=0)


@pytest.mark.filterwarnings("ignore:the nearest to")
def test_a_correction_out_of_reach_leaves_what_was_found_before(tiny, images, monkeypatch, nothing_timed):
    monkeypatch.setattr(LatencyCost, "measure", lambda *_: 0.99)
    assert vp.search(tiny(depth=2), images, "latency:0.85", COLUMNS, exchanges=0).measured == 0.99
    with pytest.raises(CannotReach):
        vp.search(tiny(depth=2), images, "latency:0.3", COLUMNS, exchanges=0)


@pytest.mark.slow
def test_a_target_of_time_is_met_by_the_clock():
    model = timm.create_model("vit_tiny_patch16_224", depth=4, img_size=160, num_classes=0).eval()
    images = [torch.randn(2, 3, 160, 160, generator=torch.Generator().manual_seed(0))]
    found = vp.search(model, images, "latency:0.8", [TOME, COLUMNS, L1])
    assert abs(found.measured - 0.8) <= 0.1


def test_the_loss_and_the_share_of_a_recipe_are_those_of_the_model_that_it_makes(calibrated, images):
    methods = [vp.ToMe(), vp.Columns(importance="column_mean", dropped="merge"), vp.L1(heads=0.5, mlp=0)]
    search = Search(calibrated, images, methods)
    found = search.find("macs:0.75", exchanges=0)
    assert found.plan is not None
    model = found.apply(copy.deepcopy(calibrated), images).eval()
    assert found.loss == search.bench.loss_of(model)
    assert found.share == pytest.approx(macs(model).total / macs(calibrated).total, abs=1e-6)


@pytest.mark.parametrize("importance", ["value_norm", "class_attention", "column_mean"])
def test_what_the_selection_costs_goes_down_with_the_heads(calibrated, images, importance):
    found = vp.search(calibrated, images, "macs:0.7", [vp.Columns(importance=importance), vp.L1(heads=0.5, mlp=0)], exchanges=0)
    model = found.apply(copy.deepcopy(calibrated), images)
    assert found.share == pytest.approx(macs(model).total / macs(calibrated).total, abs=1e-6)


@pytest.mark.filterwarnings("ignore:the token bias is all zero")
def test_the_loss_is_against_the_model_as_it_came_whatever_else_is_given(calibrated, images):
    found = vp.search(calibrated, images, "macs:0.85", [vp.TokenBias(query_key_free=2), vp.Columns(importance="prob")], exchanges=0)
    assert found.loss > 1e-3


def test_features_that_are_no_numbers_are_refused(tiny, images):
    model = tiny()
    with torch.no_grad():
        model.blocks[0].mlp.fc1.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="features are not finite"):
        vp.search(model, images, "macs:0.9", vp.ToMe())


def test_a_recipe_knows_its_architecture_and_another_is_warned_of(images, tmp_path):
    found = vp.search(tiny_named(), images, "macs:0.95", vp.ToMe(), exchanges=0)
    found.save(tmp_path / "found.yaml")
    assert load_found(tmp_path / "found.yaml").model == "vit_tiny_patch16_224"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.apply(tiny_named())
    with pytest.warns(UserWarning, match="searched on vit_tiny_patch16_224, and goes onto deit_tiny_patch16_224"):
        found.apply(tiny_named("deit_tiny_patch16_224"))


@pytest.mark.parametrize(
    ("loader", "settings", "sentence"),
    [
        ([{"images": 1}], {}, "got a dict"),
        ([torch.zeros(1, 3, 48, 48)], {}, "48"),
        ([(torch.zeros(1, 3, 32, 32), torch.tensor([5]))], {"fidelity": "labels"}, "the labels go beyond the 5 classes"),
    ],
)
def test_batches_that_do_not_fit_the_model_are_refused(tiny, loader, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        vp.search(tiny(), loader, "macs:0.9", vp.ToMe(), **settings)


def test_a_negative_number_of_exchanges_is_refused(tiny, images):
    with pytest.raises(ValueError, match="exchanges must be at least 0, got -1"):
        vp.search(tiny(), images, "macs:0.9", vp.ToMe(), exchanges=-1)


def test_heads_that_are_cut_and_heads_that_are_gated_are_not_searched_together():
    with pytest.raises(ValueError, match=r"L1 and BudgetFormer both decide which heads there are"):
        vp.search(tiny_named(), [torch.randn(2, 3, 32, 32)], "macs:0.8", [vp.L1(heads=0.5, mlp=0), vp.BudgetFormer(heads=2)])
