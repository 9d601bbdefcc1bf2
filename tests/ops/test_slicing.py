"""A fused qkv is three parts, not one axis (Torch-Pruning #393, #105)."""

import torch

from vit_prune.ops.slicing import keep_units, sum_units

HEADS, HEAD_DIM, WIDTH = 3, 4, 12
KEPT_ROWS = [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15, 20, 21, 22, 23, 24, 25, 26, 27, 32, 33, 34, 35]  # without 4-7, 16-19, 28-31


def numbered(rows: int, columns: int) -> torch.Tensor:
    """Entry [i, j] is i + j / 100."""
    return torch.arange(rows)[:, None] + torch.arange(columns)[None] / 100


def test_a_head_leaves_queries_keys_and_values_each():
    weight = numbered(3 * WIDTH, WIDTH)
    cut = keep_units(weight, [0, 2], num_units=HEADS, parts=3)
    assert torch.equal(cut, weight[KEPT_ROWS])
    assert cut.is_contiguous()
    bias = torch.arange(3 * WIDTH)
    assert keep_units(bias, [0, 2], num_units=HEADS, parts=3).tolist() == KEPT_ROWS


def test_a_head_leaves_the_columns_of_proj():
    weight = numbered(WIDTH, WIDTH)
    cut = keep_units(weight, [0, 2], num_units=HEADS, dim=1)
    assert torch.equal(cut, weight[:, [0, 1, 2, 3, 8, 9, 10, 11]])
    assert cut.is_contiguous()


def test_twice_in_a_row_and_all_but_one():
    rows = torch.arange(3 * WIDTH)
    twice = keep_units(keep_units(rows, [0, 2], num_units=3, parts=3), [1], num_units=2, parts=3)
    assert twice.tolist() == [8, 9, 10, 11, 20, 21, 22, 23, 32, 33, 34, 35]
    assert torch.equal(twice, keep_units(rows, [2], num_units=3, parts=3))


def test_channels_of_a_gated_mlp_leave_both_halves():
    rows = torch.arange(10)  # 5 channels: rows 0-4 meet rows 5-9
    assert keep_units(rows, [1, 4], num_units=5, parts=2).tolist() == [1, 4, 6, 9]


def test_sums_gather_what_keep_units_would_cut():
    weight = torch.randn(3 * WIDTH, WIDTH)
    sums = sum_units(weight, num_units=HEADS, parts=3)
    alone = torch.stack([keep_units(weight, [head], num_units=HEADS, parts=3).sum() for head in range(HEADS)])
    torch.testing.assert_close(sums, alone)
    columns = sum_units(weight, num_units=HEADS, dim=1)
    torch.testing.assert_close(columns, weight.unflatten(1, (HEADS, HEAD_DIM)).sum((0, 2)))
    assert sum_units(torch.arange(10.0), num_units=5, parts=2).tolist() == [5, 7, 9, 11, 13]
