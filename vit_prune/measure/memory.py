"""Peak memory of this process."""

import re
import sys
from pathlib import Path

import torch

MIB, KIB_PER_MIB = 2**20, 2**10
STATUS = Path("/proc/self/status")  # Linux


def peak_memory_mib(device: torch.device) -> float:
    """In MiB: on CUDA what PyTorch's allocator held at most on the device; on the CPU the largest resident set of the process, everything included.

    Both since the process began.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    if STATUS.exists():  # ru_maxrss begins at what the process held that started this one
        return int(re.search(r"^VmHWM:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)[1]) / KIB_PER_MIB
    import resource  # of POSIX

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (MIB if sys.platform == "darwin" else KIB_PER_MIB)
