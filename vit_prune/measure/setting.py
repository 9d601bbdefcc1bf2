"""One cell of the grid of measurements, and one row of its results."""

from dataclasses import asdict, dataclass

import torch

from vit_prune.measure.backends import check_backend
from vit_prune.measure.engines import check_engine


@dataclass(frozen=True)
class Setting:
    """img_size: pixels per side, None is each model's own. dtype is of weights and images; in the mode train of autocast."""

    img_size: int | None = None
    batch_size: int = 1
    dtype: str = "float32"
    engine: str = "eager"
    backend: str = "auto"
    mode: str = "inference"

    def check(self, device: torch.device) -> None:
        """Raises: ValueError for what cannot be had on this device, whatever the model."""
        check_engine(self.engine, mode=self.mode, dtype=self.dtype, device=device)
        check_backend(self.backend, device=device, engine=self.engine)
        if device.type == "cuda" and self.dtype == "bfloat16" and not torch.cuda.is_bf16_supported():
            raise ValueError(f"{device} does not compute in bfloat16: use float32 or float16")

    def __str__(self) -> str:
        pixels = "own size" if self.img_size is None else f"{self.img_size} px"
        mode = "inference" if self.mode == "inference" else "training step"
        autocast = " autocast" if self.mode == "train" and self.dtype != "float32" else ""
        return f"{mode}, {pixels}, batch {self.batch_size}, {self.dtype}{autocast}, {self.engine}, backend {self.backend}"


@dataclass(frozen=True)
class Row:
    """One model in one setting. Milliseconds per call, MiB, per image for MACs; None where it is not known or not measured.

    Args:
        model, baseline: labels; speedups are against the baseline, measured in the same rounds. baseline is None where there is nothing to compare with.
        speedup, speedup_low, speedup_high: median of the paired ratios and the interval of `PairedLatency.ratio`.
        throughput: images per second, by the median.
        peak_mib, above_rest_mib: of one call in a process of its own, see `measure.memory.Peak`.
        macs, dense_macs: of one image, of the model as it is and unpruned. FLOPs = 2 x MACs.
        predicted: MACs of the baseline / MACs of the model. efficiency: speedup / predicted.
        ceiling: what `predicted` could reach at most by choosing columns; None of a model that is not pruned.
        noise: why the speedup says little, None where it can be trusted.
    """

    setting: Setting
    model: str
    baseline: str | None
    img_size: tuple[int, int]
    mean_ms: float
    std_ms: float | None
    median_ms: float
    p10_ms: float
    p90_ms: float
    throughput: float
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    peak_mib: float | None = None
    above_rest_mib: float | None = None
    macs: int | None = None
    dense_macs: int | None = None
    predicted: float | None = None
    ceiling: float | None = None
    noise: str | None = None

    @property
    def flops(self) -> int | None:
        """2 x MACs."""
        return None if self.macs is None else 2 * self.macs

    @property
    def efficiency(self) -> float | None:
        """Measured speedup as a share of the one that the MACs predict."""
        return None if self.speedup is None or self.predicted is None else self.speedup / self.predicted

    @property
    def noisy(self) -> bool:
        return self.noise is not None

    def to_dict(self) -> dict:
        """JSON-able and flat."""
        values = asdict(self)
        height, width = values.pop("img_size")
        setting = values.pop("setting") | {"img_size": f"{height}x{width}"}
        return setting | values | {"flops": self.flops, "efficiency": self.efficiency, "noisy": self.noisy}
