"""Structured pruning: heads and MLP channels removed for good, so that timm's own forward runs what is left.

D width, H heads, d head dim, C channels. A unit is a head or a channel; positions count the units that the model has now.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_prune.methods.l1 import CHANNEL_GROUP, HEAD_GROUP, L1, BlockPlan, PrunePlan, Taylor, choose
from vit_prune.methods.stack import prune_stacks
from vit_prune.methods.units import MLPS, Units, channel_units, cut_heads, head_units, num_channels
from vit_prune.patch.check import UnsupportedModel, check_host

Loss = Callable[[Tensor, Tensor], Tensor]
Positions = tuple[Sequence[int], Sequence[int]]  # of the heads and of the channels that a block keeps


def prune(model: nn.Module, how: L1 | Taylor | PrunePlan, loader: Iterable | None = None, loss: Loss | None = None) -> PrunePlan:
    """Remove heads and MLP channels, in place and for good.

    The cut weights are new parameters: an optimizer, EMA or DDP made before does not hold them, so prune first. A calibration does not
    fit what is left and is dropped with a warning.

    Args:
        model: a timm ViT as for `patch`, not patched; patch what is left. It may have been pruned before.
        how: shares and a criterion, or a plan that an earlier call returned, to be replayed on the same architecture.
        loader: for Taylor, batches (images [B, C, H, W], labels). One pass, in eval mode.
        loss: for Taylor, loss(logits, labels) -> a number; None is cross-entropy.

    Returns: what every block keeps, in the numbering of the original model; also kept as `model.prune_plan`.
    Raises: TypeError for a model or layer that cannot be cut, by name; ValueError for a patched model, a plan of another one, whatever would
        remove nothing, and a loader that is missing or not asked for. Nothing is changed then.
    """
    check_arguments(how, loader, loss)
    if prune_stacks(model):
        raise ValueError("the model is patched: vp.unpatch it, prune, and patch what is left")
    check_host(model)
    before = plan_of(model)
    if isinstance(how, PrunePlan):
        kept = replayed(before, how)
        pairs = zip(kept, before.blocks, strict=True)
        check_blocks(model, [(len(heads) < len(held.heads), len(channels) < len(held.channels)) for (heads, channels), held in pairs])
    else:
        check_blocks(model, [(how.heads > 0, how.mlp > 0)] * len(model.blocks))
        kept = ranked(model, how, loader, loss or F.cross_entropy)
    for block, (heads, channels) in zip(model.blocks, kept, strict=True):
        if len(heads) < block.attn.num_heads:
            cut_heads(block.attn, heads)
        if len(channels) < num_channels(block.mlp):
            channel_units(block.mlp).cut(channels)
    model.prune_plan = PrunePlan(tuple(map(composed, before.blocks, kept)))
    if getattr(model, "calibration", None):
        del model.calibration
        warnings.warn("the calibration was of the model before pruning and is dropped: run vp.calibrate again", stacklevel=2)
    return model.prune_plan


def check_arguments(how: object, loader: Iterable | None, loss: Loss | None) -> None:
    if not isinstance(how, (L1, Taylor, PrunePlan)):
        raise TypeError(f"how must be L1(heads=..., mlp=...), Taylor(...) or a PrunePlan, got {how!r:.80}")
    if isinstance(how, Taylor) and loader is None:
        raise ValueError("Taylor ranks by gradients: give a loader of batches (images, labels)")
    if not isinstance(how, Taylor) and not (loader is None and loss is None):
        raise ValueError(f"{type(how).__name__} looks at no images: leave out loader and loss, or take Taylor")


def plan_of(model: nn.Module) -> PrunePlan:
    """What the model keeps of its original. Raises: ValueError where blocks were taken out after it was pruned."""
    plan = getattr(model, "prune_plan", None)
    if plan is None:
        return PrunePlan(tuple(full_plan(block.attn.num_heads, num_channels(block.mlp)) for block in model.blocks))
    if len(plan.blocks) != len(model.blocks):
        raise ValueError(f"model.prune_plan is of {len(plan.blocks)} blocks, the model has {len(model.blocks)}: take blocks out before pruning")
    return plan


def full_plan(heads: int, channels: int) -> BlockPlan:
    return BlockPlan(heads, tuple(range(heads)), channels, tuple(range(channels)))


def replayed(before: PrunePlan, plan: PrunePlan) -> list[Positions]:
    """Positions that the plan keeps. Raises: ValueError for a plan of another model, and for one that removes nothing more."""
    sizes = [[(block.num_heads, block.num_channels) for block in one.blocks] for one in (plan, before)]
    if sizes[0] != sizes[1]:
        block = next((index for index, pair in enumerate(zip(*sizes, strict=False)) if pair[0] != pair[1]), None)
        texts = [f"{len(one)} blocks" if block is None else "{} heads and {} channels in blocks.{}".format(*one[block], block) for one in sizes]
        raise ValueError(f"the plan is of another model: it is of {texts[0]}, the model of {texts[1]}")
    if plan == before:
        raise ValueError("the plan removes nothing that this model has")
    kept = []
    for index, (ours, theirs) in enumerate(zip(before.blocks, plan.blocks, strict=True)):
        for what, held, wanted in (("head", ours.heads, theirs.heads), ("channel", ours.channels, theirs.channels)):
            if lost := sorted(set(wanted) - set(held)):
                raise ValueError(f"the plan keeps {what} {lost[0]} of blocks.{index}, which this model has lost: replay it on the original")
        kept.append(([ours.heads.index(head) for head in theirs.heads], [ours.channels.index(channel) for channel in theirs.channels]))
    return kept


def composed(before: BlockPlan, kept: Positions) -> BlockPlan:
    heads, channels = (tuple(held[position] for position in positions) for held, positions in zip((before.heads, before.channels), kept, strict=True))
    return BlockPlan(before.num_heads, heads, before.num_channels, channels)


def check_blocks(model: nn.Module, cuts: Sequence[tuple[bool, bool]]) -> None:
    """Raises: UnsupportedModel for the first block whose heads, or channels, are to be cut and cannot be."""
    for index, (block, (heads, channels)) in enumerate(zip(model.blocks, cuts, strict=True)):
        if heads:
            check_units(f"blocks.{index}.attn", block.attn, head_units(block.attn), "heads")
        if channels and type(block.mlp) not in MLPS:
            supported = ", ".join(kind.__name__ for kind in MLPS)
            raise UnsupportedModel(f"blocks.{index}.mlp is {type(block.mlp).__name__}, and cannot be cut (mlp=0 leaves it); supported: {supported}")
        if channels:
            check_units(f"blocks.{index}.mlp", block.mlp, channel_units(block.mlp), "mlp")


def check_units(name: str, module: nn.Module, units: Units, share: str) -> None:
    """Raises: UnsupportedModel for a norm over all units, and for a layer that is more than its weight and its bias."""
    if type(module.norm) is not nn.Identity:
        raise UnsupportedModel(f"{name}.norm is a {type(module.norm).__name__} over all units, which would become another function: {share}=0 leaves them")
    for axis in units.axes:
        if not is_cuttable(axis.linear):
            raise UnsupportedModel(f"{name}.{axis.name} is a {type(axis.linear).__name__} and no plain nn.Linear, so it cannot be cut ({share}=0 leaves it)")


def is_cuttable(module: nn.Module) -> bool:
    """An nn.Linear itself that computes from its own weight and bias: no adapter, no parametrisation, no mask."""
    return type(module) is nn.Linear and set(module._parameters) == {"weight", "bias"} and not module._buffers and "forward" not in vars(module)


def ranked(model: nn.Module, how: L1 | Taylor, loader: Iterable | None, loss: Loss) -> list[Positions]:
    """Positions that each block keeps, by the criterion and the ranking."""
    heads, channels = [head_units(block.attn) for block in model.blocks], [channel_units(block.mlp) for block in model.blocks] if how.mlp else []
    wanted = (heads if how.heads else []) + channels
    scores = [units.magnitudes() for units in wanted] if isinstance(how, L1) else taylor_scores(model, wanted, loader, loss)
    kept_heads = [range(units.count) for units in heads]
    kept_channels = [range(num_channels(block.mlp)) for block in model.blocks]
    if how.heads:
        kept_heads = choose(scores[: len(heads)], how.heads, ranking=how.ranking, group=HEAD_GROUP, what="heads")
    if how.mlp:
        kept_channels = choose(scores[-len(channels) :], how.mlp, ranking=how.ranking, group=CHANNEL_GROUP, what="channels")
    return list(zip(kept_heads, kept_channels, strict=True))


def taylor_scores(model: nn.Module, wanted: Sequence[Units], loader: Iterable, loss: Loss) -> list[Tensor]:
    """Per entry of wanted, [units]: (sum_s w_s dL/dw_s)^2 over all that belongs to a unit, the group criterion of arXiv 1906.10771, section 3.1,
    with the batch's loss for L, added up over the batches."""
    parameters = [parameter for units in wanted for parameter in units.parameters()]
    scores = [torch.zeros(units.count, dtype=torch.float64) for units in wanted]
    batches = 0
    if loss is F.cross_entropy and not model.num_classes:
        raise ValueError("Taylor ranks by cross-entropy, and this model has no classifier: give a loss of its features, or rank by L1")
    with evaluating(model, parameters), torch.enable_grad():
        for batch in loader:
            images, labels = images_and_labels(batch, parameters[0])
            value = loss_value(loss, model(images), labels)
            gradients = dict(zip(parameters, torch.autograd.grad(value, parameters, materialize_grads=True), strict=True))
            for score, units in zip(scores, wanted, strict=True):
                score += units.sums(lambda parameter: parameter.detach() * gradients[parameter], biases=True) ** 2  # noqa: B023  (called at once)
            batches += 1
    if not batches:
        raise ValueError("the loader gave no batch: Taylor has nothing to rank by")
    return scores


