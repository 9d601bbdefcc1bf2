"""Peak memory of this process."""

import sys

import torch

MIB = 2**20


def peak_memory_mib(device: torch.device) -> float:
    """In MiB: on CUDA what PyTorch's allocator held at most on the device; on the CPU the largest resident set of the process, everything included.

    Both since the process began.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    import resource  # of POSIX

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest * (1 if sys.platform == "darwin" else 1024) / MIB  # Linux counts in KiB
