"""Data sets that come through timm: Hugging Face, WebDataset, torchvision, from files written here; nothing is downloaded."""

import io
import json
import pickle
import sys
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_loader

from tests.train.helpers import write_image
from vit_prune.train.data import IGNORED, UnreadableImage, broken_count, check_same_classes, create_dataset

CPU = torch.device("cpu")

NAMES = ["cat", "dog", "owl"]


def png(value: int, *, wide: bool = False) -> bytes:
    """A plain gray image, 4 x 5, of 8 bits or of 16."""
    file = io.BytesIO()
    Image.fromarray(np.full((5, 4), value * 257 if wide else value, dtype=np.uint16 if wide else np.uint8)).save(file, "PNG")
    return file.getvalue()


def values(dataset) -> list[tuple]:
    """(gray value, class) of every image, in the order in which they come."""
    return [(image.getpixel((0, 0))[0], target) for image, target in dataset]


# Hugging Face


@pytest.fixture(scope="module")
def datasets():
    return pytest.importorskip("datasets")


@pytest.fixture
def parquet(datasets, tmp_path):
    """A function that writes the splits as parquet files and a dataset card, and returns the folder; an image is a gray value or bytes."""
    import huggingface_hub

    def write(splits: dict[str, list], *, image="image", label="label", label_type=None, card=True, files=1):
        features = datasets.Features({image: datasets.Image(), label: label_type or datasets.ClassLabel(names=NAMES)})
        root = tmp_path / "parquet"
        for split, rows in splits.items():
            contents = [row if row is None or isinstance(row, bytes) else png(row, wide=row % 2 == 1) for row in rows]
            table = {image: [None if row is None else {"bytes": row, "path": None} for row in contents], label: [index % 3 for index in range(len(rows))]}
            whole = datasets.Dataset.from_dict(table, features=features)
            parts = min(files, len(rows))
            for number in range(parts):
                whole.shard(parts, number).to_parquet(root / f"data/{split}-{number:05d}-of-{parts:05d}.parquet")
        if card:
            sizes = {split: {"name": split, "num_examples": len(rows)} for split, rows in splits.items()}
            info = datasets.DatasetInfo(features=features, splits=sizes)
            card_data = huggingface_hub.DatasetCardData()
            datasets.info.DatasetInfosDict({"default": info}).to_dataset_card_data(card_data)
            (root / "README.md").write_text(f"---\n{card_data}\n---\n")
        return root

    return write


@pytest.mark.parametrize("found", ["validation", "val", "test"])
def test_hfds_reads_train_and_what_the_validation_split_is_called(parquet, tmp_path, found):
    name = f"hfds/{parquet({'train': [10, 20, 31, 40], found: [50, 61]})}"
    train, val = (create_dataset(name, str(tmp_path), split) for split in ("train", "val"))
    check_same_classes(train, val)
    assert (train.classes, len(train)) == (NAMES, 4)
    assert values(train) == [(10, 0), (20, 1), (31, 2), (40, 0)]  # 31 is of 16 bits
    assert values(val) == [(50, 0), (61, 1)]


def test_hfds_prefers_validation_to_test(parquet, tmp_path):
    name = f"hfds/{parquet({'test': [1], 'train': [2], 'validation': [3]})}"
    assert values(create_dataset(name, str(tmp_path), "val")) == [(3, 0)]


def test_hfds_finds_columns_of_other_names_by_their_types(parquet, tmp_path):
    name = f"hfds/{parquet({'train': [10, 20]}, image='img', label='fine_label', card=False)}"
    assert values(create_dataset(name, str(tmp_path), "train")) == [(10, 0), (20, 1)]


def test_hfds_reads_a_folder_of_images(datasets, image_folder, tmp_path):
    root = image_folder({"train/a": 2, "train/b": 1, "val/a": 1, "val/b": 1})
    train, val = (create_dataset(f"hfds/{root}", str(tmp_path), split) for split in ("train", "val"))
    check_same_classes(train, val)
    assert (len(train), len(val), train[0][0].size) == (3, 2, (10, 12))


