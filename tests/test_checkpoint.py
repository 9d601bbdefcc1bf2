"""Checkpoints: what is saved comes back bit for bit, what people have is read, and what does not fit is refused before anything changes."""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import pytest
import safetensors.torch
import timm
import torch
from timm.layers import resample_abs_pos_embed
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim.swa_utils import AveragedModel

import vit_prune as vp
from tests.helpers import randomise_bias, single_thread, tiny_named, tiny_vit
from vit_prune.calibrate import calibrate
from vit_prune.checkpoint import load, load_weights, read_checkpoint, save
from vit_prune.methods.base import Method, MethodConfig
from vit_prune.methods.stack import columns_methods
from vit_prune.patch.timm import PrunedAttention

DISTILLED, NAFLEX = "deit_tiny_distilled_patch16_224", "naflexvit_base_patch16_gap"
HALF = vp.Columns(keep=0.5, importance="column_mean", dropped="merge", merge_rank=8)
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    with single_thread():
        yield


def tiny(*methods, name="vit_tiny_patch16_224", calibrated=False, **kwargs) -> nn.Module:
    """A perturbed tiny model in eval mode, patched with methods whose biases are random."""
    model = tiny_named(name, **kwargs)
    if calibrated:
        calibrate(model, [IMAGES], rank=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return randomise_bias(vp.patch(model, list(methods))) if methods else model


def outputs(model: nn.Module, size: tuple[int, int] = (32, 32)) -> torch.Tensor:
    parameter = next(model.parameters())
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.eval()(images.to(parameter.dtype))


def assert_same_weights(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) and actual[name].dtype == expected[name].dtype for name in expected)


@contextmanager
def raises_untouched(model: nn.Module, match: str):
    """A ValueError of that text, after which the model is what it was."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=match):
        yield
    assert_same_weights(model.state_dict(), before)


def written(path: pathlib.Path, contents: object) -> pathlib.Path:
    torch.save(contents, path)
    return path


def edit_config(directory: pathlib.Path, **changes: object) -> pathlib.Path:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


ROUND_TRIPS = {
    "plain": {},
    "token_bias": {"methods": [vp.TokenBias(keep=vp.linear(1.0, 0.3))]},
    "query_key_free": {"methods": [vp.TokenBias(query_key_free=1)], "qk_norm": True},
    "shared": {"methods": [vp.TokenBias(per_head=False), vp.Columns(rule="mass", tau=0.5)]},
    "calibrated_merge": {"methods": [vp.TokenBias(), HALF], "calibrated": True},
    "systematic": {"methods": [vp.TokenBias(), vp.Columns(keep=0.4, importance="prob", dropped="merge", sampling="systematic")]},
    "gumbel": {"methods": [vp.TokenBias(), vp.Columns(keep=0.4, sampling="gumbel", seed=7)]},
    "distilled": {"methods": [vp.TokenBias(keep=0.5)], "name": DISTILLED},
    "naflex": {"methods": [vp.TokenBias(keep=0.5)], "name": NAFLEX},
    "classic_naflex": {"methods": [vp.TokenBias(keep=0.5)], "use_naflex": True},
    "fp16": {"methods": [vp.TokenBias(), HALF], "calibrated": True, "dtype": torch.float16},
    "fp16_buffers": {"name": "vit_base_patch16_rope_224", "dtype": torch.float16},
    "bf16": {"methods": [vp.TokenBias(keep=0.5)], "dtype": torch.bfloat16},
    "wide": {"img_size": (16, 40), "dynamic_img_size": True, "global_pool": "avg", "reg_tokens": 2, "class_token": False, "init_values": 0.1},
    "rates": {"drop_rate": 0.1, "pos_drop_rate": 0.2, "proj_drop_rate": 0.3, "attn_drop_rate": 0.1, "drop_path_rate": 0.4, "patch_drop_rate": 0.2},
}


@pytest.mark.parametrize("case", ROUND_TRIPS)
def test_round_trip_is_bit_identical_not_merely_close(tmp_path, case):
    args = dict(ROUND_TRIPS[case])
    dtype = args.pop("dtype", torch.float32)
    model = tiny(*args.pop("methods", []), **args).to(dtype)
    save(model, tmp_path)
    loaded = load(tmp_path)
    assert loaded.training
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    assert_same_weights(loaded.state_dict(), model.state_dict())
    assert str(loaded) == str(model)
    assert {name: value.dtype for name, value in loaded.named_buffers()} == {name: value.dtype for name, value in model.named_buffers()}
    assert torch.equal(outputs(loaded, args.get("img_size", (32, 32))), outputs(model, args.get("img_size", (32, 32))))


def test_round_trip_keeps_each_tensor_dtype_of_a_mixed_model(tmp_path):
    model = tiny(vp.TokenBias()).half()
    model.norm.float()
    model.blocks[0].attn.prune.float()
    save(model, tmp_path)
    assert_same_weights(load(tmp_path).state_dict(), model.state_dict())


def test_keep_set_after_the_patch_is_saved_exactly_not_the_schedule_of_the_config(tmp_path):
    model = tiny(vp.TokenBias(keep=0.5), depth=3)
    vp.set_keep(model, [1.0, 1 / 3, 0.1 + 0.2])
    save(model, tmp_path)
    assert [method.keep_ratio for method in columns_methods(load(tmp_path))] == [1.0, 1 / 3, 0.1 + 0.2]
    assert [method.keep_ratio for method in columns_methods(load(tmp_path, keep=0.25))] == [0.25] * 3
    assert json.loads((tmp_path / "config.json").read_text())["keep"] == [1.0, 1 / 3, 0.1 + 0.2]


def test_loading_a_trained_bias_does_not_warn_that_it_is_zero_but_a_zero_bias_does(tmp_path):
    model = tiny(vp.TokenBias(keep=0.5))
    save(model, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(tmp_path)
    randomise_bias(model, scale=0.0)
    save(model, tmp_path)
    with pytest.warns(UserWarning, match=r"bias is all zero"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("methods", "q_mean", "directions"),
    [
        ([HALF], (4, 8), (32, 8)),
        ([vp.Columns(keep=0.5, importance="column_mean")], (4, 8), (32, 0)),
        ([vp.TokenBias(), vp.Columns(keep=0.5, dropped="merge")], (0, 8), (32, 16)),
    ],
)
def test_calibration_comes_back_so_that_the_loaded_model_can_be_patched_again(tmp_path, methods, q_mean, directions):
    model = tiny(*methods, calibrated=True)
    save(model, tmp_path)
    loaded = load(tmp_path)
    for held, measured in zip(loaded.calibration, model.calibration, strict=True):
        assert held.q_mean.shape == q_mean
        assert held.directions.shape == directions
        assert torch.equal(held.directions, measured.directions[:, : directions[1]])
    expected = outputs(loaded)
    weights = {name: value.clone() for name, value in loaded.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        vp.patch(vp.unpatch(loaded), methods).load_state_dict(weights)
    assert torch.equal(outputs(loaded), expected)


def test_a_calibration_that_no_method_holds_is_not_lost_in_silence(tmp_path):
    with pytest.warns(UserWarning, match=r"calibration is not saved"):
        save(tiny(calibrated=True), tmp_path)


def test_switches_flipped_after_the_build_come_back(tmp_path):
    model = tiny(vp.TokenBias(keep=0.5), name=DISTILLED)
    model.set_distilled_training(True)
    model.blocks[1].attn.fused_attn = False
    save(model, tmp_path)
    loaded = load(tmp_path)
    assert [block.attn.fused_attn for block in loaded.blocks] == [block.attn.fused_attn for block in model.blocks]
    assert len(loaded(IMAGES)) == 2
    assert torch.equal(outputs(loaded), outputs(model))


@dataclass(frozen=True)
class Warm(MethodConfig):
    """A method of somebody else's, whose bias grows with training."""

    name: ClassVar[str] = "warm"
    powers: tuple[int, ...] = (1,)

    def build(self, host):
        return WarmMethod()


