"""Data sets that are arrays: what is read, and what is refused."""

import gzip

import numpy as np
import pytest

from vit_prune.train.data import create_dataset, digits, read_idx


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
