"""The order of images and their random numbers."""

import random

import numpy as np
import torch

from vit_prune.train.draws import Augmented, Draw, EpochSampler, random_numbers


def drawn() -> tuple:
    return random.random(), np.random.rand(), torch.rand(()).item()


def sampler(epoch: int = 0, *, seed: int = 0, **kwargs) -> list[Draw]:
    made = EpochSampler(10, **{"batch_size": 4, "seed": seed, **kwargs})
    made.set_epoch(epoch)
    return list(made)


def test_an_order_is_the_same_again_and_another_in_another_epoch_or_with_another_seed():
    indices = [draw.index for draw in sampler()]
    assert indices == [draw.index for draw in sampler()]
    assert indices != [draw.index for draw in sampler(1)]
    assert indices != [draw.index for draw in sampler(seed=1)]
    assert len(set(indices)) == len(indices) == 8  # what does not fill a batch is left out


def test_an_epoch_is_made_of_whole_updates_so_that_accumulation_stands_for_processes():
    """10 images, 2 in a batch: two updates of 2 batches, one of 3, and of 7 batches, which there are not, what there is."""
    assert [len(sampler(batch_size=2, batches=batches)) for batches in (2, 3, 7)] == [8, 6, 10]


def test_repeated_images_are_other_draws_of_fewer_images_in_an_epoch_of_the_same_length():
    draws = sampler(repeats=3)
    assert len(draws) == 8
    assert [draw.repeat for draw in draws] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert len({draw.index for draw in draws}) == 3


def test_the_random_numbers_of_a_key_do_not_depend_on_what_was_drawn_before():
    with random_numbers(1, 2, 3):
        first = drawn()
    drawn()
    with random_numbers(1, 2, 3):
        assert drawn() == first
    with random_numbers(1, 2, 4):
        assert all(one != other for one, other in zip(drawn(), first, strict=True))


def test_the_main_process_goes_on_drawing_as_if_no_image_had_been_augmented():
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    expected = drawn()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    with random_numbers(1):
        drawn()
    assert drawn() == expected


def test_an_image_is_augmented_by_its_own_draw_and_anew_in_each_epoch_and_repeat():
    class Noise:
        def __getitem__(self, index):
            return index, drawn()

    images = Augmented(Noise(), seed=0)
    one = images[Draw(3, 0, 0)]
    assert one == images[Draw(3, 0, 0)]
    assert one[0] == 3
    others = [images[Draw(*key)] for key in ((3, 1, 0), (3, 0, 1), (4, 0, 0))]
    assert len({noise for _, noise in [one, *others]}) == 4
