"""Checkpoints by name, their class lists, and their settings in words."""

import pytest
import timm

import vit_prune as vp
from vit_prune.train.evaluation.candidates import Candidate, check_classes, describe, label_names, parse_candidate, parse_candidates

TINY = {"depth": 2, "embed_dim": 16, "num_heads": 2, "img_size": 8}


def test_a_name_takes_one_path_or_several():
    assert parse_candidate("bias=a,b/c") == Candidate("bias", ("a", "b/c"))
    assert parse_candidate("runs/best") == Candidate("runs/best", ("runs/best",))


def test_a_path_with_a_sign_of_equality_is_not_cut(tmp_path, monkeypatch):
    (tmp_path / "lr=0.1").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse_candidate("lr=0.1") == Candidate("lr=0.1", ("lr=0.1",))
    assert parse_candidate("runs/lr=0.1/best").paths == ("runs/lr=0.1/best",)


@pytest.mark.parametrize("text", ["name=", "=path", "name=a,,b"])
def test_a_missing_name_or_path_is_refused(text):
    with pytest.raises(ValueError, match=r"must be PATH or NAME=PATH,PATH"):
        parse_candidate(text)


def test_one_path_twice_would_be_a_spread_of_zero(tmp_path):
    with pytest.raises(ValueError, match="lists one path twice"):
        parse_candidate(f"name={tmp_path},{tmp_path}/")


def test_two_rows_of_one_name_and_no_checkpoint_at_all_are_refused(tmp_path):
    with pytest.raises(ValueError, match="two checkpoints are called x"):
        parse_candidates((f"x={tmp_path}", f"x={tmp_path}"))
    with pytest.raises(ValueError, match="checkpoint needs"):
        parse_candidates(())


def labelled(names, num_classes):
    model = timm.create_model("vit_mini28_bias", num_classes=num_classes, **TINY)
    model.pretrained_cfg = {**model.pretrained_cfg, "label_names": names}
    return model


def test_a_head_with_spare_outputs_is_judged_by_its_class_list():
    model = labelled(("a", "b"), 5)
    check_classes("here", model, ("a", "b"), label_names(model))
    with pytest.raises(ValueError, match="only in the checkpoint none; only in the data c"):
        check_classes("here", model, ("a", "b", "c"), label_names(model))


def test_the_class_list_of_another_head_is_no_reason_to_refuse():
    model = labelled(tuple(map(str, range(1000))), 2)
    assert label_names(model) is None
    check_classes("here", model, ("a", "b"), label_names(model))


def test_only_the_first_names_of_a_long_list_are_in_the_message():
    model = labelled(tuple(map(str, range(1000))), 1000)
    with pytest.raises(ValueError, match="and 995 more; only in the data x0, ") as error:
        check_classes("here", model, tuple(f"x{index}" for index in range(1000)), label_names(model))
    assert len(str(error.value)) < 200


def model_with(**kwargs):
    return timm.create_model("vit_mini28_bias", **TINY, **kwargs)


@pytest.mark.filterwarnings("ignore:the token bias is all zero")
def test_the_live_ratios_are_described_not_those_of_the_build():
    model = model_with(keep="linear:1:.3")
    assert describe(model)["keep"] == "linear:1:0.3"
    vp.set_keep(model, 0.25)
    assert describe(model)["keep"] == "0.25"
    vp.set_keep(model, [1, 0.5])
    assert describe(model)["keep"] == "1,0.5"


def test_rules_without_a_keep_and_models_without_columns_are_described_as_what_they_are():
    mass = describe(model_with(rule="mass", tau=0.9))
    assert (mass["keep"], mass["rule"], mass["tau"], mass["importance"]) == ("mass 0.9", "mass", 0.9, "prob")
    plain = describe(timm.create_model("vit_mini28", **TINY))
    assert (plain["keep"], plain["rule"], plain["query_key_free"]) == ("1", None, 0)
    assert describe(model_with(query_key_free=2))["query_key_free"] == 2
