"""Time of detectors and of their backbones, one image at a time, in turn with the first one."""

import copy
from collections.abc import Mapping

import torch

from vit_prune.detection.cost import DetectorMacs
from vit_prune.detection.model import MaskRCNN
from vit_prune.fuse import fuse
from vit_prune.measure.clock import clock_for
from vit_prune.measure.latency import PairedLatency, paired_latency
from vit_prune.methods.stack import prune_stacks

WARMUP = 1


def fused(model: MaskRCNN, dtype: torch.dtype, device: torch.device) -> MaskRCNN:
    """A copy for inference whose ViT is fused where it is patched. In half precision its boxes and scores stay float32."""
    fast = copy.deepcopy(model).eval().requires_grad_(False)
    if prune_stacks(fast):
        fuse(fast.backbone.net.vit)
    for part in (fast.backbone, fast.rpn, fast.roi_heads):
        part.to(device, dtype)
    fast.transform.to(device)
    fast.backbone.register_forward_pre_hook(lambda _backbone, args: (args[0].to(dtype),))
    return fast


@torch.inference_mode()
def times(models: Mapping[str, MaskRCNN], size: int, *, dtype: torch.dtype, device: torch.device, runs: int) -> dict[str, PairedLatency]:
    """{"backbone": ..., "detector": ...} of square images of `size` pixels. The detectors find as much as they may: no score is too low."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (3, size, size), dtype=torch.uint8, generator=generator).to(device)
    fast = {name: fused(model, dtype, device) for name, model in models.items()}
    pixels = torch.randn(1, 3, size, size, generator=generator).to(device, dtype)
    backbones = {name: (lambda net=model.backbone.net: net(pixels)) for name, model in fast.items()}
    detectors = {name: (lambda model=model: model([image])) for name, model in fast.items()}
    clock = clock_for(device)
    return {what: paired_latency(calls, runs=runs, warmup=WARMUP, clock=clock) for what, calls in (("backbone", backbones), ("detector", detectors))}


def time_cells(timed: Mapping[str, PairedLatency], costs: Mapping[str, DetectorMacs], name: str) -> dict:
    """Milliseconds, speedup over the first, its interval, and efficiency: the speedup over that which the MACs predict."""
    first = next(iter(costs))
    cells = {}
    for what, macs in (("backbone", lambda cost: cost.backbone), ("detector", lambda cost: cost.total)):
        ratio = timed[what].ratio(first, name)
        cells |= {
            f"{what}_ms": timed[what].medians_ms[name],
            f"{what}_speedup": ratio.median,
            f"{what}_low": ratio.low,
            f"{what}_high": ratio.high,
            f"{what}_efficiency": ratio.median * macs(costs[name]) / macs(costs[first]),
            f"{what}_noise": None if name == first else timed[what].noise(first, name),
        }
    return cells
