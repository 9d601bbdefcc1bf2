"""Measure several models side by side: in each setting all of them in one paired run.  images [B, C, height, width]."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from vit_prune.fuse import fuse
from vit_prune.measure.backends import check_served, pinned
from vit_prune.measure.candidates import Candidate
from vit_prune.measure.clock import clock_for
from vit_prune.measure.counter import copy_with
from vit_prune.measure.engines import build_call, prepare
from vit_prune.measure.fresh import Job, peak_in_fresh_process
from vit_prune.measure.inputs import image_size, unwrap
from vit_prune.measure.latency import PairedLatency, paired_latency
from vit_prune.measure.macs import macs
from vit_prune.measure.memory import Peak
from vit_prune.measure.observed import observed
from vit_prune.measure.result import ModelMacs
from vit_prune.measure.setting import Row, Setting
from vit_prune.methods.budgetformer import budget_decides
from vit_prune.methods.stack import prune_stacks
from vit_prune.patch.fused import is_fused

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class SideBySide:
    """Models in one setting: copies of them, as they are timed. The models themselves are neither run nor changed.

    Raises: ValueError for a setting that cannot be had here; `check_served` for a backend that cannot serve one of the models.
    """

    def __init__(
        self,
        setting: Setting,
        candidates: Sequence[Candidate],
        device: torch.device,
        *,
        fused: bool = True,
        images: Tensor | None = None,
        seed: int = 0,
    ) -> None:
        setting.check(device)
        self.setting, self.candidates, self.device, self.clock = setting, candidates, device, clock_for(device)
        self.costs = {one.label: closed_form(one.model, setting.img_size) for one in candidates}
        self.models = {one.label: self.ready(one, fused=fused and setting.mode == "inference") for one in candidates}
        self.images = {label: self.example(model, images, seed) for label, model in self.models.items()}
        self.costs |= {one.label: self.gated_cost(one) for one in candidates if any(stack.gaters for stack in prune_stacks(one.model))}

    def gated_cost(self, one: Candidate) -> ModelMacs | None:
        """With as many heads as run on these images; in training all do, and the closed form is of inference."""
        if self.setting.mode == "train":
            return None
        heads = observed(self.models[one.label], self.images[one.label])[1] if budget_decides(one.model) else None
        return closed_form(one.model, self.setting.img_size, num_heads=heads)

    def ready(self, candidate: Candidate, *, fused: bool) -> nn.Module:
        setting = self.setting
        model = prepare(private_copy(candidate.model), mode=setting.mode, dtype=setting.dtype, device=self.device)
        if not fused or not prune_stacks(model) or is_fused(model):
            return model
        try:
            return fuse(model)
        except TypeError as error:
            raise ValueError(f"{candidate.label} cannot be fused (--no-fuse times it as it is): {error}") from error

    def example(self, model: nn.Module, images: Tensor | None, seed: int) -> Tensor:
        """The given images, or noise, as the model takes them: what an image shows changes no time, unless M depends on it."""
        if images is None:
            generator = torch.Generator().manual_seed(seed)
            height, width = image_size(model, self.setting.img_size)
            images = torch.randn(self.setting.batch_size, getattr(model, "in_chans", 3), height, width, generator=generator)
        return images.to(self.device, next(model.parameters()).dtype)

    def check_served(self) -> None:
        """One call of each model on the pinned kernel."""
        for label, model in self.models.items():
            check_served(self.setting.backend, label, model, build_call(model, (self.images[label],), mode=self.setting.mode, dtype=self.setting.dtype))
            model.zero_grad(set_to_none=True)

    def latency(self, *, runs: int, warmup: int, threads: int, after_round: Callable[[], object] | None = None) -> PairedLatency:
        """All models in turn. Compilation, capture and export come before the first round."""
        if self.setting.engine == "compile":
            torch._dynamo.reset()  # graphs of earlier settings count against the limit of their code
        with pinned(self.setting.backend):
            calls = {label: build_call(model, (self.images[label],), threads=threads, **self.how()) for label, model in self.models.items()}
            return paired_latency(calls, runs=runs, warmup=warmup, clock=self.clock, after_round=after_round)

    def how(self) -> dict:
        return {"engine": self.setting.engine, "mode": self.setting.mode, "dtype": self.setting.dtype}

    def peaks(self, threads: int) -> dict[str, Peak]:
        """Of one call, each model in a process of its own; none of onnxruntime and CUDA graphs, which keep what a call needs from one to the next."""
        if self.setting.engine in ("onnxruntime", "cuda-graph"):
            return {}
        settings = self.how() | {"backend": self.setting.backend, "device": str(self.device), "threads": threads}
        return {label: peak_in_fresh_process(Job(model, (self.images[label],), **settings)) for label, model in self.models.items()}

    def rows(self, latency: PairedLatency, peaks: dict[str, Peak]) -> list[Row]:
        return [self.row(candidate, latency, peaks.get(candidate.label)) for candidate in self.candidates]

    def row(self, candidate: Candidate, latency: PairedLatency, peak: Peak | None) -> Row:
        label, baseline = candidate.label, candidate.baseline
        summary, cost = latency.summary(label), self.costs[label]
        ratio = None if baseline is None else latency.ratio(baseline, label)
        compared = {} if ratio is None else {"speedup": ratio.median, "speedup_low": ratio.low, "speedup_high": ratio.high}
        return Row(
            setting=self.setting,
            model=label,
            baseline=baseline,
            img_size=tuple(self.images[label].shape[-2:]),
            **vars(summary),
            throughput=summary.throughput(self.setting.batch_size),
            **compared,
            noise=None if baseline is None else latency.noise(baseline, label),
            peak_mib=None if peak is None else peak.peak_mib,
            above_rest_mib=None if peak is None else peak.above_rest_mib,
            **counted(cost, None if baseline is None else self.costs[baseline], pruned=bool(prune_stacks(candidate.model))),
        )


def counted(cost: ModelMacs | None, baseline: ModelMacs | None, *, pruned: bool) -> dict:
    """The fields of a Row that come from MACs; None where there is no closed form."""
    if cost is None:
        return {}
    fields = {"macs": cost.total, "dense_macs": cost.dense}
    if baseline is not None:
        fields |= {"predicted": baseline.total / cost.total, "ceiling": baseline.total / cost.ceiling if pruned else None}
    return fields


def closed_form(
    model: nn.Module, img_size: int | tuple[int, int] | None, *, num_columns: Sequence[int] | None = None, num_heads: Sequence[float] | None = None
) -> ModelMacs | None:
    """None for a model, or a rule, whose MACs are not known without running it."""
    try:
        return macs(model, img_size, num_columns=num_columns, num_heads=num_heads)
    except (TypeError, ValueError, NotImplementedError):
        return None


def private_copy(model: nn.Module) -> nn.Module:
    """A deep copy of the model inside its wrappers, with tensors of its own and without gradients and hooks."""
    copied = copy_with(unwrap(model), lambda tensor: tensor.detach().clone())
    for module in copied.modules():
        for hooks in HOOKS:
            getattr(module, hooks).clear()
    return copied
