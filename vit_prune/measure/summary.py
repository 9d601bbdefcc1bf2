"""One report of a model: MACs per block, ceiling, kept tokens, latency, memory."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vit_prune.measure.candidates import Candidate, build, unpruned
from vit_prune.measure.compare import SideBySide, closed_form, private_copy
from vit_prune.measure.engines import DTYPES
from vit_prune.measure.environment import environment, environment_text
from vit_prune.measure.inputs import image_size, unwrap
from vit_prune.measure.observed import observed
from vit_prune.measure.report import block_table
from vit_prune.measure.result import ModelMacs
from vit_prune.measure.setting import Row, Setting
from vit_prune.measure.tables import rows_table, title
from vit_prune.methods.budgetformer import budget_decides
from vit_prune.methods.stack import columns_methods, prune_stacks
from vit_prune.patch.fused import is_fused

THIS, ORIGINAL = "this model", "unpruned"


@dataclass(frozen=True)
class Report:
    """What `report` found; `print` it, or take `to_dict()`.

    Args:
        macs: closed form, per block, for one image; None where there is none.
        rows: latency and memory: of the baseline, where there is one, then of the model.
        kept: M per patched block, the columns that attention sees, prefix tokens included, mean over the images.
        heads: that run, per block with gates, mean over the images.
        environment: what it was measured on.
    """

    macs: ModelMacs | None
    rows: tuple[Row, ...]
    kept: tuple[float, ...]
    heads: tuple[float, ...]
    environment: dict

    def __str__(self) -> str:
        measured = [environment_text(self.environment), "", title(self.rows[-1].setting, self.rows), rows_table(self.rows)]
        noise = [f"warning: {row.noise}" for row in self.rows if row.noise is not None]
        counted = ["MACs are not known in closed form"] if self.macs is None else [block_table(self.macs)]
        return "\n".join([*measured, *noise, "", *counted])

    def to_dict(self) -> dict:
        """JSON-able."""
        return {
            "macs": None if self.macs is None else self.macs.to_dict(),
            "kept_columns": list(self.kept),
            "running_heads": list(self.heads),
            "rows": [row.to_dict() for row in self.rows],
            "environment": self.environment,
        }


def report(
    model: nn.Module,
    against: str | Path | nn.Module | None = None,
    *,
    images: Tensor | None = None,
    img_size: int | None = None,
    batch_size: int = 1,
    runs: int = 30,
    warmup: int = 5,
    memory: bool = True,
) -> Report:
    """Count and time a model on its own device and in its own dtype, in evaluation mode, eager, on PyTorch's own choice of attention kernel.

    Copies are measured: the model keeps its mode, gradients and hooks (which do not run). Patched models are timed as they are: `vp.fuse` is faster.

    Args:
        against: what it is compared with in paired runs: a name of timm, a folder of vp.save, or a module; None is its own unpruned copy.
        images: [B, C, height, width], what the models run on; None is `batch_size` images of noise, of which the rules mass and threshold keep what
            they keep of noise.
        img_size: pixels per side; None is the model's own size. batch_size: images per call.
        runs, warmup: rounds that are timed, and rounds before them. memory: measure peak memory too, in a process of its own (seconds).

    Raises: ValueError for an unknown name, a size that the model does not take, or weights that are not all of one floating-point dtype.
    """
    model = unwrap(model)
    device, dtype = home(model)
    setting = Setting(img_size=img_size, batch_size=batch_size if images is None else len(images), dtype=dtype)
    size = img_size if images is None else tuple(images.shape[-2:])
    compared = SideBySide(setting, with_baseline(model, against, size), device, fused=False, images=images)
    kept, heads = observed(compared.models[THIS], compared.images[THIS])
    columns = [round(count) for count in kept] if depends_on_images(model) else None
    counts = compared.costs[THIS] = closed_form(model, size, num_columns=columns, num_heads=heads if budget_decides(model) else None)
    threads = torch.get_num_threads()
    latency = compared.latency(runs=runs, warmup=warmup, threads=threads)
    rows = compared.rows(latency, compared.peaks(threads) if memory else {})
    return Report(counts, tuple(rows), kept, heads, environment(device, threads=threads, dtypes=[dtype]))


def depends_on_images(model: nn.Module) -> bool:
    """True under the rules mass and threshold."""
    return any(method.config.rule != "topk" for method in columns_methods(model))


def home(model: nn.Module) -> tuple[torch.device, str]:
    """Where the weights lie, and the name of their dtype."""
    places = {(parameter.device, parameter.dtype) for parameter in model.parameters() if parameter.is_floating_point()}
    names = {dtype: name for name, dtype in DTYPES.items()}
    if len(places) != 1 or next(iter(places))[1] not in names:
        found = ", ".join(sorted(f"{dtype} on {device}" for device, dtype in places)) or "no weights"
        raise ValueError(f"a report needs a model on one device in one of {', '.join(DTYPES)}, got {found}")
    device, dtype = places.pop()
    if device.type == "meta":
        raise ValueError("a model on the meta device has no weights to run: vit_prune.measure.macs.macs counts it")
    return device, names[dtype]


def with_baseline(model: nn.Module, against: str | Path | nn.Module | None, img_size: int | tuple[int, int] | None) -> list[Candidate]:
    """The baseline, where there is one, then the model."""
    if isinstance(against, nn.Module):
        label, baseline = f"against ({type(unwrap(against)).__name__})", against
    elif against is not None:
        size = image_size(model, img_size)
        label, baseline = str(against), build(str(against), img_size=size[0] if size[0] == size[1] else None)
    elif is_fused(model):
        raise ValueError("a fused model has no unpruned copy: make the report before vp.fuse, or give against=")
    elif prune_stacks(model):
        label, baseline = ORIGINAL, unpruned(private_copy(model))
    else:
        return [Candidate(THIS, model, None)]
    return [Candidate(label, baseline, None), Candidate(THIS, model, label)]
