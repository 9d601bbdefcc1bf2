"""Peak memory: of this process so far, and of one call."""

import ctypes
import gc
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

MIB, KIB_PER_MIB = 2**20, 2**10
STATUS = Path("/proc/self/status")  # Linux
CLEAR = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # written to CLEAR: VmHWM becomes the resident set of now


@dataclass(frozen=True)
class Peak:
    """MiB. rest: held before the call (weights, inputs; on the CPU the whole process). None where the system does not tell it."""

    peak_mib: float
    rest_mib: float | None

    @property
    def above_rest_mib(self) -> float | None:
        """What the call itself needs: activations, gradients, workspaces, the output."""
        return None if self.rest_mib is None else self.peak_mib - self.rest_mib


def peak_memory_mib(device: torch.device) -> float:
    """In MiB: on CUDA what PyTorch's allocator held at most on the device; on the CPU the largest resident set of the process, everything included.

    Both since the process began.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    if STATUS.exists():  # ru_maxrss begins at what the process held that started this one
        return status_mib("VmHWM")
    import resource  # of POSIX

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (MIB if sys.platform == "darwin" else KIB_PER_MIB)


def peak_of_call(call: Callable[[], object], device: torch.device, *, before: Callable[[], object] | None = None) -> Peak:
    """Peak memory of the second call: the first one sets up what stays (libraries, kernels' packed weights), and that is a part of the rest.

    On the CPU it means what it says only in a process that does little else, see `measure.fresh`.

    Args: before: called between the two, to drop what the first left and the second makes anew (gradients).
    """
    call()
    if before is not None:
        before()
    if device.type == "cuda":
        return peak_on_cuda(call, device)
    give_back_free_memory()
    rest = reset_peak()
    call()
    return Peak(peak_memory_mib(device), rest)


def peak_on_cuda(call: Callable[[], object], device: torch.device) -> Peak:
    """What PyTorch's allocator gave out, which is less than what it and the CUDA context hold."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    rest = torch.cuda.memory_allocated(device) / MIB
    call()
    torch.cuda.synchronize(device)
    return Peak(peak_memory_mib(device), rest)


def give_back_free_memory() -> None:
    """What is freed goes back to the system, where the C library can do that (glibc): else the next call would find it there."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # another C library
        return


def reset_peak() -> float | None:
    """Let the peak begin at the resident set of now; returns that in MiB, None where the peak cannot be reset (only Linux can)."""
    try:
        CLEAR.write_text(RESET_PEAK)
    except OSError:
        return None
    return status_mib("VmRSS")


def status_mib(name: str) -> float:
    """A size that Linux tells of this process."""
    return int(re.search(rf"^{name}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)[1]) / KIB_PER_MIB
