"""What `tools/evaluate.py` takes: one dataclass, its values checked at birth."""

from dataclasses import dataclass
from pathlib import Path

from vit_prune.measure.energy import check_country
from vit_prune.methods.schedules import parse_keep
from vit_prune.train.checks import check_device, check_name, check_ranges, conform_fields, keep_text
from vit_prune.train.data import check_dataset
from vit_prune.train.evaluation.candidates import Candidate, parse_candidates

TABLES = ("schedules", "training-inference", "rules", "query-key-free")
DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluate one checkpoint or several, at one keep schedule or several.

    Args:
        checkpoint: folders of vp.save (best/ or last/ of a run), or files of weights together with --model; NAME=PATH,PATH,... is several seeds of one model
        table: schedules; training-inference (a model trained dense, one trained pruned, and one --eval-keep); rules; query-key-free
        model: name in timm's registry of every checkpoint, where they do not say it
        img_size: pixels per side, together with --model (None: the model's own)
        eval_keep: schedules to evaluate, e.g. 1 0.5 linear:1.0:0.3 (none: the one that each model has)
        dataset: folder, fashion-mnist, digits, synthetic/N, or timm's hfds/NAME, hfids/NAME, wds/NAME, torch/NAME
        data_dir: where the data lies
        class_map: a file with one class per line: only these classes of a folder, numbered by line
        skip_broken: go on where an image cannot be read: it is named, counted and left out
        batch_size: images per step and process
        workers: processes that load images; 0 loads in this one
        amp: compute in amp_dtype where that is safe, in the checkpoint's dtype elsewhere
        amp_dtype: float16 or bfloat16
        device: e.g. cpu, cuda, cuda:1 (None: cuda where there is one)
        json: write the results to this file too
        csv: write the results to this file too
        energy: meter energy and CO2 with codecarbon; the country whose electricity it is, e.g. FRA (None: no metering)
    """

    checkpoint: tuple[str, ...]
    table: str = "schedules"
    model: str | None = None
    img_size: int | None = None
    eval_keep: tuple[str, ...] = ()
    dataset: str = "folder"
    data_dir: str | None = None
    class_map: str | None = None
    skip_broken: bool = False
    batch_size: int = 256
    workers: int = 4
    amp: bool = False
    amp_dtype: str = "float16"
    device: str | None = None
    json: str | None = None
    csv: str | None = None
    energy: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "eval_keep", tuple(keep_text("eval_keep", keep) for keep in self.eval_keep))
        conform_fields(self)
        check_ranges(self)
        check_dataset(self.dataset)
        for name, choices in (("table", TABLES), ("amp_dtype", DTYPES)):
            check_name(name, getattr(self, name), choices)
        check_device(self.device)
        for path in (self.json, self.csv):
            check_output(path)
        check_country(self.energy)
        self._check_files()
        self._check_table()

    def _check_files(self) -> None:
        if self.model is not None:
            return
        if self.img_size is not None:
            raise ValueError("img_size goes with --model: a folder of vp.save says itself what size its model has")
        for path in (path for candidate in self.candidates for path in map(Path, candidate.paths)):
            if path.is_file() and path.suffix not in (".safetensors", ".json"):
                raise ValueError(f"{path} is a file of weights: say what model it is for with --model")

    def _check_table(self) -> None:
        """Raises: ValueError for another number of checkpoints or schedules than the layout has room for."""
        if self.table in ("rules", "query-key-free") and len(self.eval_keep) > 1:
            raise ValueError(f"the table {self.table} has one row per checkpoint: give one --eval-keep at most, got {len(self.eval_keep)}")
        if self.table != "training-inference":
            return
        if len(self.candidates) != 2:
            raise ValueError(f"the table training-inference compares two checkpoints, trained dense and trained pruned, got {len(self.candidates)}")
        if len(self.eval_keep) != 1:
            raise ValueError(f"the table training-inference takes one --eval-keep, the schedule of pruned inference, got {len(self.eval_keep)}")
        if keeps_all(self.eval_keep[0]):
            raise ValueError(f"the table training-inference compares keep 1 with a schedule that prunes, got --eval-keep {self.eval_keep[0]}")

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The checkpoints by name."""
        return parse_candidates(self.checkpoint)

    @property
    def schedules(self) -> tuple[str | None, ...]:
        """What each checkpoint is evaluated at; None is the schedule that it has."""
        return ("1", *self.eval_keep) if self.table == "training-inference" else self.eval_keep or (None,)

    @property
    def autocast_dtype(self) -> str | None:
        """amp_dtype where amp is on."""
        return self.amp_dtype if self.amp else None


def keeps_all(keep: str) -> bool:
    schedule = parse_keep(keep)
    return set(schedule.values[:2] if schedule.kind == "step" else schedule.values) == {1.0}


def check_output(path: str | None) -> None:
    """Raises: OSError where no such file can be written."""
    if path is None:
        return
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(f"no folder {Path(path).parent} to write {path} in")
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path} is a folder: give the name of a file to write")
