"""What counts as a class and an image in a folder, class lists, and broken images."""

import logging

import pytest
import torch
from torch.utils.data import DataLoader

from tests.train.helpers import write_image
from vit_prune.train.data import IGNORED, UnreadableImage, broken, broken_count, check_same_classes, create_dataset, reset_broken

CPU = torch.device("cpu")


def open_folder(root, split="train", **options):
    return create_dataset("folder", str(root), split, **options)


def to_pixels(image):
    return torch.tensor(image.resize((2, 2)).getpixel((0, 0)))


def test_field_report_18_an_empty_class_is_named_and_caches_and_stray_files_are_no_classes(image_folder):
    root = image_folder({"train/a": 1, "train/b": 0, "train/c": 1, "val/a": 1, "val/d": 1})
    write_image(root / "train/.cache/0.png")
    (root / "train/notes.txt").write_text("no image")
    with pytest.raises(FileNotFoundError, match=r"no images in [^,]*train/b; "):
        open_folder(root)
    (root / "train/b").rmdir()
    train, val = open_folder(root), open_folder(root, "val")
    assert train.classes == ["a", "c"]
    with pytest.raises(ValueError, match="only in training c; only in validation d"):
        check_same_classes(train, val)


def test_hidden_folders_and_stray_files_are_no_classes_and_no_images(image_folder):
    root = image_folder({"train/a": 2, "train/b": 1})
    for stray in ("train/notes.txt", "train/a/notes.txt", "train/Thumbs.db"):
        (root / stray).write_text("no image")
    for hidden in (".cache/a/0.png", "a/.ipynb_checkpoints/0.png", "a/._0.png"):
        write_image(root / "train" / hidden)
    dataset = open_folder(root)
    assert dataset.classes == ["a", "b"]
    assert dataset.targets == [0, 0, 1]


def test_classes_are_numbered_as_timm_numbers_them_not_as_text(image_folder):
    assert open_folder(image_folder({"train/10": 1, "train/2": 1})).class_to_idx == {"2": 0, "10": 1}


def test_images_in_subfolders_and_with_capital_endings_belong_to_their_class(image_folder):
    root = image_folder({"train/a": 1})
    write_image(root / "train/a/deep/er/x.png").rename(root / "train/a/deep/er/x.PNG")
    assert len(open_folder(root)) == 2


@pytest.mark.parametrize("split_name", ["val", "validation"])
def test_the_validation_folder_may_have_either_name(image_folder, split_name):
    assert len(open_folder(image_folder({f"{split_name}/a": 3}), "val")) == 3


def test_a_class_without_images_is_named_instead_of_shifting_the_classes_after_it(image_folder):
    root = image_folder({"train/a": 1, "train/b": 0, "train/c": 1})
    (root / "train/b/notes.txt").write_text("no image")
    with pytest.raises(FileNotFoundError, match=r"no images in .*train/b; "):
        open_folder(root)


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
        open_folder(image_folder(counts))


def test_different_classes_in_training_and_validation_are_named(image_folder):
    root = image_folder({"train/a": 1, "train/b": 1, "val/a": 1, "val/c": 1})
    with pytest.raises(ValueError, match="only in training b; only in validation c"):
        check_same_classes(open_folder(root), open_folder(root, "val"))


def test_the_same_classes_with_other_numbers_are_refused_with_the_numbers(image_folder, tmp_path):
    root = image_folder({"train/a": 1, "train/b": 1, "val/a": 1, "val/b": 1})
    (tmp_path / "list.txt").write_text("b\na\n")
    with pytest.raises(ValueError, match=r"different numbers: a \(0 and 1\), b \(1 and 0\)"):
        check_same_classes(open_folder(root), open_folder(root, "val", class_map=str(tmp_path / "list.txt")))


def test_a_class_list_picks_classes_and_numbers_them_by_line_as_timm_does(image_folder, tmp_path):
    from timm.data import create_dataset as timm_dataset

    root = image_folder({"train/a": 1, "train/b": 0, "train/c": 2, "train/d": 1})  # b is empty, and no class of the list
    (tmp_path / "list.txt").write_text("d\nc\n")
    dataset = open_folder(root, class_map=str(tmp_path / "list.txt"))
    assert (dataset.classes, dataset.class_to_idx) == (["d", "c"], {"d": 0, "c": 1})
    reader = timm_dataset("", root=str(root), split="train", class_map=str(tmp_path / "list.txt")).reader
    assert sorted(dataset.samples) == sorted(reader.samples)