class WarmMethod(Method):
    progress = 0.0

    def bias(self, x):
        return self.progress * x[..., :1].mT

    def step(self, progress):
        self.progress = progress


def test_progress_that_a_method_has_made_comes_back_with_it(tmp_path):
    model = tiny(Warm(powers=(1, 2)))
    before = outputs(model)
    for block in model.blocks:
        block.attn.prune.warm.step(0.5)
    save(model, tmp_path)
    assert torch.equal(outputs(load(tmp_path)), outputs(model))
    assert not torch.equal(outputs(model), before)
    assert load(tmp_path).blocks[0].attn.prune.configs == (Warm(powers=(1, 2)),)


def test_frozen_parameters_do_not_make_another_model(tmp_path):
    model = tiny(qk_norm=True).requires_grad_(False)
    vp.patch(model, vp.TokenBias(query_key_free=1))
    save(model, tmp_path)
    assert_same_weights(load(tmp_path).state_dict(), model.state_dict())
    assert all(parameter.requires_grad for parameter in vp.unpatch(load(tmp_path)).parameters())


def test_our_entry_points_load_without_their_own_arguments_and_timm_reads_the_file(tmp_path):
    args = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
    model = randomise_bias(timm.create_model("deit_ti_bias", keep=0.5, per_head=False, **args))
    save(model, tmp_path)
    assert torch.equal(outputs(load(tmp_path)), outputs(model))
    by_timm = timm.create_model("deit_ti_bias", keep=0.5, per_head=False, checkpoint_path=str(tmp_path / "model.safetensors"), **args)
    assert torch.equal(outputs(by_timm), outputs(model))
    save(model, tmp_path, model_args={"architecture": "deit_ti_bias"})
    assert torch.equal(outputs(load(tmp_path)), outputs(model))
    save(vp.unpatch(model), tmp_path, model_args={"architecture": "deit_ti_bias"})
    assert not any(isinstance(module, PrunedAttention) for module in load(tmp_path).modules())


def test_preprocessing_of_another_tag_comes_back_not_that_of_the_default_one(tmp_path):
    model = tiny(name="vit_base_patch16_224.mae")
    save(model, tmp_path)
    assert timm.create_model("vit_base_patch16_224", depth=1).pretrained_cfg["mean"] != model.pretrained_cfg["mean"]
    assert load(tmp_path).pretrained_cfg["mean"] == model.pretrained_cfg["mean"]


def test_changes_that_timm_offers_after_the_build_are_saved(tmp_path):
    model = tiny(vp.TokenBias())
    model.reset_classifier(3, "avg")
    model.set_input_size((16, 48))
    model.prune_intermediate_layers(1, prune_head=False)
    save(model, tmp_path)
    assert torch.equal(outputs(load(tmp_path), (16, 48)), outputs(model, (16, 48)))


