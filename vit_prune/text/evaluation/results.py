"""What one text encoder gives on the texts; `train.evaluation.results.combine` makes one row of several seeds."""

import logging

import torch
from torch import nn

from vit_prune.measure.energy import ENERGY, metered
from vit_prune.text.cost import text_macs
from vit_prune.text.data.texts import Texts, eval_loader
from vit_prune.text.evaluation.record import TextRecord, recorded
from vit_prune.train.evaluation.accuracy import evaluate
from vit_prune.train.evaluation.candidates import describe
from vit_prune.train.evaluation.results import MACS, check_loss
from vit_prune.train.evaluation.results import UNITS as OF_IMAGES

log = logging.getLogger(__name__)

COSTS = (*MACS, "tokens", "budget", "heads", "heads_spread", *ENERGY)
PER_BLOCK = ("heads_per_block",)
ALIKE = ("top1", "top5", "loss", "dense_macs", "saved", "macs_all_projected", "heads", "heads_per_block", "top1_std, top5_std, loss_std")
UNITS = {
    **{name: OF_IMAGES[name].replace("image", "text") for name in ALIKE},
    "macs": "multiply-accumulates of a text at its own length and with its own heads, padding not counted; mean over the texts",
    "macs_spread": "standard deviation of macs over the texts",
    "tokens": "of a text, padding not counted; mean over the texts",
    "budget": "s, share of the heads that a text asks for, mean over blocks and texts, where heads are gated",
    "heads_spread": "standard deviation over the texts of a text's heads, mean over the blocks",
    **{name: OF_IMAGES[name] for name in (*ENERGY, "energy_meter")},
}


def measure(path: str, model: nn.Module, texts: Texts, device: torch.device, *, batch_size: int, country: str | None) -> dict:
    """ACCURACY, COSTS, PER_BLOCK, "texts", and what `describe` and `metered` say.

    Args: country: whose electricity it is; None: the energy is not metered.
    Raises: ValueError where the outputs are not finite.
    """
    model.to(device)
    loader = eval_loader(texts, batch_size=batch_size, max_length=model.max_length, workers=0, device=device)
    with metered(country, device) as used, recorded(model) as record:
        accuracy = evaluate(model, loader, device)
    model.to("cpu")
    check_loss(path, accuracy["loss"])
    count = {"texts": accuracy.pop("images")}
    return {**describe(model), **accuracy, **count, **used, **cost(model, record), **record.summary()}


def cost(model: nn.Module, record: TextRecord) -> dict:
    """MACS of the texts, None where there is no closed form, with the reason in the log."""
    heads = None if record.budget_and_heads is None else record.budget_and_heads[1]
    try:
        return text_macs(model, record.lengths, heads)
    except (TypeError, ValueError, NotImplementedError) as error:
        log.warning("no MACs: %s", error)
        return dict.fromkeys(MACS)
