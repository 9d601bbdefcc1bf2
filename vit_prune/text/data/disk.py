"""Hugging Face data sets on this machine, through the package datasets: a folder of save_to_disk, or one of parquet files. Nothing is downloaded."""

import re
from pathlib import Path
from types import ModuleType

from vit_prune.text.data.rows import Rows, check_columns
from vit_prune.train.checks import few
from vit_prune.train.data.library import need_package

TEST = ("test", "validation")  # the first that is there
PARQUET = re.compile(r"(?P<split>.+?)(-\d+-of-\d+.*)?\.parquet")  # train.parquet, train-00000-of-00004.parquet


def read_folder(path: str | Path, split: str | None, text_columns: tuple[str, ...], label_column: str, *, skip_label: str | None = None) -> Rows:
    """The rows of one split; a label column of class names gives the names.

    Args: split: None is "test", or "validation" where there is none. Others: as `read_file`.
    Raises: FileNotFoundError; ValueError that names the folder, the split or the column.
    """
    root = Path(path)
    if not root.is_dir():
        raise FileNotFoundError(f"dataset_dir {path} is no folder")
    datasets = need_package(str(path), "datasets")
    splits = open_splits(root, datasets)
    split = split or next((name for name in TEST if name in splits), TEST[0])
    if split not in splits:
        raise ValueError(f"{path} has no split {split!r}; there are {few(splits)}")
    table = splits[split] if not isinstance(splits[split], list) else from_parquet(splits[split], datasets)
    source = f"{path} ({split})"
    check_columns(source, (*text_columns, label_column), table.column_names)
    return rows_of(source, table, text_columns, label_column, skip_label, datasets)


def open_splits(root: Path, datasets: ModuleType) -> dict[str, object]:
    """{split: a Dataset, or the parquet files that hold it}. Raises: ValueError for a folder of anything else."""
    if (root / "dataset_dict.json").is_file():
        return dict(datasets.load_from_disk(str(root)))
    if (root / "state.json").is_file():
        raise ValueError(f"{root} holds one split alone: give the folder of a DatasetDict, with train and test")
    splits: dict[str, list[Path]] = {}
    for file in sorted(root.rglob("*.parquet")):
        splits.setdefault(PARQUET.fullmatch(file.name)["split"], []).append(file)
    if not splits:
        raise ValueError(f"{root} is no folder of a DatasetDict (dataset_dict.json) and holds no parquet files")
    for split, files in splits.items():
        if len(folders := {str(file.parent) for file in files}) > 1:
            raise ValueError(f"{root} holds the split {split} more than once, in {few(sorted(folders))}: give one of these folders")
    return splits


def from_parquet(files: list[Path], datasets: ModuleType) -> object:
    """A Dataset with the class names that the files hold, without the copy that load_dataset leaves in its cache. Raises: ValueError for a broken file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts = []
    for file in files:
        try:
            parts.append(datasets.Dataset(pq.read_table(file)))
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{file} cannot be read: {error}") from None
    return datasets.concatenate_datasets(parts)


def rows_of(source: str, table: object, text_columns: tuple[str, ...], label_column: str, skip_label: str | None, datasets: ModuleType) -> Rows:
    names = table.features[label_column]
    named = isinstance(names, datasets.ClassLabel)
    rows = Rows(source)
    values = table[:]
    columns = [values[name] for name in (*text_columns, label_column)]
    for number, (*parts, label) in enumerate(zip(*columns, strict=True), 1):
        if named and isinstance(label, int) and 0 <= label < names.num_classes:
            label = names.int2str(label)
        rows.add(f"{source} row {number}", tuple(parts), label, skip_label)
    if not rows.labels:
        raise ValueError(f"{source} holds no rows with labels")
    return rows
