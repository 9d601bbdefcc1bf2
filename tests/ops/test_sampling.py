import pytest
import torch

from vit_prune.ops.sampling import LEAST_NEW, above_zero, inclusion, novelty, systematic


@pytest.mark.parametrize("count", [1, 3, 7, 12])
def test_inclusion_probabilities_sum_to_the_count_and_none_is_above_one(count):
    weight = torch.rand(4, 12, generator=torch.Generator().manual_seed(0)).double() ** 4
    probability = inclusion(weight, torch.full((4, 1), count))
    torch.testing.assert_close(probability.sum(-1), torch.full((4,), float(count), dtype=torch.float64))
    assert probability.max() <= 1
    for row in range(4):  # in proportion, among those that are not certain
        free = probability[row] < 1
        torch.testing.assert_close(probability[row, free] * weight[row, free].sum(), weight[row, free] * probability[row, free].sum())


def test_each_image_has_its_own_count_and_hidden_patches_have_no_chance():
    weight = torch.tensor([[1.0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    probability = inclusion(weight, torch.tensor([[2], [3], [1]]))
    torch.testing.assert_close(probability[0], torch.tensor([0.5, 0.5, 0.5, 0.5, 0, 0]))
    torch.testing.assert_close(probability[1], torch.full((6,), 0.5))
    assert probability[2].sum() == 0


def test_a_sample_is_spread_over_the_image_and_dense_where_weights_are_high():
    weight = torch.cat([torch.ones(40), 9 * torch.ones(10), torch.ones(50)])[None]
    taken = systematic(weight, torch.tensor([[18]])).topk(18).indices[0].sort().values
    assert len(set(taken.tolist())) == 18
    assert ((taken >= 40) & (taken < 50)).sum() == 9
    assert taken[taken < 40].diff().min() >= 9  # one of ten, evenly
    assert torch.equal(systematic(weight, torch.tensor([[18]])), systematic(weight, torch.tensor([[18]])))


def test_all_patches_are_taken_where_the_count_says_so():
    assert (systematic(torch.rand(2, 9), torch.full((2, 1), 9)) >= 1.99).all()


def test_novelty_is_the_distance_to_the_nearest_of_the_other_half():
    features = torch.randn(2, 7, 5, dtype=torch.float64)
    cosine = torch.nn.functional.cosine_similarity(features[:, :, None], features[:, None], dim=-1)
    other = (torch.arange(7)[:, None] + torch.arange(7)) % 2 == 1
    expected = 1 - cosine.masked_fill(~other, -1).amax(-1)
    torch.testing.assert_close(novelty(features), expected)
    features[:, 3] = 2 * features[:, 0]
    torch.testing.assert_close(novelty(features)[:, [0, 3]], torch.full((2, 2), LEAST_NEW, dtype=torch.float64))
    assert novelty(features[:, :1]).tolist() == [[1], [1]]


def test_hidden_patches_are_nobodys_nearest():
    features = torch.randn(1, 8, 5)
    features[:, 5] = features[:, 0]
    visible = torch.arange(8)[None] < 4
    torch.testing.assert_close(novelty(features, visible)[:, :4], novelty(features[:, :4]))


def test_novelty_is_the_same_under_autocast():
    features = torch.randn(1, 1, 32) + 0.05 * torch.randn(2, 64, 32)
    expected = novelty(features)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(novelty(features), expected)


def test_what_is_left_of_a_sample_is_spread_where_few_weights_are_above_zero():
    weight = torch.zeros(1, 16)
    weight[0, 3] = 1
    taken = systematic(above_zero(weight).sqrt(), torch.tensor([[8]])).topk(8).indices[0].sort().values
    assert 3 in taken
    assert taken.diff().max() <= 3