def test_save_leaves_the_model_and_the_random_numbers_alone(tmp_path):
    model = tiny(vp.TokenBias(keep=0.5))
    model.train().blocks[0].requires_grad_(False)
    before, state, text = torch.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}, str(model)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    save(model, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same_weights(model.state_dict(), state)
    assert (model.training, str(model)) == (True, text)
    assert [parameter.requires_grad for parameter in model.parameters()] == flags


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, ModelEmaV3, lambda model: nn.DataParallel(torch.compile(model))])
def test_wrappers_are_looked_through_when_saving_and_loading(tmp_path, wrap):
    model = tiny(vp.TokenBias(keep=0.5))
    save(wrap(model), tmp_path)
    assert_same_weights(load(tmp_path).state_dict(), model.state_dict())
    other = tiny(vp.TokenBias(keep=0.5))
    wrapped = wrap(other)
    load_weights(wrapped, tmp_path, purpose="resume")
    inner = wrapped.module if isinstance(wrapped, ModelEmaV3) else other
    assert_same_weights(inner.state_dict(), model.state_dict())


def test_shared_and_strided_tensors_are_saved(tmp_path):
    model = tiny(depth=3)
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    model.head.weight = nn.Parameter(torch.randn(32, 5).T)
    model.blocks[0].norm1.weight.data, model.blocks[0].norm1.bias.data = torch.randn(64).chunk(2)
    save(model, tmp_path)
    assert_same_weights(load(tmp_path).state_dict(), model.state_dict())


def rescale(model):
    model.blocks[1].attn.scale = 1.0


def swap_norm(model):
    model.blocks[0].norm1 = nn.LayerNorm(32, eps=1e-3)


def hide_eps(model):
    model.norm.eps = torch.tensor(1e-3)


def swap_activation(model):
    model.blocks[0].mlp.act = nn.SiLU()


def cut_channels(model):
    model.blocks[0].mlp.fc1, model.blocks[0].mlp.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)


def drop_block(model):
    model.blocks[1] = nn.Identity()


def add_parameter(model):
    model.extra = nn.Parameter(torch.zeros(3))


def flip_flag(model):
    model.patch_embed.flatten = False


def patch_in_part(model):
    vp.unpatch(model.blocks[0])


def mix_methods(model):
    model.blocks[0].attn.prune = tiny(vp.TokenBias(per_head=False)).blocks[0].attn.prune


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (rescale, r"blocks\.1\.attn\.scale is 1\.0 here, 0\.35\d* there"),
        (swap_norm, r"blocks\.0\.norm1\.eps is 0\.001 here"),
        (hide_eps, r"norm is LayerNorm\(.*eps=0\.001.* here, .* there"),
        (swap_activation, r"blocks\.0\.mlp\.act is a SiLU here, a GELU there"),
        (cut_channels, r"fc1\.out_features is 64 here, 128 there"),
        (drop_block, r"in part"),
        (add_parameter, r"1 unexpected: extra"),
        (flip_flag, r"patch_embed\.flatten is False here, True there"),
        (patch_in_part, r"in part"),
        (mix_methods, r"different methods"),
    ],
)
def test_a_model_that_would_come_back_as_another_is_refused_before_anything_is_written(tmp_path, change, match):
    model = tiny(vp.TokenBias())
    change(model)
    with pytest.raises(ValueError, match=match):
        save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_refusal_says_that_arguments_can_be_given_and_giving_them_works(tmp_path):
    class Norm(nn.LayerNorm):
        pass

    with pytest.raises(ValueError, match=r"cannot be rebuilt.*config\.json cannot hold norm_layer=.*Norm.*model_args"):
        save(tiny(norm_layer=Norm), tmp_path)
    model = tiny_vit(qk_norm=True)
    with pytest.raises(ValueError, match=r"no timm architecture name.*model_args=\{'architecture'"):
        save(model, tmp_path)
    with pytest.raises(ValueError, match=r"q_norm"):
        save(model, tmp_path, model_args={"architecture": "vit_tiny_patch16_224"})
    with pytest.raises(ValueError, match=r"create_model\(.*fails: .*no_such"):
        save(model, tmp_path, model_args={"architecture": "vit_tiny_patch16_224", "no_such": 1})
    with pytest.raises(ValueError, match=r"num_classes is 5 here, 7 there"):
        save(tiny(), tmp_path, model_args={"num_classes": 7})
    save(model, tmp_path, model_args={"architecture": "vit_tiny_patch16_224", "qk_norm": True})
    assert torch.equal(outputs(load(tmp_path)), outputs(model))


def test_what_the_model_shows_need_not_be_given(tmp_path):
    shown = {"global_pool": "avg", "fc_norm": False, "reg_tokens": 3, "no_embed_class": True, "in_chans": 1, "dynamic_img_pad": True, "dynamic_img_size": True}
    model = tiny_vit(**shown, drop_path_rate=0.2, attn_drop_rate=0.1)
    save(model, tmp_path, model_args={"architecture": "vit_tiny_patch16_224"})
    assert str(load(tmp_path)) == str(model)


def test_a_patched_model_inside_a_feature_wrapper_is_refused_with_what_to_save(tmp_path):
    wrapper = timm.create_model("deit_ti_bias", features_only=True, img_size=32, embed_dim=48, depth=4)
    with pytest.raises(ValueError, match=r"inside this PrunedFeatures"):
        save(wrapper, tmp_path)
    save(wrapper.model, tmp_path)
    assert_same_weights(load(tmp_path).state_dict(), wrapper.model.state_dict())


