import pytest
import torch

from vit_prune.ops.merging import match, merge_tokens, num_merges, unmerge_tokens


def plainly(metric, num_prefix, r):
    """The paper's matching in words: one image, one loop. Which original tokens end in which new one, as sets."""
    patches = list(range(num_prefix, len(metric)))
    targets, sources = patches[0::2], patches[1::2]
    cosine = torch.nn.functional.cosine_similarity
    pairs = []
    for source in sources:
        similar = [cosine(metric[source], metric[target], dim=0).item() for target in targets]
        best = max(range(len(targets)), key=lambda t: (similar[t], -t))
        pairs.append((-similar[best], source, targets[best]))
    clusters = {token: {token} for token in range(len(metric))}
    for _, source, target in sorted(pairs)[:r]:
        clusters[target].add(source)
        del clusters[source]
    return set(map(frozenset, clusters.values()))


def clusters_of(place):
    groups = {}
    for token, where in enumerate(place.tolist()):
        groups.setdefault(where, set()).add(token)
    return set(map(frozenset, groups.values()))


@pytest.mark.parametrize("num_prefix", [0, 1, 2, 5])
@pytest.mark.parametrize("num_patches", [1, 2, 7, 16])
@pytest.mark.parametrize("r", [0, 1, 3, 8])
def test_the_most_similar_pairs_of_the_two_halves_merge(num_prefix, num_patches, r):
    metric = torch.randn(2, num_prefix + num_patches, 6, dtype=torch.float64)
    r = num_merges(metric.shape[1], num_prefix, r)
    place = match(metric, num_prefix=num_prefix, r=r)
    for row in range(2):
        assert clusters_of(place[row]) == plainly(metric[row], num_prefix, r)
        assert sorted(set(place[row].tolist())) == list(range(metric.shape[1] - r))
    assert torch.equal(place[:, :num_prefix], torch.arange(num_prefix).expand(2, -1))


def test_the_new_order_is_prefix_then_sources_then_targets():
    metric = torch.eye(7, 8)
    metric[3] = metric[2]  # of patches 1..6 with one prefix token: source 4 is token 2, and so on
    metric[4] = metric[5]
    place = match(metric[None], num_prefix=1, r=1)  # sources 2, 4, 6; targets 1, 3, 5; tokens 2 and 3 are equal, so are 4 and 5
    assert place[0].tolist() == [0, 3, 4, 4, 1, 5, 2]


def test_at_most_half_of_the_patches_merge_and_one_patch_stays():
    assert [num_merges(tokens, 1, 100) for tokens in (1, 2, 3, 4, 197)] == [0, 0, 1, 1, 98]


def test_the_mean_is_weighted_by_size_and_comes_back_to_every_member():
    x, sizes = torch.tensor([[[0.0], [1.0], [4.0], [10.0]]]), torch.tensor([[1.0, 3.0, 1.0, 2.0]])
    place = torch.tensor([[0, 1, 1, 2]])
    merged, total = merge_tokens(x, sizes, place, 3)
    torch.testing.assert_close(merged[0, :, 0], torch.tensor([0.0, (3 * 1 + 4) / 4, 10.0]))
    assert total.tolist() == [[1, 4, 2]]
    assert torch.equal(unmerge_tokens(merged, place)[0, :, 0], merged[0, :, 0][place[0]])
    assert unmerge_tokens(x, None) is x


def test_hidden_tokens_merge_last_weigh_nothing_and_stand_last():
    torch.manual_seed(0)
    alone, r = torch.randn(1, 1 + 6, 5), 2
    padded = torch.cat([alone, alone[:, 1:5]], dim=1)  # paddings that resemble the patches most of all
    visible = torch.arange(11)[None] < 7
    place = match(padded, num_prefix=1, r=r, visible=visible)
    expected = match(alone, num_prefix=1, r=r)
    assert torch.equal(place[:, :7], expected)
    assert place[0, 7:].min() == 5
    x = torch.randn(1, 11, 3)
    merged, sizes = merge_tokens(x, visible.float(), place, 9)
    torch.testing.assert_close(merged[:, :5], merge_tokens(x[:, :7], torch.ones(1, 7), expected, 5)[0])
    assert sizes[0, 5:].tolist() == [0, 0, 0, 0]
    assert merged.isfinite().all()


def test_padding_is_spent_where_an_image_has_no_sources_left():
    visible = torch.arange(9)[None] < 4  # three patches: one source
    place = match(torch.randn(1, 9, 5), num_prefix=1, r=4, visible=visible)
    _, sizes = merge_tokens(torch.randn(1, 9, 3), visible.float(), place, 5)
    assert sizes[0, :3].sum() == 4  # prefix and two patches, of which one holds two
    assert sizes[0, 3:].tolist() == [0, 0]


def test_half_precision_is_compared_in_float32():
    metric = torch.ones(1, 5, 64, dtype=torch.bfloat16)
    metric[0, 1:] += torch.tensor([0, 1, 0, 1], dtype=torch.bfloat16)[:, None] / 128 * (torch.arange(64) % 2)
    metric[0, 4, :8] += 1 / 64  # source 4 is a little less like any target than source 2: in bfloat16 both cosines are 1
    assert match(metric, num_prefix=1, r=1)[0, 4] == 1  # so it stays


def test_gradients_flow_through_the_mean_in_double_precision():
    place, sizes = torch.tensor([[0, 1, 1, 2], [0, 1, 2, 2]]), torch.rand(2, 4, dtype=torch.float64) + 0.5
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: merge_tokens(x, sizes, place, 3)[0], x)


def alike(num_tokens=201):
    """Tokens that differ by some percent, as a deep model's do: in bfloat16 many of their cosines are the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 1, 64, generator=generator) + 0.05 * torch.randn(1, num_tokens, 64, generator=generator)


def test_pairs_are_the_same_under_autocast():
    expected = match(alike(), num_prefix=1, r=20)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(match(alike(), num_prefix=1, r=20), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mean_of_a_large_cluster_is_not_one_sided_in_half_precision(dtype):
    x = torch.rand(1, 99, 256).to(dtype)
    merged, _ = merge_tokens(x, torch.ones(1, 99), torch.zeros(1, 99, dtype=torch.int64), 1)
    assert (merged[0, 0].double() - x[0].double().mean(0)).mean().abs() < 2e-4
    assert merged.dtype == dtype


def test_hidden_tokens_count_nothing_beside_others_and_are_alike_among_themselves():
    x = torch.tensor([[[1.0], [5.0], [2.0], [4.0], [7.0]]])
    merged, total = merge_tokens(x, torch.tensor([[1.0, 0, 0, 0, 0]]), torch.tensor([[0, 0, 1, 1, 2]]), 3)
    assert merged[0, :, 0].tolist() == [1, 3, 7]
    assert total[0].tolist() == [1, 0, 0]
