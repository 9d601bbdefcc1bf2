"""Draw patches evenly: systematic sampling with given inclusion probabilities (Madow 1949), and how new a patch is among the others.

B batch, n patches, m of them drawn, r dims of the features.  Nothing here is random: the same weights draw the same patches.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_prune.ops.precision import at_least_float32, full_precision

START = 0.5  # of the first step, in steps
LEAST_NEW = 1e-4  # of a patch that has its double: its weight stays above zero


def novelty(features: Tensor, visible: Tensor | None = None) -> Tensor:
    """1 - cosine similarity to the nearest patch of the other half (even and odd places): features [B, n, r] -> [B, n] float32.

    It costs (n / 2)^2 r multiply-accumulates. Hidden patches (visible [B, n] bool) are nobody's nearest; a patch alone is new.
    """
    features = F.normalize(features.to(at_least_float32(features)), dim=-1)
    if visible is not None:
        features = features * visible[..., None]
    even, odd = features[:, 0::2], features[:, 1::2]
    if not odd.shape[1]:
        return torch.ones_like(features[..., 0])
    with full_precision(features):
        similarity = odd @ even.mT
    if visible is not None:
        similarity = similarity.masked_fill(~(visible[:, 1::2, None] & visible[:, None, 0::2]), -1)
    new = features.new_empty(features.shape[:2])
    new[:, 0::2], new[:, 1::2] = 1 - similarity.amax(1), 1 - similarity.amax(2)
    return new.clamp(min=LEAST_NEW)


def above_zero(weight: Tensor) -> Tensor:
    """weight [B, n] >= 0 with a floor under it, so that where few are above it the rest of a sample is spread over the image too."""
    return weight.clamp(min=torch.finfo(weight.dtype).tiny / LEAST_NEW)


def inclusion(weight: Tensor, count: Tensor) -> Tensor:
    """Inclusion probabilities in proportion to weight, none above 1: weight [B, n] >= 0, count [B, 1] -> [B, n] with sums count."""
    falling = weight.sort(dim=-1, descending=True).values
    rest = falling.flip(-1).cumsum(-1).flip(-1)  # of this one and all below it
    room = count - torch.arange(weight.shape[1], device=weight.device)
    certain = ((falling * room >= rest) & (falling > 0)).sum(-1, keepdim=True)  # with all above it certain, this one's share is 1 or more
    rest, falling = F.pad(rest, (0, 1), value=1.0), F.pad(falling, (1, 0), value=torch.inf)
    share = weight * ((count - certain) / rest.gather(1, certain).clamp(min=torch.finfo(rest.dtype).tiny))
    return share.clamp(max=1).masked_fill(weight >= falling.gather(1, certain), 1)


def systematic(weight: Tensor, count: Tensor) -> Tensor:
    """Rank the patches: weight [B, n] >= 0, count [B, 1] -> [B, n]; the `count` largest are the sample.

    The probabilities are laid end to end in the order of the patches, and one patch is taken per unit of length: neighbours share, so that the
    sample is spread over the image, and dense where weights are high.
    """
    probability = inclusion(weight, count)
    end = probability.cumsum(-1)
    taken = (end + START).floor() - (end - probability + START).floor()
    return taken + probability  # above 1 what is taken; rounding may take one too many or too few: the likeliest win then
