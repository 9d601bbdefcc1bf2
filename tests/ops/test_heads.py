"""The slices of the weights, against whole products of which the other heads are left out."""

import pytest
import torch

from vit_prune.ops.heads import group_by_count, merge_heads, project_heads, strongest

B, N, D, H, SIZE = 3, 5, 12, 4, 3
HEADS = torch.tensor([[2, 0], [3, 1], [0, 1]])


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(True) for shape in shapes]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("with_bias", [True, False])
def test_projecting_some_heads_is_the_whole_projection_of_which_they_are_taken(parts, with_bias):
    x, weight, bias = tensors((B, N, D), (parts, H, SIZE, D), (parts, H, SIZE))
    bias = bias if with_bias else None
    whole = torch.einsum("bnd,phsd->pbhns", x, weight) + (0 if bias is None else bias[:, None, :, None])
    expected = torch.stack([whole[:, image, HEADS[image]] for image in range(B)], dim=1)
    torch.testing.assert_close(torch.stack(project_heads(x, weight, bias, HEADS)), expected)
    assert torch.autograd.gradcheck(lambda *values: project_heads(*values, HEADS), (x, weight, bias))


@pytest.mark.parametrize("with_bias", [True, False])
def test_merging_some_heads_is_the_whole_projection_with_zeros_for_the_others(with_bias):
    x, weight, bias = tensors((B, N, 2 * SIZE), (D, H * SIZE), (D,))
    bias = bias if with_bias else None
    whole = torch.zeros(B, N, H, SIZE, dtype=torch.float64)
    for image in range(B):
        whole[image][:, HEADS[image]] = x[image].unflatten(-1, (2, SIZE)).detach()
    torch.testing.assert_close(merge_heads(x, weight, bias, HEADS, SIZE), torch.nn.functional.linear(whole.flatten(2), weight, bias))
    assert torch.autograd.gradcheck(lambda *values: merge_heads(*values, HEADS, SIZE), (x, weight, bias))


def test_an_empty_batch_stays_empty():
    none = torch.zeros(0, 2, dtype=torch.long)
    assert [part.shape for part in project_heads(torch.zeros(0, N, D), torch.zeros(2, H, SIZE, D), None, none)] == [(0, 2, N, SIZE)] * 2
    assert merge_heads(torch.zeros(0, N, 2 * SIZE), torch.zeros(D, H * SIZE), None, none, SIZE).shape == (0, N, D)


def test_the_strongest_come_first_and_ties_go_to_the_lower_head():
    assert strongest(torch.tensor([[0.2, 0.3, 0.3, 0.2]]), 3).tolist() == [[1, 2, 0]]
    assert strongest(torch.full((1, 4), 0.25), 2).tolist() == [[0, 1]]
    assert strongest(torch.tensor([[0.2, 0.35, 0.3, 0.15], [0.1, 0.2, 0.3, 0.4]]), 3).tolist() == [[1, 2, 0], [3, 2, 1]]


def test_images_with_equally_many_heads_are_one_group():
    relevance = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.4, 0.1], [0.3, 0.6, 0.1]])
    groups = group_by_count(relevance, [2, 1, 2])
    assert [(group.images.tolist(), group.heads.tolist()) for group in groups] == [([1], [[0]]), ([0, 2], [[2, 1], [1, 0]])]
    (alike,) = group_by_count(relevance, [1, 1, 1])
    assert alike.images is None
    assert alike.heads.tolist() == [[2], [0], [1]]
