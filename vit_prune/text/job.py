"""Everything that the training of a text encoder needs; `train.run.run(config, prepare=prepare_text)` does the rest."""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from timm.utils import random_seed
from torch import nn

from vit_prune.text.config import TextConfig
from vit_prune.text.data.disk import read_folder
from vit_prune.text.data.files import read_file
from vit_prune.text.data.labels import classes_of, numbered, share_of
from vit_prune.text.data.rows import Rows
from vit_prune.text.data.texts import Texts, eval_loader, train_loader
from vit_prune.text.data.tokenizer import FILE, KINDS, encode, load_tokenizer, train_tokenizer
from vit_prune.text.encoder import TextTransformer
from vit_prune.train import build
from vit_prune.train.board import check_tensorboard
from vit_prune.train.distributed import from_primary
from vit_prune.train.job import Job, create_training
from vit_prune.train.resume import run_path
from vit_prune.train.state import new_name

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)


def prepare_text(config: TextConfig, device: torch.device, *, fresh: bool = True) -> Job:
    """Build everything. Raises: ValueError or OSError for whatever can be refused before the first batch.

    Args: fresh: with the weights and the tokenizer that the run starts from; a resumed one has its own.
    """
    check_tokenizer(config)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # said, so that loader processes do not warn: they cut no texts
    if config.tensorboard:
        check_tensorboard()
    train, test = read_split(config, "train"), read_split(config, "test")
    classes = classes_of(train)
    train, targets = share_of(train, numbered(train, classes), config.fraction, config.seed)
    tokenizer = tokenizer_of(config, train, fresh=fresh)
    train_set = Texts(encode(tokenizer, train.parts, config.max_length), targets, classes)
    test_set = Texts(encode(tokenizer, test.parts, config.max_length), numbered(test, classes), classes)
    config = replace(config, device=str(build.pick_device(config.device)))
    random_seed(config.seed)
    model = create_model(config if fresh else replace(config, initial_checkpoint=None), len(classes), tokenizer.get_vocab_size()).to(device)
    model.pretrained_cfg = {**model.pretrained_cfg, "label_names": tuple(classes)}  # saved with the model
    build.check_saveable(model)
    shared = {"batch_size": config.batch_size, "max_length": config.max_length, "workers": config.workers, "device": device}
    batches = train_loader(train_set, seed=config.seed, batches=config.grad_accum_steps, **shared)
    training = create_training(config, model, device, len(batches))
    if config.experiment is None and config.resume is None:
        config = replace(config, experiment=from_primary(new_name(config.model, config.max_length)))
    return Job(config, training, batches, eval_loader(test_set, **shared), train_set, test_set, files={FILE: tokenizer.to_str(pretty=True)})


def read_split(config: TextConfig, split: str) -> Rows:
    """The rows of "train" or "test". Raises: ValueError, OSError."""
    if config.dataset_dir is None and config.train_file is None:
        raise ValueError("no texts given: --train-file and --test-file, or --dataset-dir")
    return read_rows(config, *((config.train_file, config.train_split) if split == "train" else (config.test_file, config.test_split)))


def read_rows(config: TextConfig, file: str | None, split: str | None) -> Rows:
    """The rows of one file, or of one split of config.dataset_dir where that is given.

    Args: config: or another with its columns, an EvaluateTextConfig say.
    Raises: ValueError, OSError.
    """
    columns = {"text_columns": config.text_columns, "label_column": config.label_column, "skip_label": config.skip_label}
    rows = read_file(file, **columns) if config.dataset_dir is None else read_folder(config.dataset_dir, split, **columns)
    skipped = f", {rows.skipped} with the label {config.skip_label} left out" if rows.skipped else ""
    log.info(f"{rows.source}: {len(rows.labels)} texts{skipped}")
    return rows


def check_tokenizer(config: TextConfig) -> None:
    """Raises: ValueError for flags of a tokenizer that is there already."""
    taken = [name for name in ("tokenizer", "vocab_size") if getattr(config, name) != getattr(TextConfig, name)]
    if Path(config.model).is_dir() and taken:
        raise ValueError(f"{config.model} has a tokenizer of its own: leave out {' and '.join(taken)}")


def tokenizer_of(config: TextConfig, train: Rows, *, fresh: bool) -> "Tokenizer":
    """The run's own where it is resumed, else a saved model's, the one that is named, or one that is trained on the training texts."""
    if not fresh:
        return load_tokenizer(run_path(config) / FILE)
    if config.tokenizer not in KINDS:
        return load_tokenizer(config.tokenizer)
    if Path(config.model).is_dir():
        return load_tokenizer(Path(config.model) / FILE)
    if config.initial_checkpoint is not None:
        start = Path(config.initial_checkpoint)
        beside = (start if start.is_dir() else start.parent) / FILE
        if beside.is_file():
            log.info(f"the tokenizer is the weights' own, {beside}")
            return load_tokenizer(beside)
        log.warning(f"{start} has no {FILE} beside it: its embeddings meet a tokenizer that is trained anew. --tokenizer names its own")
    return train_tokenizer(config.tokenizer, [text for parts in train.parts for text in parts], config.vocab_size)


def create_model(config: TextConfig, num_classes: int, vocab_size: int) -> nn.Module:
    """The encoder of a recipe, with the weights that it starts from. Raises: ValueError, OSError."""
    rates = {f"{name}_rate": getattr(config, name) for name in ("pos_drop", "proj_drop", "attn_drop")}
    model = build.create_model(config, num_classes, {"vocab_size": vocab_size, "max_length": config.max_length, **rates})
    if not isinstance(model, TextTransformer):
        raise ValueError(f"{config.model} is a {type(model).__name__}, which takes no texts")
    if model.vocab_size != vocab_size:
        raise ValueError(f"{config.model} knows {model.vocab_size} tokens, the tokenizer {vocab_size}: give the one that the model was trained with")
    if model.max_length < config.max_length:
        raise ValueError(f"{config.model} takes {model.max_length} tokens at most, max_length is {config.max_length}")
    return model
