"""A sweep that takes a second: a tiny model by name, the photographs or the digits."""

import pytest
import timm
import torch

import vit_prune as vp
from tests.helpers import single_thread
from vit_prune.analysis.noop import perturb
from vit_prune.sweep import bench

TINY = {"embed_dim": 32, "depth": 2, "num_heads": 4}


def tiny(name="vit_mini28", **kwargs):
    """A model of 2 blocks, of 64 patches on 8 or 32 pixels, whose attention is far from a mean."""
    torch.manual_seed(0)
    model = perturb(timm.create_model(name, **TINY, **kwargs, patch_size=1 if kwargs.get("img_size") == 8 else 4)).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight *= 4
            block.attn.proj.weight *= 10
        model.patch_embed.proj.weight *= 10
        if model.num_classes:
            model.head.weight.normal_()
            model.head.bias -= model(torch.randn(64, 3, *model.patch_embed.img_size)).mean(0)  # or every image is of one class
    return model


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    with single_thread():
        yield


@pytest.fixture
def small(monkeypatch):
    """Whatever a sweep builds by name is as small as `tiny`; the names that it asked for."""
    asked = []

    def build(name: str, *, pretrained: bool = False, **kwargs):
        asked.append((name, pretrained, kwargs))
        return tiny(name, **kwargs)

    monkeypatch.setattr(bench, "build_model", build)
    return asked


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Two folders of vp.save on 8 pixels: dense, and half of the columns."""
    root = tmp_path_factory.mktemp("saved")
    for name, keep in (("dense", None), ("half", 0.5)):
        model = tiny(img_size=8, num_classes=10)
        vp.save(model if keep is None else vp.patch(model, vp.Columns(keep=keep, importance="random")), root / name)
    return root