def failing(call, at: int):
    """`call`, but a full disk at its at-th time."""
    count = iter(range(1, 100))

    def maybe(*args, **kwargs):
        if next(count) == at:
            raise OSError(28, "No space left on device")
        return call(*args, **kwargs)

    return maybe


@pytest.mark.parametrize(
    ("target", "name", "at"), [(safetensors.torch, "save_file", 1), (os, "fsync", 1), (os, "fsync", 2), (os, "replace", 1), (os, "replace", 2)]
)
def test_a_full_disk_leaves_a_whole_checkpoint_and_no_temporary_files(tmp_path, monkeypatch, target, name, at):
    old, new = tiny(vp.TokenBias(keep=0.5)), tiny(vp.TokenBias(per_head=False), num_classes=9)
    save(old, tmp_path)
    with monkeypatch.context() as patching:
        patching.setattr(target, name, failing(getattr(target, name), at))
        with pytest.raises(OSError, match=r"No space left"):
            save(new, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    if (name, at) == ("replace", 2):  # the weights are the new ones already
        with pytest.warns(UserWarning, match=r"two saves"):
            loaded = load(tmp_path)
        assert_same_weights(loaded.state_dict(), new.state_dict())
    else:
        assert_same_weights(load(tmp_path).state_dict(), old.state_dict())


KILLED = """
import os, signal, sys, warnings
from pathlib import Path
import safetensors.torch, torch
import vit_prune as vp
from tests.helpers import randomise_bias, tiny_named
from vit_prune.checkpoint import save

warnings.simplefilter("ignore")
torch.set_num_threads(1)

def kill(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def half(tensors, path, metadata):
    Path(path).write_bytes(safetensors.torch.save(tensors, metadata)[:-1000])
    kill()

def second(call):
    calls = []
    return lambda *args: calls.append(args) or (kill() if len(calls) == 2 else call(*args))

old = randomise_bias(vp.patch(tiny_named(), vp.TokenBias(keep=0.5)))
new = randomise_bias(vp.patch(tiny_named(num_classes=9), vp.TokenBias(per_head=False)))
points = [
    ("write", safetensors.torch, "save_file", half),
    ("sync", os, "fsync", kill),
    ("first", os, "replace", kill),
    ("second", os, "replace", second(os.replace)),
]
for name, module, attribute, trap in points:
    save(old, Path(sys.argv[1], name))
    child = os.fork()
    if child == 0:
        setattr(module, attribute, trap)
        save(new, Path(sys.argv[1], name))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
"""


def test_sigkill_at_any_point_of_a_save_leaves_a_checkpoint_that_loads(tmp_path):
    root = pathlib.Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=True, cwd=root, timeout=120)
    for name in ("write", "sync", "first"):
        assert load(tmp_path / name).num_classes == 5
    with pytest.warns(UserWarning, match=r"two saves"):
        loaded = load(tmp_path / "second")
    assert (loaded.num_classes, loaded.blocks[0].attn.prune.token_bias.weight.shape) == (9, (1, 32))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architecture": 5, "keep": 0.5}, r"config\.json is not a config that save wrote: architecture, keep missing or of another type"),
        ({"format": 2}, r"config\.json has format 2, vit_prune .* reads format 1"),
        ({"methods": [{"name": "token_bais"}]}, r"unknown method 'token_bais'; there are .*did you mean token_bias\?"),
        ({"methods": [{"name": "columns", "keeep": 0.5}]}, r"method columns: .*keeep"),
        ({"architecture": "vit_tiny_patch16_225"}, r"no architecture 'vit_tiny_patch16_225'; did you mean vit_tiny_patch16_224\?"),
        ({"model_args": {"no_such": 1}}, r"create_model\(.*fails: .*no_such"),
        ({"model_args": {}, "keep": None}, r"config\.json does not describe the weights beside it: .*missing.*of another shape"),
        ({"keep": [0.5]}, r"config\.json: keep lists 1 ratios, the model has 2 blocks"),
        ({"methods": [vp.TokenBias(query_key_free=3).to_dict()], "keep": None}, r"config\.json: query_key_free is 3, the model has 2 blocks"),
        ({"settings": {"block.0": {}}}, r"settings names block\.0.*did you mean blocks\.0\?"),
    ],
)
def test_a_config_that_means_something_else_is_refused_with_the_nearest_name(tmp_path, changes, match):
    save(tiny(vp.TokenBias(keep=0.5)), tmp_path)
    with pytest.raises(ValueError, match=match):
        load(edit_config(tmp_path, **changes))


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json; it holds nothing"):
        load(tmp_path)
    save(tiny(), tmp_path)
    weights = (tmp_path / "model.safetensors").read_bytes()
    for length in (0, 4, 100, len(weights) - 8):
        (tmp_path / "model.safetensors").write_bytes(weights[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
            load(tmp_path)
    (tmp_path / "config.json").write_text('{"format": 1, "archi')
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match=r"architecture, model_args, .* missing or of another type"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"was not written by save.*load_weights"):
        load(written(tmp_path / "other.pth", {}))
    os.remove(tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors; it holds config\.json, other\.pth"):
        load_weights(tiny(), tmp_path)


def test_a_weights_file_alone_builds_its_model_and_a_foreign_one_says_what_to_do(tmp_path):
    model = tiny(vp.TokenBias(keep=0.5))
    save(model, tmp_path)
    assert torch.equal(outputs(load(tmp_path / "config.json")), outputs(model))
    assert torch.equal(outputs(load(tmp_path / "model.safetensors")), outputs(model))
    os.remove(tmp_path / "config.json")
    assert torch.equal(outputs(load((tmp_path / "model.safetensors").rename(tmp_path / "moved.safetensors"))), outputs(model))
    safetensors.torch.save_file(model.state_dict(), tmp_path / "foreign.safetensors")
    with pytest.raises(ValueError, match=r"does not say how to build its model"):
        load(tmp_path / "foreign.safetensors")


STATE = {"cls_token": torch.ones(1, 1, 4), "blocks.0.norm1.weight": torch.full((4,), 2.0)}
AVERAGE = {name: value + 1 for name, value in STATE.items()}
PREFIXES = [
    "",
    "module.",
    "_orig_mod.",
    "module._orig_mod.",
    "backbone.",
    "encoder.",
    "module.backbone.",
    "_orig_mod.module.encoder.",
    "backbone.encoder.module.",
]


def prefixed(prefix: str, state: dict) -> dict:
    return {prefix + name: value for name, value in state.items()}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("container", [None, "model", "state_dict", "state_dict_ema", "model_ema"])
def test_every_container_and_prefix_gives_bare_names_and_ema_only_when_asked(tmp_path, container, prefix):
    state = prefixed(prefix, STATE)
    path = written(tmp_path / "file.pth", state if container is None else {container: state, "epoch": 3})
    ema = container in ("state_dict_ema", "model_ema")
    assert_same_weights(read_checkpoint(path, ema=ema), STATE)
    with pytest.raises(ValueError, match=r"pass ema=True" if ema else "holds no EMA weights"):
        read_checkpoint(path, ema=not ema)


@pytest.mark.parametrize("name", ["state_dict_ema", "model_ema"])
@pytest.mark.parametrize("wrap", [dict, lambda state: {"module": state}, lambda state: {"ema": prefixed("module.", state), "decay": 0.999}])
def test_trained_and_averaged_weights_of_one_file_are_not_confused(tmp_path, name, wrap):
    path = written(tmp_path / "file.pth", {"model": STATE, name: wrap(AVERAGE), "optimizer": {"state": {}}})
    assert_same_weights(read_checkpoint(path), STATE)
    assert_same_weights(read_checkpoint(path, ema=True), AVERAGE)


def test_missing_ema_lists_what_there_is_and_a_disabled_one_is_none(tmp_path):
    path = written(tmp_path / "file.pth", {"model": STATE, "model_ema": None, "epoch": 3})
    assert_same_weights(read_checkpoint(path), STATE)
    with pytest.raises(ValueError, match=r"it holds model, model_ema, epoch"):
        read_checkpoint(path, ema=True)


@pytest.mark.parametrize("average", [ModelEmaV3, AveragedModel])
def test_state_dicts_of_ema_wrappers_are_read(tmp_path, average):
    model = tiny()
    path = written(tmp_path / "file.pth", {"model_ema": average(model).state_dict()})
    assert_same_weights(read_checkpoint(path, ema=True), dict(model.state_dict()))


def test_names_outside_of_the_backbone_are_dropped_with_one_warning_that_counts_them(tmp_path):
    path = written(tmp_path / "file.pth", prefixed("module.backbone.", STATE) | {"module.neck.w": torch.ones(1), "module.decode_head.w": torch.ones(1)})
    with pytest.warns(UserWarning, match=r"dropped 2 weights outside of the backbone: neck.w, decode_head.w") as caught:
        assert_same_weights(read_checkpoint(path), STATE)
    assert len(caught) == 1


def test_two_names_that_become_one_are_refused_not_overwritten(tmp_path):
    with pytest.raises(ValueError, match=r"cls_token and module\.cls_token are both cls_token"):
        read_checkpoint(written(tmp_path / "file.pth", STATE | prefixed("module.", STATE)))
    with pytest.raises(ValueError, match=r"more than once, under model and state_dict"):
        read_checkpoint(written(tmp_path / "file.pth", {"model": STATE, "state_dict": STATE}))


def test_safetensors_and_directories_are_read_and_hold_no_ema(tmp_path):
    model = tiny()
    save(model, tmp_path)
    assert_same_weights(read_checkpoint(tmp_path), dict(model.state_dict()))
    safetensors.torch.save_file(prefixed("module.", STATE), tmp_path / "file.safetensors")
    assert_same_weights(read_checkpoint(tmp_path / "file.safetensors"), STATE)
    with pytest.raises(ValueError, match=r"holds no EMA weights"):
        read_checkpoint(tmp_path, ema=True)


class Runs:
    """Unpickling this makes a folder."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_namespace_loads_and_nothing_else_is_unpickled(tmp_path, zipped):
    def file(**flags):
        torch.save({"model": STATE, "args": argparse.Namespace(lr=0.1, **flags)}, tmp_path / "file.pth", _use_new_zipfile_serialization=zipped)
        return tmp_path / "file.pth"

    assert_same_weights(read_checkpoint(file(betas=(0.9, 0.95), opt=None)), STATE)
    with pytest.raises(ValueError, match=r"file\.pth holds a pickled .*mkdir.*save its weights alone"):
        read_checkpoint(file(evil=Runs(tmp_path / "ran")))
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ValueError, match=r"file\.pth holds a pickled pathlib\.\w+"):
        read_checkpoint(file(path=pathlib.PurePosixPath("data")))
    with pytest.raises(ValueError, match=r"file\.pth holds a pickled timm\.models\.vision_transformer\.VisionTransformer.*model\.state_dict\(\)"):
        read_checkpoint(written(tmp_path / "file.pth", tiny()))


def test_files_that_are_no_checkpoint_are_named_in_one_sentence(tmp_path):
    whole = written(tmp_path / "file.pth", {"model": STATE}).read_bytes()
    for contents in (b"", whole[: len(whole) // 2], b"hello world\n", b"<html>404</html>"):
        (tmp_path / "file.pth").write_bytes(contents)
        with pytest.raises(ValueError, match=r"^[^\n]*file\.pth is not a whole checkpoint[^\n]*download it again[^\n]*$"):
            read_checkpoint(tmp_path / "file.pth")
    with pytest.raises(ValueError, match=r"holds a list; expected a state dict"):
        read_checkpoint(written(tmp_path / "file.pth", [1]))
    with pytest.raises(ValueError, match=r"holds no weights; it holds epoch"):
        read_checkpoint(written(tmp_path / "file.pth", {"epoch": 3}))
    with pytest.raises(FileNotFoundError, match=r"none\.pth does not exist"):
        read_checkpoint(tmp_path / "none.pth")


def mae_file(path: pathlib.Path, prefix: str = "", full: bool = True) -> pathlib.Path:
    """As MAE's pretraining writes it; with full=False, as its authors publish it: the encoder alone."""
    encoder = dict(tiny(num_classes=0, depth=1).state_dict())
    decoder = {"mask_token": torch.ones(1, 1, 16), "decoder_pos_embed": torch.ones(1, 17, 16), "decoder_blocks.0.norm1.weight": torch.ones(16)}
    return written(path, {"model": prefixed(prefix, encoder | decoder if full else encoder)})


@pytest.mark.parametrize(("prefix", "full"), [("", True), ("", False), ("module.", True)])
@pytest.mark.parametrize("pool", ["avg", "token"])
def test_mae_pretraining_file_is_a_start_for_both_poolings(tmp_path, pool, prefix, full):
    path, model = mae_file(tmp_path / "mae.pth", prefix, full), tiny(global_pool=pool, depth=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.warns(UserWarning, match=r"norm.* is dropped" if pool == "avg" else "the fresh head stays"):
        done = load_weights(model, path)
    assert [name for name in done.dropped if name.startswith(("decoder_", "mask_token"))] == (
        ["mask_token", "decoder_pos_embed", "decoder_blocks.0.norm1.weight"] if full else []
    )
    assert ("norm.weight" in done.dropped) == ("fc_norm.weight" in done.fresh) == (pool == "avg")
    assert {"head.weight", "head.bias"} <= set(done.fresh)
    encoder = read_checkpoint(path)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name] if name in done.fresh else encoder[name]), name


@pytest.mark.parametrize("purpose", ["evaluate", "resume"])
@pytest.mark.parametrize("pool", ["avg", "token"])
def test_mae_pretraining_file_is_refused_where_a_classifier_is_wanted(tmp_path, pool, purpose):
    model = tiny(global_pool=pool, depth=1)
    with raises_untouched(model, "is a MAE pretraining file with no classification head"):
        load_weights(model, mae_file(tmp_path / "mae.pth"), purpose=purpose)
    with raises_untouched(model, "head has no classes in the file, 5 in the model"):
        load_weights(model, mae_file(tmp_path / "encoder.pth", full=False), purpose=purpose)


def test_a_norm_that_no_part_of_the_model_takes_is_dropped_only_where_fc_norm_is_fresh(tmp_path):
    model, state = tiny(global_pool="avg"), dict(tiny(num_classes=0).state_dict())
    with raises_untouched(model, "2 unexpected: norm.weight, norm.bias"):
        load_weights(model, written(tmp_path / "file.pth", state | {"fc_norm.weight": torch.ones(32), "fc_norm.bias": torch.ones(32)}))
    with raises_untouched(model, "2 missing: fc_norm.weight, fc_norm.bias; 2 unexpected: norm.weight, norm.bias"):
        load_weights(model, written(tmp_path / "file.pth", tiny().state_dict()))


def test_mae_encoder_under_a_prefix_is_still_seen_as_pretraining(tmp_path):
    state = prefixed("encoder.", tiny(num_classes=0).state_dict()) | {"mask_token": torch.ones(1, 1, 16), "decoder.norm.weight": torch.ones(16)}
    model = tiny()
    with pytest.warns(UserWarning, match=r"dropped 2 weights"), raises_untouched(model, "is a MAE pretraining file"):
        load_weights(model, written(tmp_path / "mae.pth", state), purpose="evaluate")


@pytest.mark.parametrize("purpose", ["finetune", "evaluate", "resume"])
def test_fine_tuned_files_load_in_full_for_every_purpose(tmp_path, purpose):
    for args in ({"global_pool": "avg"}, {}, {"name": DISTILLED}, {"name": NAFLEX}):
        source, model = tiny(**args), tiny(**args)
        randomised = {name: torch.randn_like(value) for name, value in source.state_dict().items()}
        done = load_weights(model, written(tmp_path / "file.pth", {"model": randomised, "args": argparse.Namespace()}), purpose=purpose)
        assert_same_weights(model.state_dict(), randomised)
        assert (done.matched, done.dropped, done.fresh, done.resampled) == (len(randomised), (), (), ())


def test_prefix_tokens_are_counted_in_the_file_not_taken_from_the_model(tmp_path):
    distilled, plain, bare = tiny(name=DISTILLED), tiny(), tiny(no_embed_class=True)
    from_distilled, from_plain = written(tmp_path / "distilled.pth", distilled.state_dict()), written(tmp_path / "plain.pth", plain.state_dict())
    with raises_untouched(plain, r"^pos_embed in .*distilled\.pth has 2 prefix tokens, the model has 1$"):
        load_weights(plain, from_distilled)
    with raises_untouched(distilled, r"has 1 prefix token, the model has 2"):
        load_weights(distilled, from_plain)
    with raises_untouched(bare, r"has 1 prefix token, the model has 0"):
        load_weights(bare, from_plain)
    with raises_untouched(plain, r"has 0 prefix tokens, the model has 1"):
        load_weights(plain, written(tmp_path / "bare.pth", bare.state_dict()))
    large = tiny(img_size=48)
    with raises_untouched(large, "has 2 prefix tokens, the model has 1"):
        load_weights(large, from_distilled)


@pytest.mark.parametrize(
    ("args", "prefix"),
    [
        ({"reg_tokens": 4, "no_embed_class": True}, 0),
        ({"reg_tokens": 4}, 5),
        ({"name": DISTILLED}, 2),
        ({"class_token": False, "global_pool": "avg"}, 0),
        ({}, 1),
    ],
)
def test_pos_embed_is_resampled_from_its_own_grid_and_prefix_count(tmp_path, args, prefix):
    source, model = tiny(**args), tiny(img_size=(16, 48), **args)
    done = load_weights(model, written(tmp_path / "file.pth", source.state_dict()), purpose="evaluate")
    assert done.resampled == ("pos_embed 4x4 -> 2x6",)
    assert "resampled pos_embed 4x4 -> 2x6" in str(done)
    expected = resample_abs_pos_embed(source.pos_embed, new_size=[2, 6], old_size=[4, 4], num_prefix_tokens=prefix)
    assert torch.equal(model.pos_embed, expected)


def test_class_only_pos_embed_of_a_model_with_registers_is_not_cut_at_the_wrong_token(tmp_path):
    state = dict(tiny(reg_tokens=4).state_dict())
    state["pos_embed"] = state["pos_embed"][:, [0, *range(5, 21)]]  # class token and patches, as DINOv2 writes it
    model = tiny(reg_tokens=4)
    with raises_untouched(model, "has 1 prefix token, the model has 5"):
        load_weights(model, written(tmp_path / "file.pth", state))


def test_same_number_of_tokens_on_another_grid_is_resampled_or_asked_about(tmp_path):
    square, tall = tiny(), tiny(img_size=(64, 16))
    raw = written(tmp_path / "file.pth", tall.state_dict())
    model = tiny(img_size=(64, 16))
    with raises_untouched(model, r"4x4 with 1 prefix tokens or 8x2 with 1 prefix tokens: give source_grid=\(height, width\)"):
        load_weights(model, raw)
    assert load_weights(model, raw, source_grid=(8, 2)).resampled == ()
    assert load_weights(model, raw, purpose="resume").resampled == ()
    expected = resample_abs_pos_embed(tall.pos_embed, new_size=[4, 4], old_size=[8, 2], num_prefix_tokens=1)
    assert load_weights(square, raw, source_grid=(8, 2)).resampled == ("pos_embed 8x2 -> 4x4",)
    assert torch.equal(square.pos_embed, expected)
    save(tall, tmp_path)
    other = tiny()
    load_weights(other, tmp_path)
    assert torch.equal(other.pos_embed, expected)
    with raises_untouched(square, r"holds 17 entries, which is not 3x5 grid"):
        load_weights(square, raw, source_grid=(3, 5))
    with raises_untouched(square, r"has 0 prefix tokens, the model has 1 \(read as 4x4 patches: where that is wrong, give source_grid"):
        load_weights(square, written(tmp_path / "file.pth", tiny(img_size=(24, 40)).state_dict()))
    with raises_untouched(square, r"holds 13 entries, which is not a square or the model's grid"):
        load_weights(square, written(tmp_path / "file.pth", tiny(img_size=(24, 32)).state_dict()))


def test_naflex_pos_embed_is_resampled_from_the_grid_that_it_holds(tmp_path):
    source, model = tiny(name=NAFLEX, pos_embed_grid_size=(4, 6)), tiny(name=NAFLEX, pos_embed_grid_size=(3, 3))
    path = written(tmp_path / "file.pth", source.state_dict())
    with raises_untouched(model, r"embeds\.pos_embed in .* is 4x6, not source_grid=5x5"):
        load_weights(model, path, source_grid=(5, 5))
    assert load_weights(model, path).resampled == ("embeds.pos_embed 4x6 -> 3x3",)
    flat = source.embeds.pos_embed.reshape(1, 24, -1)
    assert torch.equal(model.embeds.pos_embed.reshape(1, 9, -1), resample_abs_pos_embed(flat, new_size=[3, 3], old_size=[4, 6], num_prefix_tokens=0))


@pytest.mark.parametrize("classes", [7, 0])
def test_head_of_other_classes_stays_fresh_for_finetune_alone(tmp_path, classes):
    source, model = tiny(num_classes=classes), tiny()
    path = written(tmp_path / "file.pth", source.state_dict())
    head = model.head.weight.clone()
    for purpose in ("evaluate", "resume"):
        with raises_untouched(model, f"head has {classes or 'no'} classes in the file, 5 in the model"):
            load_weights(model, path, purpose=purpose)
    with pytest.warns(UserWarning, match=r"the fresh head stays"):
        done = load_weights(model, path)
    assert done.fresh == ("head.weight", "head.bias")
    assert done.dropped == (("head.weight", "head.bias") if classes else ())
    assert torch.equal(model.head.weight, head)
    assert torch.equal(model.norm.weight, source.norm.weight)


def test_both_heads_of_a_distilled_model_are_held_to_the_rule(tmp_path):
    model = tiny(name=DISTILLED)
    with pytest.warns(UserWarning, match=r"head_dist has 7 classes"):
        done = load_weights(model, written(tmp_path / "file.pth", tiny(name=DISTILLED, num_classes=7).state_dict()))
    assert set(done.fresh) == {"head.weight", "head.bias", "head_dist.weight", "head_dist.bias"}


def test_a_warning_turned_into_an_error_leaves_the_model_unchanged(tmp_path):
    model = tiny()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"fresh head"):
            load_weights(model, written(tmp_path / "file.pth", tiny(num_classes=7).state_dict()))
    assert_same_weights(model.state_dict(), before)


