"""Gates for measuring: as those of a trained model are, they choose other heads in each image, and as many as each asks for."""

import torch
from torch import Tensor, nn

from vit_prune.measure.inputs import image_size
from vit_prune.methods.base import set_progress
from vit_prune.methods.budgetformer import BudgetFormerMethod
from vit_prune.methods.stack import prune_stacks

IMAGES = 16  # of noise, over which the budgets are spread
MEAN, STD = -0.4, 1.0  # of logit(s): s is about .4, most of it in .15 to .7


def randomise_gates(model: nn.Module, *, mixed: bool, seed: int = 0) -> None:
    """Random relevances; mixed: budgets too, which differ from image to image, after the end of a training."""
    generator = torch.Generator().manual_seed(seed)
    gates = [gate for stack in prune_stacks(model) for gate in stack.gaters if not gate.progress.is_meta]  # on `meta` only shapes count
    for gate in gates:
        gate.g.weight.data = torch.randn(gate.g.weight.shape, generator=generator).to(gate.g.weight)
    if mixed and gates:
        set_progress(model, 1.0)
        for gate in gates:
            gate.f2.weight.data = torch.randn(gate.f2.weight.shape, generator=generator).to(gate.f2.weight)
        spread_budgets(model, torch.randn(IMAGES, getattr(model, "in_chans", 3), *image_size(model), generator=generator))


@torch.no_grad()
def spread_budgets(model: nn.Module, images: Tensor) -> None:
    """Let s differ over the images, block by block: what f gives is moved and stretched to MEAN and STD. The model is left in evaluation mode."""
    handles = [stack.register_forward_pre_hook(spread_one, with_kwargs=True) for stack in prune_stacks(model)]
    try:
        model.eval()(images.to(next(model.parameters())))
    finally:
        for handle in handles:
            handle.remove()


def spread_one(stack: nn.Module, args: tuple[Tensor], kwargs: dict) -> None:
    (gate,) = stack.gaters
    logits = budget_logits(gate, args[0])
    gate.f2.weight.mul_(STD / logits.std())
    gate.f2.bias.add_(MEAN - budget_logits(gate, args[0]).mean())


def budget_logits(gate: BudgetFormerMethod, x: Tensor) -> Tensor:
    return gate.gate(x, mask=None, sizes=None).budget.logit()
