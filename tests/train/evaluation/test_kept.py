"""Kept columns, counted on the way of an evaluation."""

import pytest
import timm
import torch

from tests.helpers import randomise_bias
from vit_prune.train.evaluation.kept import KeptCounter

CPU = torch.device("cpu")


@pytest.fixture
def mass_model():
    torch.manual_seed(0)
    model = timm.create_model("vit_mini28_bias", depth=2, embed_dim=16, num_heads=2, rule="mass", tau=0.5)
    return randomise_bias(model, scale=0.3).eval()


def count(model, batches):
    with torch.inference_mode(), KeptCounter(model, batches, CPU) as counted:
        for images, _ in counted:
            model(images)
    return counted.result()


def test_padding_of_a_batch_and_images_that_are_left_out_are_not_counted(mass_model):
    images = torch.randn(6, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    alone = torch.tensor([count(mass_model, [(image[None], torch.tensor([0]))])["columns_per_block"] for image in images])  # [B, L]
    targets = torch.tensor([0, 1, -1, 2, 0, 1])
    together = count(mass_model, [(images[:4], targets[:4]), (images[4:], targets[4:])])
    seen = alone[targets >= 0].double()
    assert seen.mean(1).unique().numel() > 2
    assert together["columns_per_block"] == pytest.approx(seen.mean(0).tolist())
    assert together["columns"] == pytest.approx(seen.mean().item())
    assert together["columns_spread"] == pytest.approx(seen.mean(1).std(correction=0).item())


def test_nothing_counted_is_none_and_hooks_are_gone(mass_model):
    assert count(mass_model, [])["columns"] is None
    assert count(timm.create_model("vit_mini28"), [])["columns_per_block"] is None
    assert not any(module._forward_hooks for module in mass_model.modules())
