"""A tiny model whose settings lose something, and images to search on."""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import vit_prune as vp
from tests.helpers import single_thread, tiny_vit


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    with single_thread():
        yield


@pytest.fixture
def images() -> list[Tensor]:
    """Two batches of two."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, 3, 32, 32, generator=generator) for _ in range(2)]


@pytest.fixture
def labelled(images) -> list[tuple[Tensor, Tensor]]:
    return [(batch, torch.tensor([index, 4 - index])) for index, batch in enumerate(images)]


@pytest.fixture
def tiny():
    """A function that makes a model of 3 blocks of 4 heads and 128 channels, with 64 patches and attention that is far from a mean."""

    def make(**kwargs) -> VisionTransformer:
        model = tiny_vit(**{"patch_size": 4, "depth": 3, **kwargs})
        with torch.no_grad():
            for block in model.blocks:
                block.attn.qkv.weight *= 4
        return model

    return make


@pytest.fixture
def calibrated(tiny, images) -> VisionTransformer:
    return vp.calibrate(tiny(), images)
