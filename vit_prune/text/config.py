"""What `tools/train_text.py` takes: one dataclass, its values checked at birth. What it shares with TrainConfig means what it means there."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from timm.optim import list_optimizers

from vit_prune.text.data.files import kind_of
from vit_prune.train.checks import Values, check_device, check_name, check_ranges, conform_fields, keep_text
from vit_prune.train.config import CHOICES, PAIRS, TrainConfig


@dataclass(frozen=True)
class TextConfig:
    """Train a text encoder, with pruning or without.

    Args:
        model: text_mini, text_4l8h, text_4l12h, text_6l12h, text_12l12h, each with _budget, the first two with _bias; or a folder of vp.save, to train on
        initial_checkpoint: start from this file of weights
        model_kwargs: other arguments of the model, e.g. depth=2 embed_dim=64
        drop: dropout before the head
        pos_drop: dropout of the embeddings
        proj_drop: dropout after attention and in the MLPs
        attn_drop: dropout of the attention weights
        drop_path: stochastic depth
        grad_checkpointing: recompute each block in the backward pass; less memory, more time
        torchcompile: backend of torch.compile, e.g. inductor (None: eager)
        keep: columns kept in training, as in tools/train.py (None: all); of the models with _bias or _budget
        eval_keep: columns kept in evaluation (None: as in training)
        keep_warmup_epochs: epochs in which keep falls from 1 to its ratios, in equal steps
        rule: how many columns: topk (by keep), mass or threshold (by tau)
        tau: of the rules mass and threshold
        importance: which columns: logit, prob or random
        dropped: what becomes of the others: drop or merge
        sampling: the most important (topk) or a draw by importance (gumbel)
        per_head: one bias per head, or one that the heads share
        query_key_free: the last n blocks attend by the bias alone
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
        opt: an optimizer of timm
        lr: peak learning rate
        weight_decay: not on vectors (biases, norms) and position embeddings
        clip_grad: largest norm of the gradient, or what clip_mode says (None: no clipping)
        clip_mode: norm, value or agc
        grad_accum_steps: batches per update of the weights
        max_skipped_steps: updates in a row that may be left out because their gradient is no number, before the run stops
        amp: compute in amp_dtype where that is safe, in float32 elsewhere
        amp_dtype: float16 (with a scaler of the loss) or bfloat16
        model_ema: evaluate and save an exponential moving average of the weights
        model_ema_decay: share that stays at each update
        model_ema_warmup: begin with a smaller decay
        sched: cosine or constant, after the warm-up
        sched_on_updates: change the learning rate at every step, not at every epoch
        warmup_epochs: linear warm-up of the learning rate
        warmup_lr: learning rate at the start of the warm-up
        min_lr: learning rate at the end
        smoothing: label smoothing
        seed: of weights, order and fraction
        device: e.g. cpu, cuda, cuda:1 (None: cuda where there is one)
        output: where run folders go
        experiment: name of the run folder (None: time, model and length)
        resume: go on with the run in this folder, or auto: with OUTPUT/EXPERIMENT where there is one
        checkpoint_interval: keep a checkpoint every so many epochs, besides best and last (None: none)
        tensorboard: write TensorBoard events into the run folder
        log_interval: updates between two figures of the progress bar
    """

    model: str = "text_4l8h"
    initial_checkpoint: str | None = None
    model_kwargs: Annotated[Values, PAIRS] = field(default_factory=dict)
    drop: float = 0.0
    pos_drop: float = 0.0
    proj_drop: float = 0.0
    attn_drop: float = 0.0
    drop_path: float = 0.0
    grad_checkpointing: bool = False
    torchcompile: str | None = None

    keep: str | None = None
    eval_keep: str | None = None
    keep_warmup_epochs: int = 0
    rule: str | None = None
    tau: float | None = None
    importance: str | None = None
    dropped: str | None = None
    sampling: str | None = None
    per_head: bool | None = None
    query_key_free: int | None = None

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
    opt: str = "adamw"
    lr: float = 2e-5
    weight_decay: float = 0.01
    clip_grad: float | None = None
    clip_mode: str = "norm"
    grad_accum_steps: int = 1
    max_skipped_steps: int = 20
    amp: bool = False
    amp_dtype: str = "float16"
    model_ema: bool = False
    model_ema_decay: float = 0.9998
    model_ema_warmup: bool = False
    sched: str = "cosine"
    sched_on_updates: bool = True
    warmup_epochs: int = 0
    warmup_lr: float = 0.0
    min_lr: float = 0.0
    smoothing: float = 0.0

    seed: int = 42
    device: str | None = None
    output: str = "output/text"
    experiment: str | None = None
    resume: str | None = None
    checkpoint_interval: int | None = None
    tensorboard: bool = False
    log_interval: int = 50

    # what only images have, and what the shared trainer reads of it
    pretrained: ClassVar[bool] = False
    num_classes: ClassVar[int | None] = None
    img_size: ClassVar[int | None] = None
    train_only: ClassVar[tuple[str, ...]] = ()
    tome_r: ClassVar[str | None] = None
    layer_decay: ClassVar[float | None] = None
    momentum: ClassVar[float] = 0.9
    mixup: ClassVar[float] = 0.0
    cutmix: ClassVar[float] = 0.0
    teacher: ClassVar[str | None] = None

    pruning_kwargs = TrainConfig.pruning_kwargs
    autocast_dtype = TrainConfig.autocast_dtype
    _check_pruning = TrainConfig._check_pruning
    _check_together = TrainConfig._check_together

    def __post_init__(self) -> None:
        for name in ("keep", "eval_keep"):
            object.__setattr__(self, name, keep_text(name, getattr(self, name)))
        for name in ("label_column", "skip_label", "text_columns"):
            object.__setattr__(self, name, numbers_as_text(getattr(self, name)))  # YAML reads 1 as a number
        conform_fields(self)
        check_ranges(self)
        check_name("opt", self.opt, list_optimizers())
        for name in ("sched", "clip_mode", "amp_dtype"):
            check_name(name, getattr(self, name), CHOICES[name])
        check_device(self.device)
        self._check_source()
        self._check_length()
        self._check_pruning()
        self._check_together()

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
