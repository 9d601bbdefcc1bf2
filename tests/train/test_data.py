"""Data sets: what counts as a class and an image, and what is refused before the first batch."""

import gzip

import numpy as np
import pytest
import torch

from tests.train.helpers import write_image
from vit_prune.train.data import UnreadableImage, check_same_classes, create_dataset, digits, read_idx
from vit_prune.train.loaders import data_config, eval_loader, train_loader
from vit_prune.train.run import resolve

DATA = {"input_size": (3, 8, 8), "interpolation": "bicubic", "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0, "crop_mode": "center"}
CPU = torch.device("cpu")


def test_hidden_folders_and_stray_files_are_no_classes_and_no_images(image_folder):
    root = image_folder({"train/a": 2, "train/b": 1})
    for stray in ("train/notes.txt", "train/a/notes.txt", "train/Thumbs.db"):
        (root / stray).write_text("no image")
    for hidden in (".cache/a/0.png", "a/.ipynb_checkpoints/0.png", "a/._0.png"):
        write_image(root / "train" / hidden)
    dataset = create_dataset("folder", str(root), "train")
    assert dataset.classes == ["a", "b"]
    assert dataset.targets == [0, 0, 1]


def test_classes_are_numbered_as_timm_numbers_them_not_as_text(image_folder):
    dataset = create_dataset("folder", str(image_folder({"train/10": 1, "train/2": 1})), "train")
    assert dataset.class_to_idx == {"2": 0, "10": 1}


def test_images_in_subfolders_and_with_capital_endings_belong_to_their_class(image_folder):
    root = image_folder({"train/a": 1})
    write_image(root / "train/a/deep/er/x.png").rename(root / "train/a/deep/er/x.PNG")
    assert len(create_dataset("folder", str(root), "train")) == 2


@pytest.mark.parametrize("split_name", ["val", "validation"])
def test_the_validation_folder_may_have_either_name(image_folder, split_name):
    assert len(create_dataset("folder", str(image_folder({f"{split_name}/a": 3})), "val")) == 3


def test_a_class_without_images_is_named_instead_of_shifting_the_classes_after_it(image_folder):
    root = image_folder({"train/a": 1, "train/b": 0, "train/c": 1})
    (root / "train/b/notes.txt").write_text("no image")
    with pytest.raises(FileNotFoundError, match=r"no images in .*train/b; "):
        create_dataset("folder", str(root), "train")


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({}, r"data_dir .*data is no folder"),
        ({"val/a": 1}, r"no folder .*data/train$"),
        ({"train": 0}, r"data/train holds no class folders"),
        ({"train": 2}, r"data/train holds no class folders"),
    ],
    ids=["no folder", "no split", "empty", "images without classes"],
)
def test_missing_and_empty_folders_are_named(image_folder, counts, message):
    with pytest.raises(FileNotFoundError, match=message):
        create_dataset("folder", str(image_folder(counts)), "train")


def test_different_classes_in_training_and_validation_are_named(image_folder):
    root = image_folder({"train/a": 1, "train/b": 1, "val/a": 1, "val/c": 1})
    train, val = (create_dataset("folder", str(root), split) for split in ("train", "val"))
    with pytest.raises(ValueError, match="only in training b; only in validation c"):
        check_same_classes(train, val)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_truncated_image_is_named_instead_of_skipped(image_folder, workers):
    root = image_folder({"val/a": 2})
    broken = write_image(root / "val/a/broken.jpg")
    broken.write_bytes(broken.read_bytes()[:-200])
    dataset = create_dataset("folder", str(root), "val")
    loader = eval_loader(dataset, batch_size=2, workers=workers, data=DATA, device=CPU)
    with pytest.raises(UnreadableImage) as caught:
        list(loader)
    assert str(caught.value).startswith(f"cannot read the image {broken}: ")
    assert "Traceback" not in str(caught.value)


def test_text_with_the_name_of_an_image_is_named(image_folder):
    root = image_folder({"val/a": 1})
    (root / "val/a/1.png").write_text("no image")
    with pytest.raises(UnreadableImage, match=r"val/a/1\.png"):
        create_dataset("folder", str(root), "val")[1]


