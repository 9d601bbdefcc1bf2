"""Noise as data, and the names of data sets."""

import numpy as np
import pytest
from torch.utils.data import DataLoader

from vit_prune.train.data import augmentation, check_dataset, check_same_classes, create_dataset


def pixels(dataset, index):
    return np.asarray(dataset[index][0])


def test_noise_depends_on_the_split_and_the_index_alone():
    sets = (("synthetic/24", "train"), ("synthetic/24", "train"), ("synthetic/99", "train"), ("synthetic/24", "val"))
    train, again, longer, val = (create_dataset(name, None, split) for name, split in sets)
    assert (len(train), train[23][1], train[0][0].mode, pixels(train, 0).shape) == (24, 3, "RGB", (256, 256, 3))
    np.testing.assert_array_equal(pixels(train, 5), pixels(again, 5))
    np.testing.assert_array_equal(pixels(train, 5), pixels(longer, 5))
    assert (pixels(train, 5) != pixels(train, 6)).mean() > 0.9
    assert (pixels(train, 5) != pixels(val, 5)).mean() > 0.9
    check_same_classes(train, val)


def test_it_ends_instead_of_going_on_for_ever():
    assert len(list(create_dataset("synthetic/12", None, "val"))) == 12


def test_its_transform_is_applied_in_the_workers():
    dataset = create_dataset("synthetic/4", None, "train")
    dataset.transform = np.asarray
    images, targets = next(iter(DataLoader(dataset, batch_size=4, num_workers=1)))
    assert (tuple(images.shape), targets.tolist()) == ((4, 256, 256, 3), [0, 1, 2, 3])


@pytest.mark.parametrize("name", ["synthetic", "synthetic/", "synthetic/0", "synthetic/-3", "synthetic/1.5", "synthetic/x", "synthetic/²"])
def test_anything_but_a_number_of_images_is_refused(name):
    with pytest.raises(ValueError, match=f"takes a number of images > 0, such as synthetic/24, got {name}$"):
        create_dataset(name, None, "train")


def test_a_folder_for_noise_is_refused_instead_of_ignored(tmp_path):
    with pytest.raises(ValueError, match="synthetic/3 makes its own images and takes no data_dir, got x"):
        create_dataset("synthetic/3", "x", "train")


@pytest.mark.parametrize("name", ["folder", "digits", "fashion-mnist", "synthetic/7", "hfds/a/b", "hfids/./x", "wds", "wds/x", "torch/cifar10"])
def test_every_kind_of_name_is_valid(name):
    check_dataset(name)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("digit", "unknown dataset 'digit'; did you mean digits"),
        ("torch/cifar", "unknown torchvision dataset 'cifar'; did you mean cifar10 or cifar100"),
        ("torch/sbu", "unknown torchvision dataset 'sbu'; there are cifar10, "),
        ("hfds/", "did you mean hfds/NAME"),
        ("hfds", "did you mean hfds/NAME"),
        ("coco", "there are folder, fashion-mnist, .*torch/NAME"),
        ("folder/x", "did you mean folder"),
    ],
)
def test_an_unknown_name_is_answered_with_valid_ones(name, hint):
    with pytest.raises(ValueError, match=hint):
        create_dataset(name, "x", "train")


def test_characters_are_never_mirrored_and_sets_without_an_entry_are_treated_as_folders():
    assert [augmentation(name).hflip for name in ("digits", "torch/mnist", "torch/fashion_mnist")] == [0, 0, 0.5]
    assert augmentation("hfds/x") == augmentation("synthetic/3") == augmentation("torch/cifar10") == augmentation("folder")