def test_blank_lines_and_spaces_in_a_class_list_number_nothing(image_folder, tmp_path):
    (tmp_path / "list.txt").write_bytes(b"\xef\xbb\xbf\r\n  b \r\n\r\na\r\n\r\n")
    assert open_folder(image_folder({"train/a": 1, "train/b": 1}), class_map=str(tmp_path / "list.txt")).class_to_idx == {"b": 0, "a": 1}


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, FileNotFoundError, r"no class list .*list\.txt"),
        (b" \n\n", ValueError, r"list\.txt is empty, expected one class name per line"),
        (b"a\nb\na\n", ValueError, r"list\.txt names twice: a$"),
        (b"\xff\xfea", ValueError, r"list\.txt is no text in UTF-8"),
        (b"a\nz\n", FileNotFoundError, r"list\.txt names classes without a folder in .*train: z$"),
        (b"a\n../val\n", FileNotFoundError, r"names classes without a folder in .*: \.\./val$"),
        (b"a\nempty\n", FileNotFoundError, r"no images in .*train/empty; "),
    ],
    ids=["missing", "empty", "twice", "no text", "no such class", "outside", "without images"],
)
def test_a_wrong_class_list_is_named_with_what_is_wrong(image_folder, tmp_path, content, error, message):
    if content is not None:
        (tmp_path / "list.txt").write_bytes(content)
    with pytest.raises(error, match=message):
        open_folder(image_folder({"train/a": 1, "train/empty": 0, "val/a": 1}), class_map=str(tmp_path / "list.txt"))


def test_a_class_list_for_a_set_with_classes_of_its_own_is_refused_instead_of_ignored():
    with pytest.raises(ValueError, match="class_map picks the classes of a folder; the data set digits has classes of its own"):
        create_dataset("digits", None, "train", class_map="list.txt")


def test_text_with_the_name_of_an_image_is_named(image_folder):
    root = image_folder({"val/a": 1})
    (root / "val/a/1.png").write_text("no image")
    with pytest.raises(UnreadableImage, match=r"val/a/1\.png"):
        open_folder(root, "val")[1]


@pytest.fixture
def partly_broken(image_folder):
    """Images 1 and 2 of 5 are broken, in both splits."""
    root = image_folder({"train/a": 3, "train/b": 2, "val/a": 3, "val/b": 2})
    for split in ("train", "val"):
        for number in (1, 2):
            (root / f"{split}/a/{number}.png").write_bytes(b"no image")
    return root


def test_without_skip_broken_the_count_is_0(partly_broken):
    dataset = open_folder(partly_broken)
    reset_broken(dataset)
    assert broken_count(dataset, CPU) == broken_count(create_dataset("synthetic/2", None, "val", skip_broken=True), CPU) == 0


def test_in_training_the_next_readable_image_and_its_class_take_the_place(partly_broken):
    dataset = open_folder(partly_broken, skip_broken=True)
    assert [dataset[index][1] for index in range(5)] == [0, 1, 1, 1, 1]
    assert dataset[1][0].tobytes() == dataset[3][0].tobytes()


def test_the_search_goes_round_from_the_last_image_to_the_first(partly_broken):
    for number in (0, 1):
        (partly_broken / f"train/b/{number}.png").write_bytes(b"no image")
    assert open_folder(partly_broken, skip_broken=True)[4][1] == 0


def test_in_evaluation_a_broken_image_is_ignored_instead_of_counted_as_another(partly_broken):
    dataset = open_folder(partly_broken, "val", skip_broken=True)
    assert [dataset[index][1] for index in range(5)] == [0, IGNORED, IGNORED, 1, 1]
    assert dataset[1][0].getextrema() == ((0, 0),) * 3


def test_each_broken_file_is_named_and_counted_once_over_all_epochs(partly_broken, caplog):
    dataset = open_folder(partly_broken, skip_broken=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            _ = [dataset[index] for index in range(5)]
            assert broken_count(dataset, CPU) == 2
            reset_broken(dataset)
            assert broken_count(dataset, CPU) == 0
    assert len(caplog.messages) == 2
    assert all("cannot read the image" in message and f"a/{number}.png" in message for number, message in enumerate(caplog.messages, 1))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_what_the_workers_meet_is_counted_in_the_main_process(partly_broken, method):
    dataset = open_folder(partly_broken, "val", skip_broken=True)
    dataset.transform = to_pixels
    targets = [target for _, target in DataLoader(dataset, batch_size=None, num_workers=1 if method == "spawn" else 2, multiprocessing_context=method)]
    assert [int(target) for target in targets] == [0, -1, -1, 1, 1]
    assert broken_count(dataset, CPU) == 2


def test_a_set_with_nothing_readable_stops_instead_of_searching_for_ever(image_folder, monkeypatch):
    root = image_folder({"train/a": 5})
    for path in (root / "train/a").iterdir():
        path.write_bytes(b"no image")
    with pytest.raises(UnreadableImage, match=r"5 images in a row, the last being this one: cannot read the image .*/1\.png"):
        open_folder(root, skip_broken=True)[2]
    monkeypatch.setattr(broken, "MAX_IN_A_ROW", 3)
    with pytest.raises(UnreadableImage, match=r"3 images in a row.*/4\.png"):
        open_folder(root, skip_broken=True)[2]


def test_without_shared_memory_one_process_counts_and_a_worker_says_what_to_do(partly_broken, monkeypatch):
    def refuse(*_):
        raise OSError("no space left")

    monkeypatch.setattr(broken, "RawArray", refuse)
    dataset = open_folder(partly_broken, "val", skip_broken=True)
    dataset.transform = to_pixels
    assert dataset[1][1] == IGNORED
    assert broken_count(dataset, CPU) == 1
    loader = iter(DataLoader(dataset, batch_size=None, sampler=[1], num_workers=1))
    with pytest.raises(OSError, match="use --workers 0, or leave out skip_broken"):
        next(loader)
    loader._shutdown_workers()