def test_a_set_smaller_than_one_batch_is_refused_instead_of_training_on_nothing(image_folder, tiny_config):
    dataset = create_dataset("folder", str(image_folder({"train/a": 7})), "train")
    with pytest.raises(ValueError, match="7 images to train on are fewer than one batch of 8"):
        train_loader(dataset, tiny_config(batch_size=8), DATA, CPU)


def test_evaluation_sees_every_image_once_and_in_order(image_folder):
    dataset = create_dataset("folder", str(image_folder({"val/a": 3, "val/b": 2})), "val")
    loader = eval_loader(dataset, batch_size=2, workers=0, data=DATA, device=CPU)
    assert torch.cat([targets for _, targets in loader]).tolist() == [0, 0, 0, 1, 1]
    assert next(iter(loader))[0].shape == (2, 3, 8, 8)


def write_fashion(folder, images, targets):
    for prefix in ("train", "t10k"):
        for kind, array in (("images-idx3", images), ("labels-idx1", targets)):
            header = bytes((0, 0, 8, array.ndim)) + b"".join(size.to_bytes(4, "big") for size in array.shape)
            (folder / f"{prefix}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))


def test_fashion_mnist_is_read_row_by_row_as_rgb(tmp_path):
    images = np.arange(3 * 28 * 28).astype(np.uint8).reshape(3, 28, 28)
    write_fashion(tmp_path, images, np.array([9, 0, 5], dtype=np.uint8))
    dataset = create_dataset("fashion-mnist", str(tmp_path), "val")
    image, target = dataset[1]
    assert (len(dataset), target, image.mode) == (3, 0, "RGB")
    np.testing.assert_array_equal(np.asarray(image)[..., 2], images[1])


def test_a_missing_idx_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte\.gz"):
        create_dataset("fashion-mnist", str(tmp_path), "train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(bytes((0, 0, 8, 1, 0, 0, 0, 4, 1, 2, 3))), "holds 3 bytes of data, its header says 4"),
        (gzip.compress(bytes((0, 0, 8, 1, 0, 0))), "holds -2 bytes of data"),
        (gzip.compress(bytes((0, 0, 13, 1, 0, 0, 0, 0))), "begins with 00000d01, expected 00000801"),
        (gzip.compress(bytes(100))[:-9], "is no whole gzip file"),
        (b"plain", "is no whole gzip file"),
    ],
    ids=["too short", "no header", "floats", "truncated", "not compressed"],
)
def test_a_broken_idx_file_is_named_with_what_is_wrong(tmp_path, content, message):
    (tmp_path / "x.gz").write_bytes(content)
    with pytest.raises(ValueError, match=rf"x\.gz {message}"):
        read_idx(tmp_path / "x.gz", ndim=1)


def test_digits_are_split_without_overlap_with_equal_shares_of_each_class():
    train, val = digits("train"), digits("val")
    assert (len(train), len(val)) == (1437, 360)
    shares = np.bincount(val.targets) / np.bincount(np.concatenate([train.targets, val.targets]))
    assert np.abs(shares - 0.2).max() < 0.01
    assert val.images.max() == 255
    assert not {image.tobytes() for image in train.images} & {image.tobytes() for image in val.images}


def test_a_folder_for_the_digits_is_refused_instead_of_ignored():
    with pytest.raises(ValueError, match="digits comes with scikit-learn and takes no data_dir, got x"):
        create_dataset("digits", "x", "train")


def test_a_run_without_augmentation_can_be_written_down_and_run_again(tiny_config):
    resolved = resolve(tiny_config(no_aug=True), digits("train"))
    assert (resolved.no_aug, resolved.hflip, resolved.scale) == (True, None, None)


def test_digits_are_never_mirrored_unless_the_user_says_so(tiny_config):
    assert resolve(tiny_config(dataset="digits"), digits("train")).hflip == 0
    assert resolve(tiny_config(dataset="digits", hflip=0.5), digits("train")).hflip == 0.5


def test_the_images_have_the_size_that_the_model_was_built_with_not_the_size_of_its_weights():
    import timm

    assert data_config(timm.create_model("vit_mini28_bias", img_size=16))["input_size"] == (3, 16, 16)
