import torch

from vit_prune.ops import noise


def test_uniform_is_uniform_and_inside_the_open_interval():
    u = noise.uniform(torch.arange(400), 250)
    assert u.min() > 0
    assert u.max() < 1
    counts = torch.histc(u, 20, 0, 1)
    assert ((counts - 5000).abs() < 5 * 5000**0.5).all()


def test_neighbouring_keys_and_positions_are_unrelated():
    u = noise.uniform(torch.arange(300), 300) - 0.5
    assert torch.corrcoef(torch.stack([u[:, :-1].flatten(), u[:, 1:].flatten()]))[0, 1].abs() < 0.02
    assert torch.corrcoef(torch.stack([u[:-1].flatten(), u[1:].flatten()]))[0, 1].abs() < 0.02


def test_equal_keys_draw_equal_numbers_and_the_global_generator_is_left_alone():
    state = torch.get_rng_state()
    first, second = noise.gumbel(torch.tensor([3, 3, 4]), 10)[:2]
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)


def test_gumbel_top_k_draws_by_probability():
    p = torch.tensor([0.5, 0.3, 0.2])
    winners = (p.log() + noise.gumbel(torch.arange(20_000), 3)).argmax(-1)
    frequency = torch.bincount(winners, minlength=3) / 20_000
    torch.testing.assert_close(frequency, p, rtol=0, atol=0.015)


def test_blocks_and_seeds_draw_different_numbers():
    keys = {noise.block_key(seed, block) for seed in range(20) for block in range(48)}
    assert len(keys) == 20 * 48
