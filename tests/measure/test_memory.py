"""Peak memory: of this process and of one call, in MiB."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from vit_prune.measure.fresh import Job, peak_in_fresh_process
from vit_prune.measure.memory import MIB, peak_of_call

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


class Holds(nn.Module):
    """Needs 96 MiB for the length of a call, returns one number, and holds 32 MiB of weights."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32 * MIB // 4))

    def forward(self, x):
        return torch.ones(96 * MIB // 4, device=x.device).sum() + self.weight[0] * x


def test_the_peak_of_one_call_is_told_apart_from_what_was_held_before():
    """In a fresh process: what this one has allocated, and the call's own first run, are not in it."""
    held = torch.ones(2**27)  # 512 MiB
    peak = peak_in_fresh_process(Job(Holds().eval(), (torch.ones(1),)))
    assert len(held)
    assert peak.above_rest_mib == pytest.approx(96, abs=8)
    assert peak.peak_mib == pytest.approx(peak.rest_mib + peak.above_rest_mib)


class Gradients(nn.Module):
    """64 MiB of weights, and as much of gradients."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64 * MIB // 4))

    def forward(self, x):
        return self.weight[:1] * x


def test_gradients_are_a_part_of_a_training_steps_own_peak():
    """Those of the step before are not held while it is measured."""
    peak = peak_in_fresh_process(Job(Gradients(), (torch.ones(1),), mode="train"))
    assert peak.above_rest_mib == pytest.approx(64, abs=8)


def test_a_failure_in_the_process_is_one_sentence():
    with pytest.raises(ChildProcessError, match=r"peak memory of Linear could not be measured in a process of its own: RuntimeError: mat1 and mat2"):
        peak_in_fresh_process(Job(nn.Linear(3, 3), (torch.ones(1, 2),)))


def test_a_model_that_cannot_be_sent_is_named():
    model = nn.Linear(3, 3)
    model.extra = lambda x: x
    with pytest.raises(ValueError, match="the model cannot be sent to a process of its own"):
        peak_in_fresh_process(Job(model, (torch.ones(1, 3),)))


@pytest.mark.gpu
def test_on_cuda_the_allocators_peak_is_of_the_call_alone():
    device = torch.device("cuda")
    model, x = Holds().to(device), torch.ones(1, device=device)
    with torch.inference_mode():
        peak = peak_of_call(lambda: model(x), device)
    assert peak.above_rest_mib == pytest.approx(96, abs=8)