@pytest.mark.parametrize("kind", ["hfds", "hfids"])
def test_a_set_without_class_names_is_refused_with_what_to_do(datasets, parquet, tmp_path, kind):
    name = f"{kind}/{parquet({'train': [10]}, label_type=datasets.Value('int64'))}"
    with pytest.raises(ValueError, match=r"0 columns of the type ClassLabel .*its columns are image, label\. .*num_classes is not known: cast_column"):
        create_dataset(name, str(tmp_path), "train")


def test_a_missing_split_is_named_with_those_that_are_there(parquet, tmp_path):
    with pytest.raises(ValueError, match=r"has no split validation or val or test; it has train$"):
        create_dataset(f"hfds/{parquet({'train': [10]})}", str(tmp_path), "val")


def test_hfds_downloads_nothing_and_does_not_wait_for_the_hub(datasets, tmp_path):
    with pytest.raises(ValueError, match=r"cannot open hfds/no/such, expected a folder or a data set of the hub that is on this machine"):
        create_dataset("hfds/no/such", str(tmp_path), "train")
    assert not datasets.config.HF_HUB_OFFLINE


@pytest.mark.parametrize("content", [b"no image", png(10)[:-20], None], ids=["text", "truncated", "null"])
@pytest.mark.parametrize("kind", ["hfds", "hfids"])
def test_a_broken_image_of_hugging_face_is_named_instead_of_skipped(parquet, tmp_path, kind, content):
    name = f"{kind}/{parquet({'train': [10, 20], 'validation': [10, content, 30]})}"
    with pytest.raises(UnreadableImage, match=rf"cannot read (the )?image .*1 .*of {name}: "):
        values(create_dataset(name, str(tmp_path), "val"))


def test_hfds_skips_broken_images_where_asked(parquet, tmp_path):
    name = f"hfds/{parquet({'train': [10, b'no image', 30], 'validation': [10, None, 30]})}"
    train, val = (create_dataset(name, str(tmp_path), split, skip_broken=True) for split in ("train", "val"))
    assert values(train) == [(10, 0), (30, 2), (30, 2)]
    assert values(val) == [(10, 0), (0, IGNORED), (30, 2)]
    assert (broken_count(train, CPU), broken_count(val, CPU)) == (1, 1)


def test_hfids_gives_every_image_once_over_two_workers(parquet, tmp_path):
    name = f"hfids/{parquet({'train': [10], 'validation': [10, 20, 31, 40, 50]}, files=2)}"
    dataset = create_dataset(name, str(tmp_path), "val", batch_size=2)
    loader = create_loader(dataset, (3, 8, 8), 2, num_workers=2, use_prefetcher=False)
    assert (len(dataset), dataset.classes) == (5, NAMES)
    assert sorted(torch.cat([targets for _, targets in loader]).tolist()) == [0, 0, 1, 1, 2]


def test_hfids_shuffles_by_epoch_and_converts_as_all_sets_do(parquet, tmp_path):
    dataset = create_dataset(f"hfids/{parquet({'train': list(range(1, 17))})}", str(tmp_path), "train", batch_size=8)
    orders = []
    for epoch in (0, 1, 0):
        dataset.set_epoch(epoch)
        orders.append([value for value, _ in values(dataset)])
    assert sorted(orders[0]) == list(range(1, 17))
    assert orders[0] == orders[2] != orders[1]


def test_hfids_without_a_number_of_images_is_refused_with_what_to_do(parquet, tmp_path):
    with pytest.raises(ValueError, match=r"does not say in dataset_info of its README\.md which columns and how many images it has: use hfds/"):
        create_dataset(f"hfids/{parquet({'train': [10]}, card=False)}", str(tmp_path), "train")


# WebDataset


@pytest.fixture
def write_shards(tmp_path):
    """A function that writes shards of (gray value or bytes, class) and _info.json, whose keys can be overridden, and returns the folder."""
    pytest.importorskip("webdataset")

    def write(shards: list[list], *, split="validation", **overrides):
        root = tmp_path / "wds"
        root.mkdir(exist_ok=True)
        for number, rows in enumerate(shards):
            with tarfile.open(root / f"x-{split}-{number}.tar", "w") as tar:
                for row, (image, target) in enumerate(rows):
                    add(tar, f"{number}_{row}.png", image if isinstance(image, bytes) else png(image, wide=image % 2 == 1))
                    add(tar, f"{number}_{row}.cls", str(target).encode())
        lengths = [len(rows) for rows in shards]
        entry = {"name": split, "filenames": [f"x-{split}-{number}.tar" for number in range(len(shards))], "shard_lengths": lengths}
        info = {"name": "x", "class_names": NAMES, "splits": {split: entry | {"num_samples": sum(lengths)}}} | overrides
        (root / "_info.json").write_text(json.dumps({key: value for key, value in info.items() if value is not None}))
        return root

    return write


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


