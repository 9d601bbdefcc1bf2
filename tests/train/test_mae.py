"""A file of MAE pretraining, from fine-tuning to export."""

import copy
from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn

from vit_prune import checkpoint
from vit_prune.checkpoint import fit
from vit_prune.checkpoint.reader import Content
from vit_prune.methods.stack import columns_methods
from vit_prune.train.evaluation.config import EvaluateConfig
from vit_prune.train.evaluation.run import run_evaluation
from vit_prune.train.run import run

SMALL = {"img_size": 32, "model_kwargs": {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}}


def mae_weights(*, dim: int, depth: int, tokens: int, patch_size: int, decoder_dim: int, decoder_depth: int) -> dict[str, Tensor]:
    """The keys and shapes of a MAE pretraining checkpoint (arXiv 2111.06377), with random values; tokens count the class token."""

    def blocks(prefix: str, width: int, count: int) -> dict[str, Tensor]:
        shapes = {"norm1": (width,), "attn.qkv": (3 * width, width), "attn.proj": (width, width), "norm2": (width,), "mlp.fc1": (4 * width, width)}
        shapes["mlp.fc2"] = (width, 4 * width)
        return {
            f"{prefix}.{index}.{name}.{kind}": torch.randn(shape if kind == "weight" else shape[:1])
            for index in range(count)
            for name, shape in shapes.items()
            for kind in ("weight", "bias")
        }

    pixels = 3 * patch_size**2
    return {
        "cls_token": torch.randn(1, 1, dim),
        "pos_embed": torch.randn(1, tokens, dim),
        "mask_token": torch.randn(1, 1, decoder_dim),
        "decoder_pos_embed": torch.randn(1, tokens, decoder_dim),
        "patch_embed.proj.weight": torch.randn(dim, 3, patch_size, patch_size),
        "patch_embed.proj.bias": torch.randn(dim),
        **blocks("blocks", dim, depth),
        "norm.weight": torch.randn(dim),
        "norm.bias": torch.randn(dim),
        "decoder_embed.weight": torch.randn(decoder_dim, dim),
        "decoder_embed.bias": torch.randn(decoder_dim),
        **blocks("decoder_blocks", decoder_dim, decoder_depth),
        "decoder_norm.weight": torch.randn(decoder_dim),
        "decoder_norm.bias": torch.randn(decoder_dim),
        "decoder_pred.weight": torch.randn(pixels, decoder_dim),
        "decoder_pred.bias": torch.randn(pixels),
    }


def test_the_full_size_file_fits_our_model_but_for_the_head_and_the_decoder(monkeypatch):
    """On the meta device, where 304 million weights weigh nothing."""
    with torch.device("meta"):
        model = timm.create_model("vit_l_mae_bias", keep="linear:1.0:0.3")
        weights = mae_weights(dim=1024, depth=24, tokens=197, patch_size=16, decoder_dim=512, decoder_depth=8)
    monkeypatch.setattr(fit, "open_checkpoint", lambda path, ema: Content(Path(path), weights, (), None))
    with pytest.warns(UserWarning, match=r"norm\.\* is dropped and fc_norm\.\* stays fresh"):
        loaded = fit.load_weights(model, "mae_pretrain_vit_large.pth")
    assert loaded.matched == 4 + 24 * 12  # embeddings and patches, and twelve weights in each block
    assert set(loaded.fresh) == {"head.weight", "head.bias", "fc_norm.weight", "fc_norm.bias", *(f"blocks.{i}.attn.prune.token_bias.weight" for i in range(24))}
    assert all(name.startswith(("decoder_", "mask_token", "norm.")) for name in loaded.dropped)
    with pytest.raises(ValueError, match="is a MAE pretraining file with no classification head: fine-tune from it"):
        fit.load_weights(model, "mae_pretrain_vit_large.pth", purpose="evaluate")


@pytest.fixture
def pretrained(tmp_path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "mae.pth"
    weights = mae_weights(dim=32, depth=2, tokens=17, patch_size=8, decoder_dim=16, decoder_depth=1)
    torch.save({"model": {name: 0.1 * value for name, value in weights.items()}}, path)
    return path


@pytest.mark.filterwarnings("ignore:.*fresh")
def test_a_file_of_mae_goes_through_fine_tuning_resume_evaluation_and_export(tiny_config, tiny_folder, pretrained):
    settings = {**SMALL, "model": "vit_l_mae_bias", "keep": "1,.5", "layer_decay": 0.75, "drop_path": 0.2, "mixup": 0.8, "grad_accum_steps": 2}
    whole = run(tiny_config(**settings, experiment="whole", epochs=2, initial_checkpoint=str(pretrained)))
    run(tiny_config(**settings, experiment="halves", epochs=1, initial_checkpoint=str(pretrained)))
    halves = run(tiny_config(**settings, experiment="halves", epochs=2, initial_checkpoint=str(pretrained), resume="auto"))
    assert halves["last"]["epoch"] == whole["last"]["epoch"] == 2
    folder = Path(whole["folder"]) / "best"
    report = run_evaluation(EvaluateConfig(checkpoint=(str(folder),), data_dir=str(tiny_folder), workers=0, device="cpu"), torch.device("cpu"))
    assert report["results"][0]["top1"] == pytest.approx(whole["best"]["eval_top1"])
    check_export(checkpoint.load(folder).eval())


def check_export(model: nn.Module) -> None:
    """torch.export at another batch size than that of the example."""
    assert [method.keep_ratio for method in columns_methods(model)] == [1, 0.5]
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(copy.deepcopy(model), (torch.randn(2, 3, 32, 32),), dynamic_shapes=({0: batch},))
    images = torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(exported.module()(images), model(images))


def test_a_file_of_mae_is_no_run_to_resume(tiny_config, pretrained):
    with pytest.raises(FileNotFoundError, match="no run to resume"):
        run(tiny_config(experiment=None, resume=str(pretrained)))
