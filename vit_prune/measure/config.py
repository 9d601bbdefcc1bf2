"""What `tools/latency.py` takes: one dataclass, its values checked at birth, and its recipes."""

import os
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path

import torch

from vit_prune.measure.backends import BACKENDS
from vit_prune.measure.engines import DTYPES, ENGINES, MODES
from vit_prune.measure.setting import Setting
from vit_prune.methods.columns import CHOICES as COLUMNS_CHOICES
from vit_prune.train.checks import check_device, check_name, conform_fields, heads_text, keep_text, merges_text
from vit_prune.train.recipe import load_yaml

LAYOUTS = ("rows", "table1", "table11", "table12")
POSITIVE = ("num_classes", "threads", "batch_size", "img_size", "merge_rank", "runs")
NOT_NEGATIVE = ("query_key_free", "warmup", "workers", "seed")
SEVERAL = ("model", "against", "dtype", "batch_size", "img_size", "backend", "engine")
MAY_BE_EMPTY = ("against", "img_size")
METHOD_FIELDS = ("keep", "dropped", "importance", "sampling", "merge_rank", "query_key_free", "tome_r", "heads")
CHOICES = {
    "dropped": COLUMNS_CHOICES["dropped"],
    "importance": COLUMNS_CHOICES["importance"],
    "sampling": COLUMNS_CHOICES["sampling"],
    "dtype": tuple(DTYPES),
    "backend": BACKENDS,
    "engine": ENGINES,
    "mode": MODES,
    "layout": LAYOUTS,
}


