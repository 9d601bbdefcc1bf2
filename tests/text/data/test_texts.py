import numpy as np
import pytest
import torch

from vit_prune.text.data.texts import Collate, Texts, eval_loader, train_loader

SETTINGS = {"batch_size": 4, "max_length": 20, "workers": 0, "device": torch.device("cpu")}


@pytest.fixture
def texts():
    """10 texts, text n of n + 1 tokens that are all n + 1."""
    return Texts([[number] * number for number in range(1, 11)], np.arange(10) % 2, ["a", "b"])


def test_a_batch_is_padded_on_the_right_to_a_multiple_of_8_and_no_more_than_the_model_takes(texts):
    ids, targets = Collate(20)([texts[1], texts[8]])
    assert ids.shape == (2, 16)
    assert ids.dtype == torch.int64
    assert ids[0].tolist() == [2, 2] + [0] * 14
    assert targets.tolist() == [1, 0]
    assert Collate(10)([texts[9]])[0].shape == (1, 10)


def test_the_evaluation_sees_every_text_once_in_order(texts):
    batches = list(eval_loader(texts, **SETTINGS))
    assert torch.cat([ids[:, 0] for ids, _ in batches]).tolist() == list(range(1, 11))


def test_the_order_of_training_is_a_function_of_seed_and_epoch(texts):
    def order(seed, epoch):
        loader = train_loader(texts, seed=seed, batches=1, **SETTINGS)
        loader.sampler.set_epoch(epoch)
        return torch.cat([ids[:, 0] for ids, _ in loader]).tolist()

    assert order(1, 0) == order(1, 0)
    assert len(set(order(1, 0))) == 8  # whole batches
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_loader_processes_give_the_same_batches(texts):
    one, two = (list(train_loader(texts, seed=1, batches=1, **SETTINGS | {"workers": workers})) for workers in (0, 2))
    assert all(torch.equal(first[0], second[0]) for first, second in zip(one, two, strict=True))


def test_fewer_texts_than_one_batch_are_refused(texts):
    with pytest.raises(ValueError, match="10 texts to train on are fewer than one batch of 16: lower --batch-size"):
        train_loader(texts, seed=1, batches=1, **SETTINGS | {"batch_size": 16})
