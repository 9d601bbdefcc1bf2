"""Does what was exported compute what the model computes?

B batch, images [B, C, H, W].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

DRAWS = 8  # of images, until each place of a batch has had one whose kept columns do not hang on rounding
NOISE, COPIES = 1e-5, 8  # noise larger than rounding: it changes which of two nearly equal columns is kept
Size = tuple[int, int]
Run = Callable[[Tensor], Sequence[Tensor]]


class ExportError(RuntimeError):
    """The model cannot be exported; the message says why."""


class ParityError(ExportError):
    """What was exported does not compute what the model computes."""


@dataclass(frozen=True)
class Parity:
    """The largest absolute difference to the torch model over one batch; `undecided` images were replaced, because rounding decides what they keep."""

    batch: int
    size: Size
    difference: float
    undecided: int = 0

    def __str__(self) -> str:
        replaced = f" ({self.undecided} images replaced: rounding decides which columns they keep)" if self.undecided else ""
        return f"batch {self.batch}, {self.size[0]} x {self.size[1]}: {self.difference:.1e}{replaced}"


def compare(run: Run, model: nn.Module, size: Size, batch: int, tolerance: float) -> Parity:
    """Run the exported model beside the model that it was made of, in eval mode on the CPU. Raises: ParityError.

    Where two columns are nearly equal, rounding decides which of them is kept, and the outputs differ by far more than rounding. Such an
    image, on which torch itself jumps about as far under a little noise, says nothing: another takes its place.
    """
    where, missing = f"batch {batch}, {size[0]} x {size[1]} pixels", set(range(batch))
    worst, undecided = 0.0, 0
    for draw in range(DRAWS):
        images = random_images(model, batch, size, seed=draw)
        expected = outputs(model, images)
        differences = (flat(run(images)) - expected).abs().amax(1).tolist()
        for place, difference in enumerate(differences):
            if difference <= tolerance:
                missing.discard(place)
                worst = max(worst, difference)
            elif jump(model, images[place], expected[place]) >= difference / 2:
                undecided += 1
            else:
                raise ParityError(f"the exported model differs from torch by {difference:.1e} at {where}; the tolerance is {tolerance:g}")
        if not missing:
            return Parity(batch, size, worst, undecided)
    raise ParityError(
        f"{undecided} images in {DRAWS} draws at {where} differ by more than {tolerance:g}, and torch's own outputs move as far when an image changes by "
        f"{NOISE:g}: rounding decides in this model, so give a larger tolerance, or train or calibrate it first"
    )


def random_images(model: nn.Module, batch: int, size: Size, seed: int = 0) -> Tensor:
    """Normal, on the CPU, with as many channels as the model takes."""
    channels = getattr(model, "in_chans", None) or (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (3,))[0]
    return torch.randn(batch, channels, *size, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def outputs(model: nn.Module, images: Tensor) -> Tensor:
    """Everything that the model returns, [B, values]."""
    return flat(tree_leaves(model(images)))


def flat(values: Sequence[Tensor]) -> Tensor:
    """Outputs [B, ...] side by side, [B, values]."""
    return torch.cat([value.flatten(1) for value in values], dim=1)


def jump(model: nn.Module, image: Tensor, expected: Tensor) -> float:
    """How far torch's own outputs [values] move when the image [C, H, W] changes by less than can be seen."""
    noise = torch.randn(COPIES, *image.shape, generator=torch.Generator().manual_seed(0))
    return (outputs(model, image + NOISE * noise) - expected).abs().max().item()
