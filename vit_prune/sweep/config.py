"""What `tools/sweep.py` takes: a YAML file, checked before anything runs.

model: vit_small_patch14_dinov2
img_size: [224, 560]
shares: [0.95, 0.75, 0.55]          # of the unpruned model's MACs, everything counted
methods:
  ToMe: [{name: tome, r: auto}]
  mix: [{name: tome, r: auto}, {name: columns, keep: auto, weight: 0.5, importance: column_mean, dropped: merge}]
  searched: {search: [{name: tome}, {name: columns, importance: column_mean, dropped: merge}], shares: [0.75]}
trained:                            # folders of vp.save, one or one per seed, compared with the first of them
  dense: [output/study/dense-seed0/last, output/study/dense-seed1/last]

An `auto` is turned, the same in every block, until the MACs are at the share; `weight` turns one that many times as far as the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from vit_prune.checkpoint.rebuild import method_from
from vit_prune.methods.base import MethodConfig
from vit_prune.methods.l1 import L1
from vit_prune.search.levels import Searchable, knobs_of
from vit_prune.train.checks import check_device, check_name, check_positive
from vit_prune.train.recipe import load_yaml

PHOTOGRAPHS = "photographs"
UNPRUNED = "unpruned"  # the label of the model itself
AUTO = "auto"
DIALS = {"tome": ("r",), "columns": ("keep",), "l1": ("heads", "mlp")}
ANY = {"r": 1, "keep": 0.5, "heads": 0.5, "mlp": 0.5}  # to check an entry by, before its dials are known
SEARCH = "search"
KEY_TYPES = {"methods": dict, "trained": dict}

Entry = Mapping[str, object]


@dataclass(frozen=True)
class SweepConfig:
    """A sweep: a model and methods, trained folders, or both, and what they are judged by.

    Args:
        model: a name of timm's registry; None where folders alone are compared.
        checkpoint: weights of the model; "" for timm's pretrained ones, None for a random start.
        img_size: pixels per side, one or several; none is the model's own.
        shares: of the unpruned model's MACs, targets for every method.
        methods: by label, a list of entries, or {"search": entries}.
        trained: by label, a folder of vp.save, or one per seed.
        data: "photographs" (fidelity to the unpruned model on sample photographs), or a data set of the trainer (top-1, top-5).
        data_dir: where the data set lies.
        calibration_images: of the training split, for a data set; photographs are divided.
        latency, memory: measure them too, paired with the unpruned model, fused, eager, batch 1, float32.
        runs: rounds that are timed, at the first size; larger images take fewer.
        batch_size, workers: of accuracy. threads, device, seed: of everything.
        output: the folder; points that it holds are not run again.
    """

    model: str | None = None
    checkpoint: str | None = None
    img_size: tuple[int, ...] = ()
    shares: tuple[float, ...] = (0.95, 0.85, 0.75, 0.65, 0.55)
    methods: Mapping[str, object] = field(default_factory=dict)
    trained: Mapping[str, str | list[str]] = field(default_factory=dict)
    data: str = PHOTOGRAPHS
    data_dir: str | None = None
    calibration_images: int = 64
    latency: bool = True
    memory: bool = False
    runs: int = 31
    threads: int = 1
    device: str = "cpu"
    seed: int = 0
    workers: int = 0
    batch_size: int = 64
    output: str = "output/sweep"

    def __post_init__(self) -> None:
        for name in ("img_size", "shares"):
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, (list, tuple)) else (value,))
        if bool(self.methods) != (self.model is not None) or not (self.methods or self.trained):
            raise ValueError("a sweep needs a model and methods, or trained folders, or both")
        check_shares(self.shares)
        for name in ("runs", "threads", "batch_size", "calibration_images"):
            check_positive(name, getattr(self, name))
        for size in self.img_size:
            check_positive("img_size", size)
        check_device(self.device)
        self._check_labels()
        if self.trained and self.data == PHOTOGRAPHS:
            raise ValueError("trained folders are compared by accuracy: give data, e.g. fashion-mnist, and data_dir")
        for label, entries in self.methods.items():
            check_entries(label, entries)

    def _check_labels(self) -> None:
        """A row is known by its label, a recipe's file by what is left of it."""
        for label in (*self.methods, *self.trained):
            if not isinstance(label, str) or label == UNPRUNED or (label in self.methods and label in self.trained):
                raise ValueError(f"each label must be a text of its own, other than {UNPRUNED!r}, got {label!r}")
        searched = [label for label, entries in self.methods.items() if isinstance(entries, Mapping)]
        if len({file_part(label) for label in searched}) < len(searched):
            raise ValueError(f"labels of searches must differ in more than spaces and strokes, or they share a file: {', '.join(searched)}")


