"""What a search found: methods with a schedule for each block, and what is cut; a recipe that can be saved and applied."""

import json
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from vit_prune.calibrate import calibrate
from vit_prune.checkpoint.rebuild import method_from
from vit_prune.methods.base import MethodConfig
from vit_prune.methods.columns import Columns
from vit_prune.methods.l1 import PrunePlan
from vit_prune.methods.tome import ToMe
from vit_prune.patch import patch
from vit_prune.prune import prune
from vit_prune.search.levels import Searchable, State

KEYS = ("model", "target", "share", "measured", "loss", "fidelity", "methods", "prune_plan")


@dataclass(frozen=True)
class Found:
    """A recipe. `apply` puts it on a model, `save` writes it as YAML.

    Args:
        methods: for `patch`, with one keep ratio and one r per block. plan: for `prune`; None cuts nothing.
        target: what was asked for. share: the cost that is predicted, as a share of the unpruned model's. measured: under a latency target, the
            median of the paired ratios of time, of the fused model. loss: what it loses on the images of the search, by `fidelity`.
        model: timm's name of the architecture that was searched, where it has one.
    """

    methods: tuple[MethodConfig, ...]
    plan: PrunePlan | None
    target: str
    share: float
    loss: float
    fidelity: str
    measured: float | None = None
    model: str | None = None

    def apply(self, model: nn.Module, loader: Iterable | None = None) -> nn.Module:
        """Cut and patch a model like the one that was searched, in place; the loader calibrates what is cut anew, where a method needs that.

        It warns where the model is of another architecture by name: the settings were found for the one, and may lose more on the other.

        Raises: ValueError where a calibration is needed, and there is neither one that fits nor a loader. Nothing is changed then.
        """
        if loader is None and needs_calibration(self.methods) and (self.plan is not None or not getattr(model, "calibration", None)):
            before = "" if self.plan is not None else ", or run vp.calibrate before"
            raise ValueError(f"a method of this recipe reads a calibration of what the recipe leaves of the model: give apply a loader of images{before}")
        if None not in (self.model, name := architecture(model)) and self.model != name:
            warnings.warn(f"the recipe was searched on {self.model}, and goes onto {name}: nobody knows what it loses there", stacklevel=2)
        if self.plan is not None:
            if loader is not None and getattr(model, "calibration", None):
                del model.calibration  # made anew below
            prune(model, self.plan)
        if loader is not None:
            calibrate(model, loader)
        return patch(model, self.methods) if self.methods else model

    def to_dict(self) -> dict:
        """JSON-able."""
        methods = [method.to_dict() for method in self.methods]
        values = {key: getattr(self, key) for key in KEYS[:6]}
        return json.loads(json.dumps(values | {"methods": methods, "prune_plan": None if self.plan is None else self.plan.to_dict()}))

    def save(self, path: str | Path, comment: str = "") -> None:
        """Write the recipe, complete or not at all."""
        import yaml  # timm brings it

        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".unfinished")
        header = "".join(f"# {line}\n" for line in comment.splitlines())
        unfinished.write_text(header + yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=None, width=150), encoding="utf-8")
        os.replace(unfinished, path)


def load_found(path: str | Path) -> Found:
    """What `Found.save` wrote. Raises: OSError; ValueError that names the file and what is wrong with it."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict) or set(values) != set(KEYS):
        raise ValueError(f"{path} is not a recipe of vp.search: it must have {', '.join(KEYS)}")
    entries, plan = values.pop("methods"), values.pop("prune_plan")
    if not isinstance(entries, list):
        raise ValueError(f"{path}: methods must be a list, got {entries!r:.80}")
    methods = tuple(method_from(entry, path) for entry in entries)
    try:
        return Found(methods=methods, plan=None if plan is None else PrunePlan.from_dict(plan), **values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def architecture(model: nn.Module) -> str | None:
    """timm's name of it; None for a model that was not built by name."""
    return (getattr(model, "pretrained_cfg", None) or {}).get("architecture") or None


def needs_calibration(methods: Iterable[MethodConfig]) -> bool:
    """True where a method reads mean queries or principal directions."""
    return any(getattr(method, "importance", None) == "column_mean" or getattr(method, "needs_features", False) for method in methods)


def text_of(found: Found) -> str:
    """The settings in one line."""
    dials = [f"{method.name} {dial} {getattr(method, dial)}" for method in found.methods for dial in ("keep", "r") if hasattr(method, dial)]
    if found.plan is not None:
        dials += [f"{what} {' '.join(str(len(getattr(block, what))) for block in found.plan.blocks)}" for what in ("heads", "channels")]
    return "; ".join(dials)


def configured(methods: Iterable[Searchable], state: State) -> tuple[MethodConfig, ...]:
    """The methods with the schedules of the state; those that do nothing in it are left out."""
    configs: list[MethodConfig] = []
    for method in methods:
        if isinstance(method, Columns):
            if any(setting.keep < 1 for setting in state):
                configs.append(replace(method, keep=tuple(setting.keep for setting in state)))
        elif isinstance(method, ToMe):
            if any(setting.r for setting in state):
                configs.append(replace(method, r=tuple(setting.r for setting in state)))
        elif isinstance(method, MethodConfig):
            configs.append(method)
    return tuple(configs)
