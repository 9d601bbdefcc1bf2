"""Where float32 is promised, autocast does not apply."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def full_precision(device_type: str) -> AbstractContextManager:
    """Autocast off, where it is on (`meta` has none); to enter it for nothing would cost as much as a small operation."""
    is_on = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if is_on else nullcontext()


def at_least_float32(x: Tensor) -> torch.dtype:
    """float32, or x's own where that is wider."""
    return torch.promote_types(x.dtype, torch.float32)
