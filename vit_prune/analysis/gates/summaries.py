"""A GateRecord in few numbers: by block, by block and class, by difficulty, and over all. Rows are JSON-able; what is not known is None.

n inputs, L gated blocks, s budget, p relevance of the heads, k heads that run.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from vit_prune.analysis.gates.record import GateRecord
from vit_prune.train.evaluation.candidates import describe
from vit_prune.train.evaluation.results import MACS, UNITS, cost

THIRDS = ("easy", "medium", "hard")
RULES_BY_IMAGE = ("mass", "threshold")
GATE_UNITS = {
    "budget": "s, share of the heads that an input asks for; mean over the inputs",
    "budget_std": "standard deviation of s over the inputs; in by_difficulty and overall, of an input's mean s over the blocks",
    "budget_per_block": "s, mean over the inputs",
    "heads": "k, heads that run; mean over the inputs, and over the blocks where no block is given",
    "num_heads": "heads that there are",
    "entropy": "of p, in nats; mean over the inputs",
    "max_entropy": "log(num_heads), in nats: where p is uniform",
    "loss": "nats per input",
    "accuracy": "percent",
    "group": "thirds of the inputs by their own loss under the model, inputs with equal losses in one group; and those that the model gets right, and wrong",
}


def by_block(record: GateRecord) -> list[dict]:
    """Mean and spread of s, mean k, mean entropy of p."""
    return [
        {
            "block": block,
            **budget_of(record.budget[:, place]),
            "heads": record.heads[:, place].double().mean().item(),
            "num_heads": record.num_heads[place],
            "entropy": record.entropy[:, place].mean().item(),
            "max_entropy": math.log(record.num_heads[place]),
        }
        for place, block in enumerate(record.blocks)
    ]


def by_class(record: GateRecord, classes: Sequence[str]) -> list[dict]:
    """Mean and spread of s for each class that has inputs, block by block; classes: names in the order of their numbers."""
    return [
        {"class": classes[label], "block": block, "inputs": int(chosen.sum()), **budget_of(record.budget[chosen, place])}
        for label in record.label.unique().tolist()
        for chosen in [record.label == label]
        for place, block in enumerate(record.blocks)
    ]


def by_difficulty(record: GateRecord) -> list[dict]:
    """The thirds by loss, and the inputs that are right and wrong: how many, mean s and k, and the accuracy."""
    third = thirds(record.loss)
    groups = {name: third == place for place, name in enumerate(THIRDS)} | {"right": record.right, "wrong": ~record.right}
    return [{"group": name} | group_row(record, chosen) for name, chosen in groups.items()]


def thirds(loss: Tensor) -> Tensor:
    """0 for the third of smallest loss, then 1 and 2, [n] int64. Equal losses stay together, in the group of the middle one among them."""
    n, order = len(loss), loss.sort().values
    below, up_to = (torch.searchsorted(order, loss, right=right) for right in (False, True))
    return 3 * (below + up_to) // (2 * n)


def group_row(record: GateRecord, chosen: Tensor) -> dict:
    """chosen [n] bool."""
    count = int(chosen.sum())
    if not count:
        return {"inputs": 0} | dict.fromkeys(("loss", "accuracy", "budget", "budget_std", "heads", "budget_per_block"))
    return {
        "inputs": count,
        "loss": record.loss[chosen].mean().item(),
        "accuracy": 100 * record.right[chosen].double().mean().item(),
        **budget_of(record.budget[chosen].mean(1)),
        "heads": record.heads[chosen].double().mean().item(),
        "budget_per_block": record.budget[chosen].mean(0).tolist(),
    }


def overall(record: GateRecord, model: nn.Module, macs: Callable[[GateRecord, nn.Module], dict] | None = None) -> dict:
    """Of all inputs; with the MACs of the model, None where there is no closed form. Args: macs: gives MACS (None: `macs_of_images`)."""
    counted = (macs or macs_of_images)(record, model)
    everything = torch.ones(len(record), dtype=torch.bool)
    return group_row(record, everything) | {"entropy": record.entropy.mean().item()} | {name: counted[name] for name in MACS}


def macs_of_images(record: GateRecord, model: nn.Module) -> dict:
    """As tools/evaluate.py gives them: all inputs have as many tokens."""
    return cost(model, record.counted, by_mean=describe(model)["rule"] in RULES_BY_IMAGE)


def budget_of(s: Tensor) -> dict:
    """Mean and spread over the inputs, s [n]."""
    return {"budget": s.mean().item(), "budget_std": s.std(correction=0).item()}


def units() -> dict:
    return GATE_UNITS | {name: UNITS[name] for name in MACS}
