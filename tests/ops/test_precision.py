"""Autocast is off where float32 is promised, and nothing is asked of a device that has none."""

import pytest
import torch

from vit_prune.ops.precision import full_precision


@pytest.mark.parametrize("autocast", ["cpu", None])
def test_products_inside_are_in_float32(autocast):
    x = torch.randn(4, 4)
    with torch.autocast(autocast or "cpu", dtype=torch.bfloat16, enabled=autocast is not None):
        assert (x @ x).dtype == (torch.float32 if autocast is None else torch.bfloat16)
        with full_precision(x):
            assert (x @ x).dtype == torch.float32
        assert torch.is_autocast_enabled("cpu") == (autocast is not None)


def test_a_device_without_autocast_is_left_alone():
    x = torch.randn(4, 4, device="meta")
    with torch.autocast("cpu", dtype=torch.bfloat16), full_precision(x):
        assert torch.is_autocast_enabled("cpu")
        assert (x @ x).dtype == torch.float32
