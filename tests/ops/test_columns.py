import math

import pytest
import torch

from vit_prune.ops import columns as ops
from vit_prune.ops.reference import column_attention


def test_ties_go_to_the_lower_index():
    for length in (5, 50, 5000):
        selection = ops.select(torch.zeros(2, length), num_prefix=1, width=3)
        assert selection.kept.tolist() == [[0, 1, 2, 3]] * 2
        assert selection.dropped[0, :1].tolist() == [4]


def test_what_is_not_a_number_takes_no_place_from_the_prefix():
    importance = torch.tensor([[0.0, float("nan"), 1.0], [float("inf"), 0.0, float("-inf")]])
    assert ops.select(importance, num_prefix=1, width=1).kept.tolist() == [[0, 3], [0, 1]]


def test_prefix_is_outside_the_budget_and_never_ranked():
    selection = ops.select(torch.tensor([[1.0, 5.0, 3.0]]), num_prefix=2, width=1)
    assert selection.kept.tolist() == [[0, 1, 3]]
    assert selection.dropped.tolist() == [[4, 2]]


@pytest.mark.parametrize(
    ("num_tokens", "num_prefix", "keep", "expected"),
    [
        (2, 1, 1e-6, 2),
        (2, 1, 0.5, 2),
        (2, 1, 1.0, 2),
        (197, 1, 0.5, 99),
        (197, 1, 1.0, 197),
        (101, 1, 0.55, 56),
        (31, 1, 0.1, 4),
        (20, 0, 0.3, 6),
        (6, 5, 0.1, 6),
    ],
)
def test_number_of_kept_columns_without_a_column_from_rounding(num_tokens, num_prefix, keep, expected):
    assert ops.num_kept(num_tokens, num_prefix, keep) == expected  # .55 * 100 is 55.000000000000007


@pytest.mark.parametrize("keep", [0.01, 0.1, 0.3, 0.55, 0.7, 1.0])
def test_visible_count_is_that_of_the_image_alone(keep):
    visible = torch.arange(100)[None] < torch.tensor([[100], [37], [1], [0]])
    counts = ops.num_kept_visible(visible, keep).tolist()
    assert counts == [ops.num_kept(n, 0, keep) for n in (100, 37, 1, 0)]


def test_images_with_fewer_columns_are_marked_not_mixed():
    selection = ops.select(torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]]), num_prefix=1, width=2, count=torch.tensor([2, 1]))
    assert selection.kept.tolist() == [[0, 1, 2], [0, 3, 2]]
    assert selection.valid.tolist() == [[True, True, True], [True, True, False]]


@pytest.mark.parametrize(("tau", "expected"), [(0.4, 1), (0.5, 1), (0.51, 2), (0.75, 2), (1.0, 3)])
def test_smallest_mass_is_the_smallest_set(tau, expected):
    assert ops.smallest_mass(torch.tensor([[0.25, 0.5, 0.25, 0.0]]), tau).item() == expected


def test_smallest_mass_of_equal_parts_takes_no_part_from_rounding():
    assert ops.smallest_mass(torch.full((1, 10), 0.1), 0.5).item() == 5
    assert ops.smallest_mass(torch.full((1, 7), 1 / 7), 1.0).item() == 7


def test_visible_tokens_of_every_kind_of_mask():
    key_only = torch.tensor([True, False, True])[None, None, None]
    additive = torch.zeros(1, 1, 1, 3).masked_fill(~key_only, torch.finfo(torch.float32).min)
    symmetric = key_only & key_only.mT
    for mask in (key_only, additive, symmetric, additive.half(), torch.where(symmetric, 0.0, float("-inf"))):
        assert ops.visible_tokens(mask).tolist() == [[True, False, True]]


def test_gathered_mask_follows_its_columns():
    mask = torch.rand(1, 2, 4, 6)
    index = torch.tensor([[5, 0], [1, 1]])
    gathered = ops.gather_mask(mask, index)
    assert torch.equal(gathered, torch.stack([mask[0][..., [5, 0]], mask[0][..., [1, 1]]]))


def merge_case(dtype=torch.float64, P=1, n=6, width=2, H=2, D=4):
    torch.manual_seed(0)
    x = torch.randn(2, P + n, D, dtype=dtype)
    bias = torch.randn(2, H, P + n, dtype=dtype)
    return x, bias, ops.select(torch.randn(2, n), num_prefix=P, width=width), P