SHARDS = [[(10, 0), (20, 1)], [(31, 2), (40, 0), (50, 1)]]


def test_wds_gives_every_image_once_and_in_order(write_shards):
    dataset = create_dataset("wds/x", str(write_shards(SHARDS)), "val")
    assert (len(dataset), dataset.classes, dataset.class_to_idx["owl"]) == (5, NAMES, 2)
    assert values(dataset) == values(dataset) == [(10, 0), (20, 1), (31, 2), (40, 0), (50, 1)]


@pytest.mark.parametrize("rows", [SHARDS, [SHARDS[0] + SHARDS[1]]], ids=["two shards", "one shard"])
def test_wds_gives_every_image_once_over_workers(write_shards, rows):
    dataset = create_dataset("wds", str(write_shards(rows)), "val")
    loader = create_loader(dataset, (3, 8, 8), 2, num_workers=2, use_prefetcher=False)
    assert sorted(torch.cat([targets for _, targets in loader]).tolist()) == [0, 0, 1, 1, 2]


def test_wds_trains_on_whole_batches(write_shards):
    dataset = create_dataset("wds/x", str(write_shards(SHARDS, split="train")), "train", batch_size=4)
    dataset.set_epoch(1)
    assert len(dataset) == len(values(dataset)) == 8  # 5 images, rounded up to 2 batches of 4
    assert set(values(dataset)) <= {row for rows in SHARDS for row in rows}


@pytest.mark.parametrize("content", [b"no image", png(10)[:-20]])
def test_a_broken_image_of_a_shard_is_named_instead_of_left_out(write_shards, content):
    dataset = create_dataset("wds/x", str(write_shards([[(10, 0), (content, 1)]])), "val")
    with pytest.raises(UnreadableImage, match=r"cannot read the image 0_1 of .*x-validation-0\.tar: "):
        values(dataset)


@pytest.mark.parametrize("size", [700, 1500])
def test_a_truncated_shard_is_named_instead_of_left_out(write_shards, size):
    shard = write_shards(SHARDS) / "x-validation-1.tar"
    shard.write_bytes(shard.read_bytes()[:size])
    with pytest.raises(UnreadableImage, match=r"x-validation-1\.tar"):
        values(create_dataset("wds/x", str(shard.parent), "val"))


def test_a_class_beyond_the_class_names_is_refused_before_it_reaches_the_loss(write_shards):
    with pytest.raises(ValueError, match="an image of the class 3, and has the classes 0 to 2"):
        values(create_dataset("wds/x", str(write_shards([[(10, 3)]])), "val"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"class_names": None}, r'num_classes is not known: add "class_names" to .*_info\.json'),
        ({"class_names": ["a", "a"]}, r"a list of different names"),
        ({"splits": {}}, "has no split validation or val or test; it has none"),
        ({"splits": {"val": {"name": "val"}}}, r"_info\.json: the split val lacks filenames, shard_lengths, num_samples"),
    ],
)
def test_what_the_info_file_lacks_is_named(write_shards, overrides, message):
    with pytest.raises(ValueError, match=message):
        create_dataset("wds/x", str(write_shards(SHARDS, **overrides)), "val")


def test_missing_shards_and_info_files_are_named(write_shards):
    root = write_shards(SHARDS)
    (root / "x-validation-1.tar").unlink()
    with pytest.raises(FileNotFoundError, match=r"names shards that are not there: .*x-validation-1\.tar"):
        create_dataset("wds/x", str(root), "val")
    (root / "_info.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no file .*_info\.json, which gives the shards"):
        create_dataset("wds/x", str(root), "val")


