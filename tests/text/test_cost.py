"""MACs of texts at their own length, by hand."""

import timm
import torch

from tests.text.helpers import TINY_GATED, hand_macs
from vit_prune.text.cost import text_macs


def test_two_lengths_and_given_heads_are_what_the_formula_says():
    model = timm.create_model("text_mini_budget", **TINY_GATED)
    lengths, heads = torch.tensor([3, 7]), torch.tensor([[1, 3], [4, 2]])
    counts = text_macs(model, lengths, heads)
    ours = [hand_macs(3, [1, 3]), hand_macs(7, [4, 2])]
    dense = [hand_macs(length, None) for length in (3, 7)]
    assert counts["macs"] == round(sum(ours) / 2)
    assert counts["macs_spread"] == round(abs(ours[0] - ours[1]) / 2)
    assert counts["dense_macs"] == round(sum(dense) / 2)
    assert counts["saved"] == 100 * (1 - sum(ours) / sum(dense))
    assert counts["macs_all_projected"] == round(sum(hand_macs(length, ks, projected=4) for length, ks in ((3, [1, 3]), (7, [4, 2]))) / 2)


def test_without_gates_only_the_lengths_count():
    counts = text_macs(timm.create_model("text_mini", **TINY_GATED), torch.tensor([3, 7, 7]), None)
    three, seven = (hand_macs(length, None) for length in (3, 7))
    assert (counts["macs"], counts["dense_macs"]) == (round((three + 2 * seven) / 3),) * 2
    assert (counts["saved"], counts["macs_all_projected"]) == (0, None)
