"""What `tools/train.py` takes: one dataclass, its values checked at birth. A field means what timm's flag of the same name means."""

from dataclasses import dataclass, field, fields
from typing import Annotated

import tyro
from timm.optim import list_optimizers

from vit_prune.methods.columns import Columns
from vit_prune.methods.token_bias import TokenBias
from vit_prune.train.checks import Values, check_augmentation, check_device, check_name, check_ranges, conform_fields, keep_text, parse_pairs

DATASETS = ("folder", "fashion-mnist", "digits")
SCHEDULES = ("cosine", "constant")
COLUMNS_FIELDS = ("keep", "rule", "tau", "importance", "dropped", "sampling")
BIAS_FIELDS = ("per_head", "query_key_free")
PAIRS = tyro.constructors.PrimitiveConstructorSpec(  # timm's way to type them
    nargs="*",
    metavar="NAME=VALUE ...",
    instance_from_str=parse_pairs,
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=lambda values: [f"{name}={value}" for name, value in values.items()],
)


@dataclass(frozen=True)
class TrainConfig:
    """Train a Vision Transformer, with pruning or without.

    Args:
        model: any name of timm's registry, ours among them: deit_ti_bias, deit_s_bias, vit_mini28_bias, ...
        pretrained: start from timm's weights
        initial_checkpoint: start from this file: timm, DeiT, MAE, EMA, DDP or our own weights
        num_classes: outputs of the head (None: the classes of the data)
        img_size: pixels per side (None: the model's own)
        drop: dropout
        drop_path: stochastic depth
        model_kwargs: other arguments of the model, e.g. depth=4 embed_dim=64
        keep: columns kept in training: 0.5, linear:1.0:0.3, cosine:1.0:0.3, step:1.0:0.5:6 or 1,1,.9,.7 (None: all)
        eval_keep: columns kept in evaluation, in the same grammar (None: as in training)
        rule: how many columns: topk (by keep), mass or threshold (by tau)
        tau: of the rules mass and threshold
        importance: which columns: logit, prob or random
        dropped: what becomes of the others: drop or merge
        sampling: the most important (topk) or a draw by importance (gumbel)
        per_head: one bias per head, or one that the heads share
        query_key_free: the last n blocks attend by the bias alone
        dataset: folder (DATA_DIR/train/CLASS/IMAGE and DATA_DIR/val/...), fashion-mnist or digits
        data_dir: where folder and fashion-mnist lie
        batch_size: images per step
        workers: processes that load images; 0 loads in this one
        epochs: passes over the training images
        opt: an optimizer of timm
        lr: peak learning rate
        weight_decay: not on biases, norms and position embeddings
        momentum: of the optimizers that have one
        clip_grad: largest norm of the gradient (None: no clipping)
        sched: cosine or constant, after the warm-up
        sched_on_updates: change the learning rate at every step, not at every epoch
        warmup_epochs: linear warm-up of the learning rate
        warmup_lr: learning rate at the start of the warm-up
        min_lr: learning rate at the end
        no_aug: resize and crop the centre, nothing random
        scale: area of the random crop (None: by data set, see docs/training.md)
        ratio: aspect ratio of the random crop (None: by data set)
        hflip: probability of a mirror image (None: by data set; a mirrored digit is another digit)
        color_jitter: strength (None: by data set)
        aa: AutoAugment policy, e.g. rand-m9-mstd0.5-inc1
        reprob: probability of random erasing
        mixup: alpha of mixup; 0 is off
        cutmix: alpha of CutMix; 0 is off
        smoothing: label smoothing
        seed: of weights, order and augmentation
        device: e.g. cpu, cuda, cuda:1 (None: cuda where there is one)
        output: where run folders go
        experiment: name of the run folder (None: time, model and size)
        log_interval: steps between two readings of the loss
    """

    model: str = "deit_s_bias"
    pretrained: bool = False
    initial_checkpoint: str | None = None
    num_classes: int | None = None
    img_size: int | None = None
    drop: float = 0.0
    drop_path: float = 0.0
    model_kwargs: Annotated[Values, PAIRS] = field(default_factory=dict)

    keep: str | None = None
    eval_keep: str | None = None
    rule: str | None = None
    tau: float | None = None
    importance: str | None = None
    dropped: str | None = None
    sampling: str | None = None
    per_head: bool | None = None
    query_key_free: int | None = None

    dataset: str = "folder"
    data_dir: str | None = None
    batch_size: int = 128
    workers: int = 4

    epochs: int = 300
    opt: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    momentum: float = 0.9
    clip_grad: float | None = None
    sched: str = "cosine"
    sched_on_updates: bool = False
    warmup_epochs: int = 5
    warmup_lr: float = 1e-5
    min_lr: float = 0.0

    no_aug: bool = False
    scale: tuple[float, float] | None = None
    ratio: tuple[float, float] | None = None
    hflip: float | None = None
    color_jitter: float | None = None
    aa: str | None = None
    reprob: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    smoothing: float = 0.1

    seed: int = 42
    device: str | None = None
    output: str = "output/train"
    experiment: str | None = None
    log_interval: int = 50

    def __post_init__(self) -> None:
        for name in ("keep", "eval_keep"):
            object.__setattr__(self, name, keep_text(name, getattr(self, name)))
        conform_fields(self)
        check_ranges(self)
        check_name("dataset", self.dataset, DATASETS)
        check_name("sched", self.sched, SCHEDULES)
        check_name("opt", self.opt, list_optimizers())
        check_device(self.device)
        self._check_pruning()
        self._check_together()

    def _check_pruning(self) -> None:
        """The configs of the methods say what is wrong with their values."""
        given = self.pruning_kwargs()
        if self.importance == "column_mean":
            raise ValueError("importance column_mean needs vp.calibrate on a trained model: train with logit, prob or random")
        Columns(**{name: given[name] for name in COLUMNS_FIELDS if name in given})
        TokenBias(**{name: given[name] for name in BIAS_FIELDS if name in given})
        if self.rule not in (None, "topk") and self.eval_keep is not None:
            raise ValueError(f"eval_keep belongs to the rule topk; the rule {self.rule} takes tau")

    def _check_together(self) -> None:
        if self.warmup_epochs >= self.epochs:
            raise ValueError(f"warmup_epochs must be less than epochs, got {self.warmup_epochs} of {self.epochs}")
        if (self.mixup or self.cutmix) and self.batch_size % 2:
            raise ValueError(f"mixup and cutmix mix pairs of images: batch_size must be even, got {self.batch_size}")
        if self.experiment is not None and (self.experiment in ("", ".", "..") or "/" in self.experiment or "\\" in self.experiment):
            raise ValueError(f"experiment must be the name of a folder in output, got {self.experiment!r}")
        own = {item.name for item in fields(self)} | {"drop_rate", "drop_path_rate"}
        if twice := sorted(own & self.model_kwargs.keys()):
            raise ValueError(f"model_kwargs repeats {', '.join(twice)}, which has a flag of its own")
        random = [name for name in ("scale", "ratio", "hflip", "color_jitter", "aa", "reprob") if getattr(self, name)]
        if self.no_aug and random:
            raise ValueError(f"no_aug leaves nothing random, and {', '.join(random)} is given: leave out one of the two")
        if self.aa is not None:
            check_augmentation(self.aa)

    def pruning_kwargs(self) -> dict:
        """Our arguments of the model, those alone that were given."""
        values = {name: getattr(self, name) for name in COLUMNS_FIELDS + BIAS_FIELDS}
        return {name: value for name, value in values.items() if value is not None}
