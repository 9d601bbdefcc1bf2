"""AdamW with a rate for each depth, and the schedule of the rate, as in ViTDet (arXiv 2203.16527, appendix A.3)."""

from bisect import bisect_right
from collections.abc import Iterator

from timm.layers import LayerNorm2d
from torch import nn
from torch.optim import AdamW

from vit_prune.detection.model import MaskRCNN
from vit_prune.detection.train.config import DetectTrainConfig

NORMS = (nn.LayerNorm, LayerNorm2d)
FALL = 0.1  # at each milestone
FIRST = 1e-3  # of the peak rate, at the first update of the warm-up
BLOCK = "backbone.net.vit.blocks."


def create_optimizer(model: MaskRCNN, config: DetectTrainConfig) -> AdamW:
    """Groups with `scale`: their rate over that of the heads."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    depth = len(model.backbone.net.vit.blocks)
    for name, module, parameter in learning(model):
        decays = not isinstance(module, NORMS) and not name.endswith("pos_embed")
        key = config.layer_decay ** (depth + 1 - layer_of(name, depth)), config.weight_decay if decays else 0.0
        groups.setdefault(key, []).append(parameter)
    return AdamW([{"params": held, "scale": scale, "weight_decay": decay} for (scale, decay), held in groups.items()], lr=config.lr)


def learning(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Name, owner and parameter of all that learns."""
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                yield f"{prefix}.{name}", module, parameter


def layer_of(name: str, depth: int) -> int:
    """0 for what embeds patches, 1 to depth for the blocks, depth + 1 for the pyramid and the heads."""
    if name.startswith(BLOCK):
        return int(name[len(BLOCK) :].partition(".")[0]) + 1
    return 0 if name.startswith(("backbone.net.vit.pos_embed", "backbone.net.vit.patch_embed")) else depth + 1


def rate(config: DetectTrainConfig, iteration: int) -> float:
    """Of the peak rate: a linear rise, then a step down at each milestone."""
    reached = FALL ** bisect_right([share * config.iterations for share in config.milestones], iteration)
    if iteration >= config.warmup_iterations:
        return reached
    return FIRST + (reached - FIRST) * iteration / config.warmup_iterations


def set_rate(optimizer: AdamW, config: DetectTrainConfig, iteration: int) -> float:
    """The rate of the heads at this iteration, which is returned; other groups have their share of it."""
    lr = config.lr * rate(config, iteration)
    for group in optimizer.param_groups:
        group["lr"] = lr * group["scale"]
    return lr