@dataclass(frozen=True)
class LatencyConfig:
    """Measure latency, memory and MACs of models, paired in one process. --config FILE reads a YAML recipe with these names; flags override it.

    Args:
        model: names of timm's registry, ours among them, or folders of vp.save
        checkpoint: weights: PATH for the only model, or NAME=PATH for each that has some; what was never trained is as fast
        num_classes: outputs of the head of what is given by name (None: the model's own)
        against: models to compare with, names or folders; the first is the baseline of all (none: each pruned model has its own unpruned original)
        keep: columns kept: 0.5, linear:1.0:0.3, cosine:..., step:1.0:0.5:6, or one ratio per block: 1,1,.9
        dropped: what becomes of the other columns: drop or merge (for a plain model of timm, as the next three)
        importance: which columns: logit, prob, column_mean, class_attention, value_norm, grid or random
        sampling: the most important (topk), a draw (gumbel), or spread over the image (systematic)
        merge_rank: directions in which merge compares (None: all of x)
        query_key_free: the last n blocks attend by the bias alone
        tome_r: tokens merged per block (ToMe): 8, decreasing:8 or one number per block: 8,8,4,0
        heads: that run (BudgetFormer): 2, one number per block: 6,4,2,2, or mixed: each image its own one to four, by gates made up so
        fuse: time pruned models on their fast path, vp.fuse; training is never fused
        device: e.g. cpu, cuda, cuda:1 (None: cuda where there is one)
        threads: of the CPU (None: PyTorch's own choice)
        dtype: float32, bfloat16, float16: of weights and images, in training of autocast
        batch_size: images per call
        img_size: pixels per side (none: each model's own)
        backend: auto, math, efficient, flash, cudnn: the attention kernel, pinned for the whole run
        engine: eager, compile, cuda-graph, onnxruntime
        mode: inference, or train: forward and backward
        warmup: rounds that are not timed
        runs: rounds that are timed
        memory: measure peak memory too, in a process of its own for each model and setting
        seed: of weights and images
        layout: rows, or the paper's table1, table11, table12
        dataset: for accuracy: folder, fashion-mnist, digits, synthetic/N, hfds/NAME, hfids/NAME, wds/NAME or torch/NAME
        data_dir: where its validation data lies (None: accuracy is left open)
        workers: processes that load images
        output: where the folder of the run goes
    """

    model: tuple[str, ...] = ()
    checkpoint: tuple[str, ...] = ()
    num_classes: int | None = None
    against: tuple[str, ...] = ()
    keep: str | None = None
    dropped: str | None = None
    importance: str | None = None
    sampling: str | None = None
    merge_rank: int | None = None
    query_key_free: int | None = None
    tome_r: str | None = None
    heads: str | None = None
    fuse: bool = True
    device: str | None = None
    threads: int | None = None
    dtype: tuple[str, ...] = ("float32",)
    batch_size: tuple[int, ...] = (1,)
    img_size: tuple[int, ...] = ()
    backend: tuple[str, ...] = ("auto",)
    engine: tuple[str, ...] = ("eager",)
    mode: str = "inference"
    warmup: int = 10
    runs: int = 50
    memory: bool = True
    seed: int = 0
    layout: str = "rows"
    dataset: str = "folder"
    data_dir: str | None = None
    workers: int = 4
    output: str = "output/latency"

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", keep_text("keep", self.keep))
        object.__setattr__(self, "tome_r", merges_text(self.tome_r))
        object.__setattr__(self, "heads", heads_text(self.heads))
        for name in ("checkpoint", *SEVERAL):
            if isinstance(getattr(self, name), (str, int)):  # a recipe may write one value without brackets
                object.__setattr__(self, name, (getattr(self, name),))
        conform_fields(self)
        self._check_numbers()
        self._check_choices()
        self._check_lists()
        check_folder(self.output)
        if not self.is_owed:
            check_device(self.device)

    def _check_numbers(self) -> None:
        for names, least in ((POSITIVE, 1), (NOT_NEGATIVE, 0)):
            for name in names:
                value = getattr(self, name)
                if any(number < least for number in (value if isinstance(value, tuple) else () if value is None else (value,))):
                    raise ValueError(f"{name.replace('_', '-')} must be >= {least}, got {value}")

    def _check_choices(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            for one in value if isinstance(value, tuple) else () if value is None else (value,):
                check_name(name, one, choices)

    def _check_lists(self) -> None:
        if not self.model:
            raise ValueError("model needs at least one name of timm or folder of vp.save, e.g. --model deit_s_bias")
        for name in SEVERAL:
            values = getattr(self, name)
            if len(set(values)) < len(values) or (not values and name not in MAY_BE_EMPTY):
                raise ValueError(f"{name.replace('_', '-')} takes one value or several different ones, got {' '.join(map(str, values)) or 'none'}")

    @property
    def settings(self) -> tuple[Setting, ...]:
        """The grid; the sizes vary slowest, since each needs models of its own."""
        sizes = self.img_size or (None,)
        return tuple(Setting(*values, self.mode) for values in product(sizes, self.batch_size, self.dtype, self.engine, self.backend))

    @property
    def methods(self) -> dict:
        """The fields of TokenBias and Columns that are given."""
        return {name: getattr(self, name) for name in METHOD_FIELDS if getattr(self, name) is not None}

    def label(self, name: str) -> str:
        """What a model is called in the results: its name, and what was changed in it."""
        changes = ", ".join(f"{field.replace('_', '-')} {value}" for field, value in self.methods.items())
        return f"{name}, {changes}" if changes else name

    @property
    def is_owed(self) -> bool:
        """A table of the paper that is asked for on a GPU, where there is none: every row is printed, and what needs the GPU is left open."""
        return self.layout != "rows" and (self.device or "").startswith("cuda") and not torch.cuda.is_available()


def check_folder(path: str) -> None:
    """Raises: OSError where no folder can be made, which is better known before the measurement than after it."""
    there = next(folder for folder in (Path(path), *Path(path).absolute().parents) if folder.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"output must be a folder, and {there} is a file")
    if not os.access(there, os.W_OK):
        raise PermissionError(f"nothing can be written in {there}: give another --output")


def load_config(path: str | Path) -> LatencyConfig:
    """The recipe in a YAML file; keys may be written with - or _.

    Raises: OSError; ValueError, with the file's name, for an unknown key (with the nearest valid one), a key given twice and a wrong value.
    """
    values = load_yaml(path)
    try:
        names = [str(key).replace("-", "_") for key in values]
        for name in names:
            check_name("key", name, [item.name for item in fields(LatencyConfig)])
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]} is given twice")
        return LatencyConfig(**dict(zip(names, values.values(), strict=True)))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