def file_part(label: str) -> str:
    """A label in a file's name."""
    return label.replace(" ", "-").replace("/", "-")


def check_shares(shares: Sequence) -> None:
    """Raises: ValueError for what is no list, and for the first that is no share."""
    if not isinstance(shares, (list, tuple)):
        raise ValueError(f"shares must be a list, got {shares!r:.80}")
    if wrong := [share for share in shares if not isinstance(share, (int, float)) or not 0 < share < 1]:
        raise ValueError(f"shares are of the unpruned model's MACs, between 0 and 1, got {wrong[0]!r}")


def check_entries(label: str, entries: object) -> None:
    """Raises: ValueError that names the label and what is wrong."""
    searched = isinstance(entries, Mapping)
    if searched and SEARCH not in entries:
        raise ValueError(f"method {label} must be a list of entries such as [{{name: tome, r: auto}}], or {{search: [...]}} of them, got {entries!r:.80}")
    if searched and (unknown := entries.keys() - {SEARCH, "shares"}):
        raise ValueError(f"method {label}: a search takes search and shares, not {', '.join(sorted(unknown))}")
    listed = entries.get(SEARCH) if searched else entries
    if not isinstance(listed, list) or not listed or not all(isinstance(entry, Mapping) and "name" in entry for entry in listed):
        raise ValueError(f"method {label} must be a list of entries such as {{name: tome, r: auto}}, or {{search: [...]}} of them, got {entries!r:.80}")
    for weight in (entry.get("weight", 1.0) for entry in listed):
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
            raise ValueError(f"method {label}: weight must be a number > 0, got {weight!r}")
    try:
        configs = [configured(entry, ANY) for entry in listed]
        if searched:
            check_shares(entries.get("shares", ()))
            knobs_of(configs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"method {label}: {error}") from None
    has_auto = any(AUTO in entry.values() for entry in listed)
    if searched and has_auto:
        raise ValueError(f"method {label}: a search turns the dials itself: leave out auto")
    if not searched and not has_auto:
        raise ValueError(f"method {label} has no dial on auto: nothing would bring it to a share")


def configured(entry: Entry, turned: Mapping[str, object]) -> Searchable:
    """The config of an entry, its dials on auto at the values that are given."""
    name = str(entry["name"])
    values = {key: turned[key] if value == AUTO and key in DIALS.get(name, ()) else value for key, value in entry.items() if key not in ("name", "weight")}
    if name != "l1":
        return method_from({"name": name, **values}, "methods")
    if unknown := values.keys() - {item.name for item in fields(L1)}:
        raise ValueError(f"l1 takes {', '.join(item.name for item in fields(L1))}, not {', '.join(sorted(unknown))}")
    return L1(**{"heads": 0.0, "mlp": 0.0, **values})


def load_sweep(path: str | Path, **given: object) -> SweepConfig:
    """A sweep from its YAML file; what is given goes before it. Raises: OSError; ValueError that names the file and what is wrong."""
    values = {str(key).replace("-", "_"): value for key, value in load_yaml(path).items()}
    try:
        for key in values:
            check_name("key", key, [item.name for item in fields(SweepConfig)])
        for key, kind in KEY_TYPES.items():
            if not isinstance(values.get(key) or {}, kind):
                raise ValueError(f"{key} must be a mapping by label, got {values[key]!r:.80}")
        return SweepConfig(**values | {key: value for key, value in given.items() if value is not None})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def shares_of(config: SweepConfig, label: str) -> tuple[float, ...]:
    """A search may have shares of its own."""
    entries = config.methods[label]
    return tuple(entries.get("shares", config.shares)) if isinstance(entries, Mapping) else config.shares


def is_method(config: Searchable) -> bool:
    """True of what is patched, False of what is cut."""
    return isinstance(config, MethodConfig)
