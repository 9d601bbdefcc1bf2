"""Peak memory: of this process, in MiB."""

import subprocess
import sys

import torch

PROGRAM = """
import torch
from vit_prune.measure.memory import MIB, peak_memory_mib
cpu = torch.device("cpu")
before = peak_memory_mib(cpu)
held = torch.ones(512 * MIB // 4)
del held
print(peak_memory_mib(cpu) - before)
"""


def test_the_peak_counts_mebibytes_and_stays_when_the_memory_is_given_back():
    """In a process of its own, whose peak no other test has raised: 512 MiB more, neither bytes nor KiB."""
    held = torch.ones(2**28)  # 1 GiB here, which a process that is started now did not hold itself
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert len(held)
    assert 450 < float(done.stdout) < 600
