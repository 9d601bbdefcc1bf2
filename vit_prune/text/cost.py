"""What texts cost: each at its own length and with its own heads, padding not counted.  n texts, L blocks."""

import torch
from torch import Tensor, nn

from vit_prune.measure.macs import macs
from vit_prune.train.evaluation.results import head_prices


def text_macs(model: nn.Module, lengths: Tensor, heads: Tensor | None) -> dict:
    """Mean and standard deviation over the texts, see `UNITS` of train.evaluation.results.

    Args: lengths: tokens of each text, [n]. heads: that run in each block, [n, L]; None where none are gated.
    Returns: {"macs", "macs_spread", "dense_macs", "saved": percent, "macs_all_projected"}; the last is None where no heads are gated.
    """
    ours, dense, projected = (torch.zeros(len(lengths), dtype=torch.float64) for _ in range(3))
    for length in lengths.unique().tolist():
        texts = lengths == length
        if heads is None:
            counts = macs(model, num_tokens=length)
            ours[texts], dense[texts] = counts.total, counts.dense
            continue
        one, price, of_all = head_prices(model, num_tokens=length)
        more = heads[texts].double() - 1
        ours[texts] = one.total + more @ torch.tensor(price, dtype=torch.float64)
        projected[texts] = one.total_all_projected + more @ torch.tensor(of_all, dtype=torch.float64)
        dense[texts] = one.dense
    mean, whole = ours.mean().item(), dense.mean().item()
    return {
        "macs": round(mean),
        "macs_spread": round(ours.std(correction=0).item()),
        "dense_macs": round(whole),
        "saved": 100 * (1 - mean / whole),
        "macs_all_projected": None if heads is None else round(projected.mean().item()),
    }
