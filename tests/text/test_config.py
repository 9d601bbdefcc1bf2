"""Wrong values are refused at birth, in one sentence."""

import pytest

from vit_prune.text.config import TextConfig
from vit_prune.train.config import TrainConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train_file": "a.csv"}, "train_file and test_file go together, and only a.csv is given"),
        ({"train_file": "a.csv", "test_file": "b.csv", "dataset_dir": "c"}, "give train_file and test_file, or dataset_dir, not both"),
        ({"train_file": "a.txt", "test_file": "b.csv"}, r"a.txt must end in .csv or .jsonl, with .gz or without"),
        ({"text_columns": ()}, "text_columns must be one column, or two for pairs, got 0"),
        ({"text_columns": ("a", "b", "c")}, "text_columns must be one column, or two for pairs, got 3"),
        ({"text_columns": ("label",)}, "text_columns and label_column must be different columns, got label, label"),
        ({"fraction": 0}, r"fraction must be in \(0, 1\], got 0.0"),
        ({"fraction": 10}, r"fraction must be in \(0, 1\], got 10.0"),
        ({"vocab_size": 0}, "vocab_size must be > 0, got 0"),
        ({"max_length": 0}, "max_length must be > 0, got 0"),
        ({"proj_drop": 1}, r"proj_drop must be in \[0, 1\), got 1.0"),
        ({"lr": "fast"}, "lr must be a number, got 'fast'"),
        ({"opt": "adamv"}, "unknown opt 'adamv'; did you mean adam"),
        ({"opt": "adahessian"}, "opt adahessian needs gradients of gradients"),
        ({"sched": "linear"}, "unknown sched 'linear'; there are cosine, constant"),
        ({"amp_dtype": "bfloat16"}, "amp_dtype bfloat16 does nothing without amp"),
        ({"model_kwargs": {"vocab_size": 5}}, "model_kwargs repeats vocab_size, which has a flag of its own"),
        ({"model_kwargs": {"proj_drop_rate": 0.1}}, "model_kwargs repeats proj_drop_rate, which has a flag of its own"),
        ({"epochs": 2, "warmup_epochs": 2}, "warmup_epochs must be less than epochs, got 2 of 2"),
        ({"keep": 0}, r"keep must be in \(0, 1\], got 0"),
        ({"keep_warmup_epochs": 2}, "keep_warmup_epochs needs keep, the ratios to come to"),
        ({"device": "tpu"}, "device must be cpu, cuda or cuda:NUMBER, got 'tpu'"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        TextConfig(**values)


def test_column_numbers_may_be_written_as_numbers():
    config = TextConfig(text_columns=[2, 3], label_column=1, skip_label=-1)
    assert (config.text_columns, config.label_column, config.skip_label) == (("2", "3"), "1", "-1")


def test_what_only_images_have_is_off_as_it_is_by_default():
    for name in ("pretrained", "num_classes", "img_size", "train_only", "tome_r", "layer_decay", "mixup", "cutmix", "teacher"):
        assert getattr(TextConfig(), name) == getattr(TrainConfig(), name), name
