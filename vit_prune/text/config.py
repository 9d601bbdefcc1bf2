"""What `tools/train_text.py` takes: one dataclass, its values checked at birth. What it shares with TrainConfig comes from RunConfig."""

from dataclasses import dataclass
from typing import ClassVar

from vit_prune.text.data.files import kind_of
from vit_prune.train.run_config import RunConfig


@dataclass(frozen=True)
class TextConfig(RunConfig):
    """Train a text encoder, with pruning or without.

    Args:
        model: text_mini, text_4l8h, text_4l12h, text_6l12h, text_12l12h, each with _budget, the first two with _bias; or a folder of vp.save, to train on
        initial_checkpoint: start from this file of weights
        model_kwargs: other arguments of the model, e.g. depth=2 embed_dim=64
        drop: dropout before the head
        pos_drop: dropout of the embeddings
        proj_drop: dropout after attention and in the MLPs
        attn_drop: dropout of the attention weights
        keep: columns kept in training, as in tools/train.py (None: all); of the models with _bias or _budget
        train_file: texts to train on: FILE.csv or FILE.jsonl, with .gz or without
        test_file: texts to evaluate on
        dataset_dir: in the place of the two files, a Hugging Face data set on this machine: a folder of save_to_disk, or of parquet files
        train_split: of dataset_dir
        test_split: of dataset_dir (None: test, or validation where there is none)
        text_columns: one column, or two whose texts are joined by [SEP]; numbers, from 1, for a CSV without a header
        label_column: the class, a name or a whole number
        skip_label: texts with this label are left out and counted (SNLI's -1: the annotators disagree)
        fraction: share of the training texts of each class, drawn by seed
        tokenizer: wordpiece or bpe, trained on the training texts, or a tokenizer.json
        vocab_size: entries of a tokenizer that is trained
        max_length: tokens of a text; longer ones are cut
        batch_size: texts per step and process
        workers: processes that make batches; 0 makes them in this one
        epochs: passes over the training texts
        seed: of weights, order and fraction
        experiment: name of the run folder (None: time, model and length)
    """

    model: str = "text_4l8h"
    pos_drop: float = 0.0
    proj_drop: float = 0.0
    attn_drop: float = 0.0

    train_file: str | None = None
    test_file: str | None = None
    dataset_dir: str | None = None
    train_split: str = "train"
    test_split: str | None = None
    text_columns: tuple[str, ...] = ("text",)
    label_column: str = "label"
    skip_label: str | None = "-1"
    fraction: float = 1.0
    tokenizer: str = "wordpiece"
    vocab_size: int = 8192
    max_length: int = 128
    batch_size: int = 16
    workers: int = 0

    epochs: int = 10
    lr: float = 2e-5
    weight_decay: float = 0.01
    sched_on_updates: bool = True
    warmup_epochs: int = 0
    warmup_lr: float = 0.0
    smoothing: float = 0.0
    output: str = "output/text"

    # what only images have, and what the shared trainer reads of it
    pretrained: ClassVar[bool] = False
    num_classes: ClassVar[int | None] = None
    img_size: ClassVar[int | None] = None
    train_only: ClassVar[tuple[str, ...]] = ()
    tome_r: ClassVar[str | None] = None
    layer_decay: ClassVar[float | None] = None
    mixup: ClassVar[float] = 0.0
    cutmix: ClassVar[float] = 0.0
    teacher: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        for name in ("label_column", "skip_label", "text_columns"):
            object.__setattr__(self, name, numbers_as_text(getattr(self, name)))  # YAML reads 1 as a number
        super().__post_init__()
        self._check_source()
        self._check_length()

    def _check_length(self) -> None:
        least = 1 if len(self.text_columns) == 1 else 3
        if self.max_length < least:
            raise ValueError(f"max_length must be at least {least}: a token of each text{' and [SEP]' if least > 1 else ''}, got {self.max_length}")

    def _check_source(self) -> None:
        files = [path for path in (self.train_file, self.test_file) if path is not None]
        if files and self.dataset_dir is not None:
            raise ValueError("give train_file and test_file, or dataset_dir, not both")
        if len(files) == 1:
            raise ValueError(f"train_file and test_file go together, and only {files[0]} is given")
        for path in files:
            kind_of(path)
        check_columns(self.text_columns, self.label_column)


def check_columns(text_columns: tuple[str, ...], label_column: str) -> None:
    """Raises: ValueError for none or more than two texts, and for one column in two roles."""
    if not 1 <= len(text_columns) <= 2:
        raise ValueError(f"text_columns must be one column, or two for pairs, got {len(text_columns)}")
    wanted = (*text_columns, label_column)
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"text_columns and label_column must be different columns, got {', '.join(wanted)}")


def numbers_as_text(value: object) -> object:
    """2 -> "2", also in a list."""
    if isinstance(value, (list, tuple)):
        return tuple(map(numbers_as_text, value))
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value
