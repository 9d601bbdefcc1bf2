"""Make the points of a sweep: one method at one share and one image size each. Quality comes first, then what it costs, paired with the unpruned model."""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import torch
from torch import nn

import vit_prune.models  # noqa: F401  registers ours with timm
from vit_prune.calibrate import calibrate
from vit_prune.checkpoint import load, load_weights
from vit_prune.measure.candidates import Candidate
from vit_prune.measure.compare import SideBySide
from vit_prune.measure.environment import environment
from vit_prune.measure.macs import macs
from vit_prune.measure.setting import Setting
from vit_prune.search import Found, Search, load_found
from vit_prune.search.found import text_of
from vit_prune.search.greedy import CannotReach
from vit_prune.sweep.config import PHOTOGRAPHS, SEARCH, UNPRUNED, SweepConfig, configured, file_part
from vit_prune.sweep.judge import COLUMNS, Half, Labelled, Photographs, judge_for
from vit_prune.sweep.strength import OutOfReach, pruned, strength_for
from vit_prune.train.build import build_model

log = logging.getLogger(__name__)

OFF_THE_SHELF, TRAINED = "off the shelf", "trained"
FEWEST_RUNS = 11
WARMUP = 3


class Point(NamedTuple):
    """What tells a row from the others."""

    method: str
    share: float | None
    img_size: int


def unpruned(config: SweepConfig, size: int | None) -> nn.Module:
    """The model of the sweep, with its weights, at a size."""
    torch.manual_seed(config.seed)
    kwargs = {} if size is None else {"img_size": size}
    if config.data == PHOTOGRAPHS:
        kwargs["num_classes"] = 0
    model = build_model(config.model, pretrained=config.checkpoint == "", **kwargs).eval()
    if config.checkpoint is None:
        log.warning("no checkpoint: the weights are random")
    if config.checkpoint:
        load_weights(model, config.checkpoint)
    return model


def folders_of(config: SweepConfig, label: str) -> list[str]:
    """Of a trained label, one for each seed."""
    folders = config.trained[label]
    return [folders] if isinstance(folders, str) else list(folders)


def first_folder(config: SweepConfig) -> str:
    """What the others are compared with."""
    return folders_of(config, next(iter(config.trained)))[0]


