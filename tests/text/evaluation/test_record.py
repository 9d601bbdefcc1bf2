"""Lengths and gates of texts, noted on the way."""

import timm
import torch

from tests.text.helpers import TINY_GATED
from vit_prune.methods.base import set_progress
from vit_prune.text.evaluation.record import recorded

SHORT, LONG = torch.tensor([[5, 6, 0, 0], [7, 0, 0, 0]]), torch.tensor([[5, 6, 7, 8, 9, 0, 0, 0]])


def test_padding_is_no_token_and_each_block_keeps_its_own_numbers():
    model = timm.create_model("text_mini_budget", **TINY_GATED, budget=0.5).eval()
    model.blocks[1].attn.prune.gaters[0].heads = 3
    set_progress(model, 1.0)
    with torch.no_grad(), recorded(model) as record:
        model(SHORT)
        model(LONG)
    assert record.lengths.tolist() == [2, 1, 5]
    budget, heads = record.budget_and_heads
    assert budget.tolist() == [[0.5, 0.5]] * 3
    assert heads.tolist() == [[2, 3]] * 3
    assert record.summary() == {"tokens": 8 / 3, "budget": 0.5, "heads": 2.5, "heads_per_block": [2, 3], "heads_spread": 0}


def test_without_gates_there_are_lengths_alone_and_no_hook_stays():
    model = timm.create_model("text_mini", **TINY_GATED).eval()
    with torch.no_grad(), recorded(model) as record:
        model(LONG)
    assert record.budget_and_heads is None
    assert record.summary() == {"tokens": 5} | dict.fromkeys(("budget", "heads", "heads_spread", "heads_per_block"))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
