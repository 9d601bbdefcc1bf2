"""Where float32 is promised, autocast does not apply."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

AS_IT_IS = nullcontext()


def full_precision(x: Tensor) -> AbstractContextManager:
    """Autocast off on x's device, where it is on. Elsewhere the device is not read: its name costs as much as a small operation."""
    if not torch._C._is_any_autocast_enabled() or not torch.amp.is_autocast_available(x.device.type):  # meta has none
        return AS_IT_IS
    return torch.autocast(x.device.type, enabled=False)


def at_least_float32(x: Tensor) -> torch.dtype:
    """float32, or x's own where that is wider."""
    return torch.promote_types(x.dtype, torch.float32)
