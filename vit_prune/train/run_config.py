"""What every trainer of images and texts takes, its values checked at birth. A field means what timm's flag of the same name means."""

from dataclasses import dataclass, field, fields
from typing import Annotated, ClassVar

import tyro
from timm.optim import get_optimizer_info, list_optimizers

from vit_prune.methods.columns import Columns
from vit_prune.methods.token_bias import TokenBias
from vit_prune.train.checks import Values, check_device, check_name, check_ranges, conform_fields, keep_text, parse_pairs

AUTO = "auto"
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
class RunConfig:
    """Model, pruning, optimisation and run folder.

    Args:
        model: a name of timm's registry; or a folder of vp.save, to train on
        initial_checkpoint: start from this file: timm, DeiT, MAE, EMA, DDP or our own weights
        drop: dropout
        drop_path: stochastic depth
        model_kwargs: other arguments of the model, e.g. depth=4 embed_dim=64
        grad_checkpointing: recompute each block in the backward pass; less memory, more time
        torchcompile: backend of torch.compile, e.g. inductor (None: eager)
        keep: columns kept in training: 0.5, linear:1.0:0.3, cosine:1.0:0.3, step:1.0:0.5:6 or 1,1,.9,.7 (None: all)
        eval_keep: columns kept in evaluation, in the same grammar (None: as in training)
        keep_warmup_epochs: epochs in which keep falls from 1 to its ratios, in equal steps
        rule: how many columns: topk (by keep), mass or threshold (by tau)
        tau: of the rules mass and threshold
        importance: which columns: logit, prob or random
        dropped: what becomes of the others: drop or merge
        sampling: the most important (topk) or a draw by importance (gumbel)
        per_head: one bias per head, or one that the heads share
        query_key_free: the last n blocks attend by the bias alone
        batch_size: inputs per step and process
        workers: processes that load inputs; 0 loads in this one
        epochs: passes over the training data
        opt: an optimizer of timm
        lr: peak learning rate
        weight_decay: not on vectors (biases, norms) and position embeddings; the token bias, a matrix, decays as the other matrices do
        momentum: of the optimizers that have one
        clip_grad: largest norm of the gradient, or what clip_mode says (None: no clipping)
        clip_mode: norm, value or agc (of all weights, the head's too)
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
        seed: of weights, order and what else is drawn
        device: e.g. cpu, cuda, cuda:1 (None: cuda where there is one)
        output: where run folders go
        experiment: name of the run folder (None: time, model and size)
        resume: go on with the run in this folder, or auto: with OUTPUT/EXPERIMENT where there is one
        checkpoint_interval: keep a checkpoint every so many epochs, besides best and last (None: none)
        tensorboard: write TensorBoard events into the run folder
        log_interval: updates between two figures of the progress bar
    """

    choices: ClassVar[dict[str, tuple[str, ...]]] = {
        "sched": ("cosine", "constant"),
        "clip_mode": ("norm", "value", "agc"),
        "amp_dtype": ("float16", "bfloat16"),
    }
    needs: ClassVar[dict[str, str]] = {  # the first does nothing without the second
        "amp_dtype": "amp",
        "clip_mode": "clip_grad",
        "model_ema_decay": "model_ema",
        "model_ema_warmup": "model_ema",
    }

    model: str
    initial_checkpoint: str | None = None
    drop: float = 0.0
    drop_path: float = 0.0
    model_kwargs: Annotated[Values, PAIRS] = field(default_factory=dict)
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

    batch_size: int = 128
    workers: int = 4
    epochs: int = 300
    opt: str = "adamw"
    lr: float | None = None
    weight_decay: float = 0.05
    momentum: float = 0.9
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
    sched_on_updates: bool = False
    warmup_epochs: int = 5
    warmup_lr: float = 1e-5
    min_lr: float = 0.0
    smoothing: float = 0.1

    seed: int = 42
    device: str | None = None
    output: str = "output/train"
    experiment: str | None = None
    resume: str | None = None
    checkpoint_interval: int | None = None
    tensorboard: bool = False
    log_interval: int = 50

    def __post_init__(self) -> None:
        for name in ("keep", "eval_keep"):
            object.__setattr__(self, name, keep_text(name, getattr(self, name)))
        conform_fields(self)
        check_ranges(self)
        check_name("opt", self.opt, list_optimizers())
        if get_optimizer_info(self.opt).second_order:
            raise ValueError(f"opt {self.opt} needs gradients of gradients, which this trainer does not compute; take adamw, lamb or another")
        for name, choices in self.choices.items():
            check_name(name, getattr(self, name), choices)
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
        if self.keep_warmup_epochs and self.keep is None:
            raise ValueError("keep_warmup_epochs needs keep, the ratios to come to")
        if self.keep_warmup_epochs >= self.epochs:
            raise ValueError(f"keep_warmup_epochs must be less than epochs, got {self.keep_warmup_epochs} of {self.epochs}")

    def _check_together(self) -> None:
        if self.warmup_epochs >= self.epochs:
            raise ValueError(f"warmup_epochs must be less than epochs, got {self.warmup_epochs} of {self.epochs}")
        if self.experiment is not None and (self.experiment in ("", ".", "..") or "/" in self.experiment or "\\" in self.experiment):
            raise ValueError(f"experiment must be the name of a folder in output, got {self.experiment!r}")
        if self.resume == AUTO and self.experiment is None:
            raise ValueError("resume auto looks for OUTPUT/EXPERIMENT: give --experiment")
        if self.resume not in (None, AUTO) and self.experiment is not None:
            raise ValueError(f"resume {self.resume} names the run's folder already: leave out --experiment")
        defaults = {item.name: item.default for item in fields(self)}
        for name, needed in self.needs.items():
            if getattr(self, name) != defaults[name] and not getattr(self, needed):
                raise ValueError(f"{name} {getattr(self, name)} does nothing without {needed}: give {needed} too, or leave {name} at {defaults[name]}")
        own = {name for item in fields(self) for name in (item.name, f"{item.name}_rate")}
        if twice := sorted(own & self.model_kwargs.keys()):
            raise ValueError(f"model_kwargs repeats {', '.join(twice)}, which has a flag of its own")

    def pruning_kwargs(self) -> dict:
        """Our arguments of the model, those alone that were given."""
        values = {name: getattr(self, name) for name in COLUMNS_FIELDS + BIAS_FIELDS}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def autocast_dtype(self) -> str | None:
        """amp_dtype where amp is on."""
        return self.amp_dtype if self.amp else None