def test_merge_equals_the_formula_written_as_loops():
    x, bias, selection, P = merge_case()
    merged, merged_bias = ops.merge(x, bias, selection, features=x, num_prefix=P)
    for b in range(2):
        clusters = {j: [j] for j in selection.kept[b].tolist()}
        for i in selection.dropped[b].tolist():
            kept = selection.kept[b, P:].tolist()
            clusters[max(kept, key=lambda j: torch.cosine_similarity(x[b, i], x[b, j], dim=0).item())].append(i)
        for column, members in enumerate(clusters.values()):
            weight = bias[b, :, members].mean(0).softmax(0)
            torch.testing.assert_close(merged[b, column], weight @ x[b, members])
            torch.testing.assert_close(merged_bias[b, :, column], bias[b, :, members].logsumexp(-1))


def test_merging_equal_tokens_changes_no_output():
    torch.manual_seed(0)
    distinct = torch.randn(1, 3, 8, dtype=torch.float64)
    x = torch.cat([distinct, distinct[:, 1:], distinct[:, 1:]], dim=1)  # prefix a, then b c b c b c
    bias = torch.randn(1, 2, 7, dtype=torch.float64)
    bias[:, 1] = bias[:, 0]  # weights are a mean over heads: exact only where the heads agree or the members do
    q = torch.randn(1, 2, 7, 4, dtype=torch.float64)
    selection = ops.select(torch.tensor([[9.0, 8.0, 0, 0, 0, 0]]), num_prefix=1, width=2)
    merged, merged_bias = ops.merge(x, bias, selection, features=x, num_prefix=1)

    def attend(x, bias):
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return column_attention(q, heads, heads, bias)

    torch.testing.assert_close(attend(merged, merged_bias), attend(x, bias), rtol=0, atol=1e-12)
    log_size_plus_log_count = ops.gather_bias(bias, selection.kept) + torch.tensor([1.0, 3.0, 3.0]).log()
    assert (attend(merged, log_size_plus_log_count) - attend(x, bias)).abs().max() > 1e-3


def test_merge_never_folds_into_the_prefix():
    x, bias, _, _ = merge_case()
    x[:, 0] = x[:, 3]  # the class token is the nearest of all to token 3
    selection = ops.select(torch.tensor([[9.0, 8.0, 0, 0, 0, 0]] * 2), num_prefix=1, width=2)
    merged, merged_bias = ops.merge(x, bias, selection, features=x, num_prefix=1)
    assert torch.equal(merged[:, 0], x[:, 0])
    torch.testing.assert_close(merged_bias[:, :, 0], bias[:, :, 0])


def test_hidden_tokens_add_nothing_to_a_merged_column():
    x, bias, _, P = merge_case()
    visible = torch.ones(2, 7, dtype=torch.bool)
    visible[:, -2:] = False
    importance = torch.tensor([[4.0, 3.0, 2.0, 1.0]] * 2)
    padded = torch.cat([importance, torch.full((2, 2), -math.inf)], dim=1)
    short = ops.merge(x[:, :5], bias[:, :, :5], ops.select(importance, num_prefix=P, width=2), features=x[:, :5], num_prefix=P)
    long = ops.merge(x, bias, ops.select(padded, num_prefix=P, width=2), features=x, num_prefix=P, visible=visible)
    torch.testing.assert_close(long, short)


def test_a_merged_image_in_a_wider_batch_is_the_image_alone():
    x, bias, _, P = merge_case()
    importance = torch.tensor([[6.0, 5, 4, 3, 2, 1]] * 2)
    alone = ops.merge(x, bias, ops.select(importance, num_prefix=P, width=2), features=x, num_prefix=P)
    selection = ops.select(importance, num_prefix=P, width=4, count=torch.tensor([2, 4]))
    merged, merged_bias = ops.merge(x, bias, selection, features=x, num_prefix=P)
    torch.testing.assert_close(merged[0, :3], alone[0][0])
    torch.testing.assert_close(merged_bias[0, :, :3], alone[1][0])


def test_merge_gradients():
    x, bias, selection, P = merge_case()
    features = x.clone()
    assert torch.autograd.gradcheck(lambda x, b: ops.merge(x, b, selection, features=features, num_prefix=P), [x.requires_grad_(), bias.requires_grad_()])


def test_merge_survives_biases_far_apart():
    x, bias, selection, P = merge_case(dtype=torch.float32)
    bias[..., 1::2] = -1e4
    bias[..., 2] = -math.inf
    merged, merged_bias = ops.merge(x, bias, selection, features=x, num_prefix=P)
    assert merged.isfinite().all()
    assert not merged_bias.isnan().any()


def test_a_zero_target_in_half_precision_draws_no_token_to_itself():
    x = torch.cat([torch.zeros(1, 2, 4), torch.ones(1, 3, 4)], dim=1).half()
    assert ops._nearest(x[:, 3:], x, None).tolist() == [[2, 2]]
