import pytest
import timm
import torch
from safetensors.torch import save_file

import vit_prune as vp
from vit_prune.methods.stack import columns_methods, prune_stacks

SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 3, "img_size": 32}
NAMES = {
    "deit_ti_bias": "deit_tiny_patch16_224",
    "deit_s_bias": "deit_small_patch16_224",
    "deit_b_bias": "deit_base_patch16_224",
    "vit_ti_bias": "vit_tiny_patch16_224",
    "vit_s_bias": "vit_small_patch16_224",
    "vit_l_mae_bias": "vit_large_patch16_224.mae",
    "vit_mini28_bias": "vit_mini28",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_are_timms_models_with_a_bias(name):
    assert name in timm.list_models("*_bias")
    with torch.device("meta"):
        ours, dense = timm.create_model(name), timm.create_model(NAMES[name])
    added = {key for key in ours.state_dict() if ".prune." in key}
    assert {key for key in ours.state_dict() if key not in added and "head" not in key and "norm." not in key} == {
        key for key in dense.state_dict() if "head" not in key and "norm." not in key
    }
    assert len(added) == len(ours.blocks)
    assert ours.num_classes == (10 if "28" in name else 1000)


def test_timms_arguments_and_ours_are_both_taken():
    model = timm.create_model("deit_s_bias", **SMALL, num_classes=7, keep="1,.5", per_head=False, dropped="merge", query_key_free=1, drop_path_rate=0.1)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 7)
    assert [method.keep_ratio for method in columns_methods(model)] == [1.0, 0.5]
    assert [stack.query_key_free for stack in prune_stacks(model)] == [False, True]
    assert model.blocks[0].attn.prune.token_bias.weight.shape == (1, 48)


WRONG = [({"keep": 0}, ValueError, "keep must be in"), ({"kepe": 0.5}, TypeError, "kepe"), ({"rule": "top"}, ValueError, "rule must be")]


@pytest.mark.parametrize(("kwargs", "error", "message"), WRONG)
def test_wrong_arguments_are_refused(kwargs, error, message):
    with pytest.raises(error, match=message):
        timm.create_model("deit_s_bias", **SMALL, **kwargs)


def test_pretrained_starts_from_the_dense_weights(tmp_path):
    dense = timm.create_model("deit_small_patch16_224", **SMALL)
    save_file(dense.state_dict(), tmp_path / "dense.safetensors")
    overlay = {"file": str(tmp_path / "dense.safetensors")}
    model = timm.create_model("deit_s_bias", pretrained=True, pretrained_cfg_overlay=overlay, **SMALL).eval()
    images = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(model(images), dense.eval()(images))


@pytest.mark.parametrize("kind", ["dense", "ours"])
def test_checkpoint_path_takes_dense_weights_and_ours(kind, tmp_path):
    source = timm.create_model("deit_small_patch16_224" if kind == "dense" else "deit_s_bias", **SMALL)
    if kind == "dense":
        path = tmp_path / "dense.pth"
        torch.save({"state_dict": source.state_dict()}, path)
    else:
        torch.nn.init.normal_(source.blocks[0].attn.prune.token_bias.weight)
        vp.save(source, tmp_path / "ours")
        path = tmp_path / "ours" / "model.safetensors"
    model = timm.create_model("deit_s_bias", checkpoint_path=str(path), **SMALL)
    for key, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


def test_mae_weights_go_into_the_average_pooled_model(tmp_path):
    dense = timm.create_model("vit_large_patch16_224.mae", **SMALL)
    save_file(dense.state_dict(), tmp_path / "mae.safetensors")
    model = timm.create_model("vit_l_mae_bias", pretrained=True, pretrained_cfg_overlay={"file": str(tmp_path / "mae.safetensors")}, **SMALL)
    assert torch.equal(model.blocks[1].mlp.fc1.weight, dense.blocks[1].mlp.fc1.weight)
    assert model.global_pool == "avg"
    assert model.head.out_features == 1000


def test_features_only_and_its_indices():
    for name in ("deit_s_bias", "vit_mini28_bias"):
        model = timm.create_model(name, depth=4, img_size=32, patch_size=8, features_only=True, out_indices=(1, 3), keep=0.5)
        assert [tuple(f.shape[2:]) for f in model(torch.randn(1, 3, 32, 32))] == [(4, 4)] * 2
        assert len(prune_stacks(model)) == 4


def test_a_new_model_does_not_warn_about_its_untrained_bias(recwarn):
    timm.create_model("deit_s_bias", keep=0.5, **SMALL)
    assert [str(warning.message) for warning in recwarn if "token bias" in str(warning.message)] == []


def test_features_are_those_of_the_whole_model_not_of_a_shorter_one():
    args = {"keep": "linear:1.0:0.4", "query_key_free": 1, "num_classes": 3}
    torch.manual_seed(0)
    whole = timm.create_model("vit_mini28_bias", **args).eval()
    features = timm.create_model("vit_mini28_bias", features_only=True, out_indices=(1, 2), **args).eval()
    for stack in prune_stacks(whole):
        torch.nn.init.normal_(stack.token_bias.weight)
    features.load_state_dict(whole.state_dict())
    images = torch.randn(2, 3, 28, 28)
    expected = whole.forward_intermediates(images, indices=(1, 2), intermediates_only=True)
    assert [method.keep_ratio for method in columns_methods(features)] == [method.keep_ratio for method in columns_methods(whole)][:3]
    for actual, wanted in zip(features(images), expected, strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("name", ["vit_mini28", "vit_mini28_bias"])
def test_features_only_takes_a_checkpoint_of_the_whole_model(name, tmp_path):
    source = timm.create_model(name)
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    model = timm.create_model("vit_mini28_bias", features_only=True, out_indices=(2,), checkpoint_path=str(tmp_path / "model.safetensors"))
    assert torch.equal(model.model.blocks[2].mlp.fc1.weight, source.blocks[2].mlp.fc1.weight)
    assert model.feature_info.channels() == [128]
    with pytest.raises(RuntimeError, match=r"model\.cls_token"):
        model.load_state_dict({"pos_embed": source.pos_embed})