def test_dense_weights_leave_the_bias_as_it_is_but_do_not_resume_a_run(tmp_path):
    model, path = tiny(vp.TokenBias(keep=0.5)), written(tmp_path / "file.pth", tiny().state_dict())
    bias = model.blocks[0].attn.prune.token_bias.weight.clone()
    for purpose in ("finetune", "evaluate"):
        done = load_weights(model, path, purpose=purpose)
        assert done.fresh == tuple(f"blocks.{index}.attn.prune.token_bias.weight" for index in (0, 1))
    assert torch.equal(model.blocks[0].attn.prune.token_bias.weight, bias)
    with raises_untouched(model, r"holds none of the model's 2 prune\.\* weights"):
        load_weights(model, path, purpose="resume")


def test_some_of_our_weights_missing_is_refused_though_each_block_alone_would_tolerate_it(tmp_path):
    model = tiny(vp.TokenBias(keep=0.5))
    state = dict(model.state_dict())
    del state["blocks.1.attn.prune.token_bias.weight"]
    with raises_untouched(model, r"1 missing: blocks\.1\.attn\.prune\.token_bias\.weight"):
        load_weights(model, written(tmp_path / "file.pth", state))
    with raises_untouched(model, r"2 of another shape: .*\(1, 32\) in the file, \(4, 32\) in the model"):
        load_weights(model, written(tmp_path / "file.pth", tiny(vp.TokenBias(per_head=False)).state_dict()))
    plain = tiny()
    with raises_untouched(plain, r"holds 2 prune\.\* weights .* the model is not patched: vp\.patch it .* or vp\.load"):
        load_weights(plain, written(tmp_path / "file.pth", model.state_dict()))


