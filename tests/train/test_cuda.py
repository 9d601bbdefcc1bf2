"""Training on a CUDA device."""

import pytest
import torch

from vit_prune.train.run import run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16"])
def test_a_run_trains_resumes_and_evaluates(tiny_config, dtype):
    """Prefetching, erasing and mixup on the device, the scaler, the average, columns that are kept and drawn."""
    settings = {"device": "cuda", "workers": 2, "reprob": 0.5, "mixup": 0.8, "model_ema": True, "keep": "1,.5", "importance": "random", "clip_grad": 1.0}
    if dtype is not None:
        settings |= {"amp": True, "amp_dtype": dtype}
    run(tiny_config(**settings, epochs=1))
    row = run(tiny_config(**settings, epochs=2, resume="auto"))["last"]
    assert row["epoch"] == 2
    assert row["peak_memory_mib"] > 0


def test_only_the_bias_trains_under_autocast(tiny_config):
    """The backward pass of attention in which only the additive mask needs a gradient."""
    row = run(tiny_config(device="cuda", train_only=("bias",), amp=True, amp_dtype="bfloat16", keep=".5"))["last"]
    assert row["skipped"] == 0