def loss_value(loss: Loss, outputs: Tensor, labels: Tensor) -> Tensor:
    """Raises: ValueError for labels that cross-entropy cannot take, and for a loss that gives no number to differentiate."""
    if loss is F.cross_entropy and not labels.is_floating_point() and int(labels.max()) >= outputs.shape[-1]:
        raise ValueError(f"the loader's labels go up to {int(labels.max())}, the model has {outputs.shape[-1]} classes")
    value = loss(outputs, labels)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        raise ValueError("the loss must return one number with a gradient, e.g. a mean over the batch")
    return value


def images_and_labels(batch: object, like: Tensor) -> tuple[Tensor, Tensor]:
    """On the model's device, the images in its dtype. Raises: ValueError for a batch that is anything else."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not all(isinstance(part, Tensor) for part in batch):
        raise ValueError(f"Taylor's loader must give batches (images, labels), got a {type(batch).__name__}")
    images, labels = batch
    if images.ndim != 4 or not images.is_floating_point():
        raise ValueError(f"the loader must give batches of float images [B, C, H, W], got {images.dtype} {tuple(images.shape)}")
    return images.to(like.device, like.dtype), labels.to(like.device)


@contextmanager
def evaluating(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """In eval mode, with gradients for these parameters; then as it was."""
    training = {module: module.training for module in model.modules()}
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    try:
        model.eval()
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
        for module, mode in training.items():
            module.training = mode