@pytest.mark.parametrize("name", ["wds/x", "hfids/x"])
def test_skipping_in_a_stream_is_refused_instead_of_ignored(name):
    with pytest.raises(ValueError, match=f"skip_broken needs a set with numbered images, and {name} is read as a stream"):
        create_dataset(name, None, "train", skip_broken=True)


@pytest.mark.parametrize(("name", "package"), [("hfds/x", "datasets"), ("hfids/x", "datasets"), ("wds/x", "webdataset")])
def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, tmp_path, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"the data set {name} needs the package {package}: pip install 'vit_prune\[data\]'"):
        create_dataset(name, str(tmp_path), "train")


# torchvision


def write_cifar10(root):
    """The files of CIFAR-10 with one image per file, the first byte of its pixels being its number."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    for number, file in enumerate([*(f"data_batch_{batch}" for batch in range(1, 6)), "test_batch"]):
        (folder / file).write_bytes(pickle.dumps({"data": np.full((1, 3072), number, dtype=np.uint8), "labels": [number]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class {number}" for number in range(10)]}))


def test_a_torchvision_set_is_read_with_its_class_names(tmp_path, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    write_cifar10(tmp_path)
    train, val = (create_dataset("torch/cifar10", str(tmp_path), split) for split in ("train", "val"))
    check_same_classes(train, val)
    assert train.classes[3] == "class 3"
    assert (len(train), len(val), values(val)) == (5, 1, [(5, 5)])


def test_a_gray_set_of_torchvision_becomes_rgb(tmp_path):
    raw = tmp_path / "MNIST/raw"
    raw.mkdir(parents=True)
    for prefix in ("train", "t10k"):
        for kind, array in (("images-idx3", np.full((2, 28, 28), 7, np.uint8)), ("labels-idx1", np.array([4, 9], np.uint8))):
            header = bytes((0, 0, 8, array.ndim)) + b"".join(size.to_bytes(4, "big") for size in array.shape)
            (raw / f"{prefix}-{kind}-ubyte").write_bytes(header + array.tobytes())
    dataset = create_dataset("torch/mnist", str(tmp_path), "val")
    assert (dataset[0][0].mode, dataset.classes[4], values(dataset)) == ("RGB", "4 - four", [(7, 4), (7, 9)])


def test_a_folder_through_torchvision_is_converted_and_skips_as_a_folder_does(image_folder):
    root = image_folder({"train/a": 2, "val/a": 2})
    (root / "val/a/0.png").write_bytes(png(99, wide=True))
    (root / "val/a/1.png").write_bytes(b"no image")
    dataset = create_dataset("torch/image_folder", str(root), "val", skip_broken=True)
    assert values(dataset) == [(99, 0), (0, IGNORED)]
    assert broken_count(dataset, CPU) == 1
    with pytest.raises(UnreadableImage, match=r"val/a/1\.png"):
        create_dataset("torch/image_folder", str(root), "val")[1]


def test_a_folder_without_the_split_is_refused_instead_of_read_as_the_split(image_folder):
    with pytest.raises(FileNotFoundError, match=r"no folder .*data/val or .*data/validation$"):
        create_dataset("torch/image_folder", str(image_folder({"train/a": 1})), "val")


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "kmnist", "qmnist", "fashion_mnist", "places365", "inaturalist", "imagenet"])
def test_nothing_is_downloaded_for_a_torchvision_set_that_is_not_there(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=rf"cannot open torch/{name} in .*, and nothing is downloaded: ") as caught:
        create_dataset(f"torch/{name}", str(tmp_path), "val")
    assert "download=True" not in str(caught.value)


def test_classes_of_imagenet_that_share_a_name_stay_two_classes(tmp_path):
    """torchvision's folders after it has unpacked the archives: WordNet ids, and both kinds of crane."""
    names = {"n02012849": ("crane",), "n03126707": ("crane",)}
    torch.save((names, []), tmp_path / "meta.bin")
    for wnid in names:
        write_image(tmp_path / "val" / wnid / "0.png")
    dataset = create_dataset("torch/imagenet", str(tmp_path), "val")
    assert dataset.class_to_idx == {"n02012849": 0, "n03126707": 1}
    assert [target for _, target in (dataset[0], dataset[1])] == [0, 1]
