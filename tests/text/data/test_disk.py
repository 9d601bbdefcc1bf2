"""Hugging Face data sets on the disk, as save_to_disk and as the hub's parquet files have them."""

import pytest

from vit_prune.text.data.disk import read_folder

datasets = pytest.importorskip("datasets")
PAIR = ("premise", "hypothesis")


def snli(labels: list[int]):
    features = datasets.Features(
        {"premise": datasets.Value("string"), "hypothesis": datasets.Value("string"), "label": datasets.ClassLabel(names=["yes", "no"])}
    )
    values = {"premise": [f"p{number}" for number in range(len(labels))], "hypothesis": ["h"] * len(labels), "label": labels}
    return datasets.Dataset.from_dict(values, features=features)


@pytest.fixture
def saved(tmp_path):
    datasets.DatasetDict({"train": snli([0, 1, -1, 1]), "validation": snli([1, -1])}).save_to_disk(str(tmp_path / "set"))
    return tmp_path / "set"


@pytest.fixture
def parquet(tmp_path):
    folder = tmp_path / "hub" / "plain_text"
    folder.mkdir(parents=True)
    snli([0, 1]).to_parquet(str(folder / "train-00000-of-00002.parquet"))
    snli([-1, 1]).to_parquet(str(folder / "train-00001-of-00002.parquet"))
    snli([1, -1]).to_parquet(str(folder / "validation-00000-of-00001.parquet"))
    return tmp_path / "hub"


@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_pairs_with_class_names_and_without_the_rows_that_nobody_labelled(kind, request):
    folder = request.getfixturevalue(kind)
    train = read_folder(folder, "train", PAIR, "label", skip_label="-1")
    assert train.labels == ["yes", "no", "no"]
    assert train.skipped == 1
    assert all(second == "h" for _, second in train.parts)
    assert read_folder(folder, None, PAIR, "label", skip_label="-1").labels == ["no"]  # there is no test: the validation


def test_a_split_or_a_column_that_is_not_there_is_named_with_those_that_are(saved):
    with pytest.raises(ValueError, match=r"set has no split 'tset'; there are train, validation"):
        read_folder(saved, "tset", PAIR, "label")
    with pytest.raises(ValueError, match=r"set \(train\): unknown column 'premises'; did you mean premise\?"):
        read_folder(saved, "train", ("premises",), "label")


def test_one_split_alone_two_of_one_name_and_no_data_set_are_refused(tmp_path, parquet):
    snli([0, 1]).save_to_disk(str(tmp_path / "one"))
    with pytest.raises(ValueError, match="one holds one split alone: give the folder of a DatasetDict"):
        read_folder(tmp_path / "one", "train", PAIR, "label")
    (parquet / "other").mkdir()
    snli([0, 1]).to_parquet(str(parquet / "other" / "train.parquet"))
    with pytest.raises(ValueError, match=r"holds the split train more than once, in .*other, .*plain_text: give one of these folders"):
        read_folder(parquet, "train", PAIR, "label")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty is no folder of a DatasetDict"):
        read_folder(tmp_path / "empty", "train", PAIR, "label")
    with pytest.raises(FileNotFoundError, match=r"dataset_dir .*nowhere is no folder"):
        read_folder(tmp_path / "nowhere", "train", PAIR, "label")


def test_a_broken_parquet_file_is_named(parquet):
    path = parquet / "plain_text" / "train-00001-of-00002.parquet"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"train-00001-of-00002\.parquet cannot be read"):
        read_folder(parquet, "train", PAIR, "label")