def test_another_model_is_refused_with_how_many_weights_matched(tmp_path):
    model = tiny()
    state = dict(model.state_dict())
    few = {name: state[name] for name in list(state)[:12]}
    with raises_untouched(model, r"matched 12 of 30 encoder weights of this VisionTransformer: is this another model\? 18 missing: .* and 8 more"):
        load_weights(model, written(tmp_path / "file.pth", few))
    with raises_untouched(model, "matched 0 of 30"):
        load_weights(model, written(tmp_path / "file.pth", timm.create_model("resnet10t").state_dict()))
    with raises_untouched(model, r"matched \d of 30"):
        load_weights(model, written(tmp_path / "file.pth", tiny(embed_dim=64).state_dict()), purpose="evaluate")


def test_what_does_not_fit_is_listed_by_its_first_ten_names_and_their_number(tmp_path):
    model = tiny()
    state = dict(model.state_dict()) | {f"extra.{index}": torch.ones(1) for index in range(12)}
    del state["norm.bias"]
    with raises_untouched(model, r"does not fit this VisionTransformer: 1 missing: norm\.bias; 12 unexpected: extra\.0, .*extra\.9 and 2 more$"):
        load_weights(model, written(tmp_path / "file.pth", state))
    with raises_untouched(model, "purpose must be one of finetune, evaluate, resume, got 'train'"):
        load_weights(model, written(tmp_path / "file.pth", state), purpose="train")


def test_layer_scale_under_the_names_of_deit_three_loads(tmp_path):
    source, model = tiny(init_values=0.1), tiny(init_values=0.2)
    state = {name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): value for name, value in source.state_dict().items()}
    load_weights(model, written(tmp_path / "file.pth", state))
    assert_same_weights(model.state_dict(), dict(source.state_dict()))


def test_half_precision_files_load_into_the_dtype_of_the_model(tmp_path):
    source, model = tiny().half(), tiny(img_size=48)
    load_weights(model, written(tmp_path / "file.pth", source.state_dict()))
    assert torch.equal(model.norm.weight, source.norm.weight.float())
    assert model.pos_embed.dtype == torch.float32