class SizeBench:
    """All that the points of one image size share."""

    def __init__(self, config: SweepConfig, size: int) -> None:
        self.config, self.size = config, (size, size)
        self.baseline = unpruned(config, size) if config.methods else load(first_folder(config)).eval()
        self.judge: Photographs | Labelled = judge_for(config, self.baseline, self.size)
        self.calibrated = [self.copy(half.calibration) for half in self.judge.halves]  # one for each half
        self.searches: dict[tuple[str, int], Search] = {}
        self.whole = macs(self.baseline, self.size)

    def copy(self, calibration: Sequence) -> nn.Module:
        copied = copy.deepcopy(self.baseline)
        return calibrate(copied, calibration) if self.config.methods else copied

    def row(self, point: Point) -> dict:
        """Raises: whatever `patch`, `prune` and the counting raise for a method that does not fit the model."""
        results, hows, first = [], [], None
        try:
            for half, model, how in self.models(point):
                results.append(self.result(model, half))
                hows.append(how)
                first = first or model
        except (OutOfReach, CannotReach) as error:
            return self.cells(point, how="", note=str(error))
        values = {key: None if results[0][key] is None else fmean(result[key] for result in results) for key in results[0]}
        if len(self.seeds(point)) > 1:
            values["top1_std"] = stdev(result["top1"] for result in results)
        if self.config.latency and point.method != UNPRUNED:
            values |= self.latency(first)
        return self.cells(point, how=" | ".join(dict.fromkeys(hows)), **values)

    def seeds(self, point: Point) -> list[str]:
        """The folders of a trained point, one for each seed."""
        return folders_of(self.config, point.method) if point.method in self.config.trained else []

    def models(self, point: Point) -> Iterator[tuple[Half, nn.Module, str]]:
        """What is judged, on what, and its settings in words: a trained model per seed, or the method calibrated on each half. Raises: OutOfReach."""
        for folder in self.seeds(point):
            yield self.judge.halves[0], load(folder).eval(), folder
        for half in range(len(self.judge.halves)) if not self.seeds(point) else ():
            yield self.judge.halves[half], *self.model(point, half)

    def result(self, model: nn.Module, half: Half) -> dict[str, float | None]:
        cost = macs(model, self.size)
        counted = {"macs": cost.total, "macs_share": cost.total / self.whole.total, "parameters": sum(p.numel() for p in model.parameters())}
        return counted | self.judge(model, half)

    def model(self, point: Point, half: int) -> tuple[nn.Module, str]:
        """The model of a point, calibrated on one half, and its settings in words. Raises: OutOfReach."""
        if point.share is None:
            return self.baseline, ""
        entries, baseline, calibration = self.config.methods[point.method], self.calibrated[half], self.judge.halves[half].calibration
        if isinstance(entries, Mapping):
            found = self.found(point, entries[SEARCH], half)
            return found.apply(copy.deepcopy(baseline), calibration if found.plan else None), text_of(found)
        dials = strength_for(baseline, entries, point.share, self.size)
        model = pruned(baseline, entries, dials, calibration)
        return model, "; ".join(f"{entry['name']} {key} {value}" for entry, given in zip(entries, dials, strict=True) for key, value in given.items())

    def found(self, point: Point, entries: list, half: int) -> Found:
        """At the share, searched on the half that calibrates, and saved beside the points; the file of an earlier start is taken as it is."""
        name = f"found-{file_part(point.method)}-{point.img_size}-{point.share:g}{'-other-half' if half else ''}.yaml"
        path = Path(self.config.output) / name
        if path.exists():
            return load_found(path)
        key = point.method, half
        if key not in self.searches:
            self.searches[key] = Search(self.calibrated[half], self.judge.halves[half].calibration, [configured(entry, {}) for entry in entries])
        found = self.searches[key].find(f"macs:{point.share}")
        found.save(path, comment=f"vp.search, {self.config.model} at {point.img_size} px")
        return found

    def latency(self, model: nn.Module) -> dict:
        """Milliseconds of one image, and the time as a share of the unpruned model's, in the same rounds."""
        config = self.config
        first = (config.img_size or (self.size[0],))[0]
        runs = max(FEWEST_RUNS, round(config.runs * (first / self.size[0]) ** 2))
        compared = SideBySide(Setting(), [Candidate(UNPRUNED, self.baseline, None), Candidate("pruned", model, UNPRUNED)], torch.device(config.device))
        timed = compared.latency(runs=runs, warmup=WARMUP, threads=config.threads)
        ratio = timed.ratio("pruned", UNPRUNED)
        peaks = compared.peaks(config.threads) if config.memory else {}
        return {
            "latency_ms": timed.medians_ms["pruned"],
            "latency_share": ratio.median,
            "latency_low": ratio.low,
            "latency_high": ratio.high,
            "noise": timed.noise(UNPRUNED, "pruned"),
            "peak_mib": peaks["pruned"].peak_mib if peaks else None,
        }

    def cells(self, point: Point, **values: object) -> dict:
        """A row of the CSV, all of its columns there."""
        config = self.config
        found = environment(torch.device(config.device), threads=config.threads, dtypes=["float32"])
        is_trained = point.method in config.trained
        return {
            "model": config.model or "",
            "method": point.method,
            "target_share": point.share,
            "img_size": point.img_size,
            "training": TRAINED if is_trained else OFF_THE_SHELF,
            "how": values.get("how"),
            **{key: values.get(key) for key in ("macs", "macs_share", "parameters", *COLUMNS, "top1_std")},
            "seeds": max(1, len(self.seeds(point))),
            **{key: values.get(key) for key in ("latency_ms", "latency_share", "latency_low", "latency_high", "noise", "peak_mib")},
            "images": self.judge.count,
            "batch_size": 1,
            "dtype": "float32",
            "device": found["device"],
            "cpu": found["cpu"],
            "threads": config.threads,
            "note": values.get("note"),
        }
