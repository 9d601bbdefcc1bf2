import json
import platform

import pytest
import torch

from vit_prune.measure import environment as module
from vit_prune.measure.environment import environment, environment_text, machine_warnings

CPUINFO = """processor\t: 0
model name\t: AMD EPYC 7763 64-Core Processor
physical id\t: 0
core id\t\t: 0

processor\t: 1
model name\t: AMD EPYC 7763 64-Core Processor
physical id\t: 0
core id\t\t: 0

processor\t: 2
model name\t: AMD EPYC 7763 64-Core Processor
physical id\t: 0
core id\t\t: 1

processor\t: 3
model name\t: AMD EPYC 7763 64-Core Processor
physical id\t: 0
core id\t\t: 1
"""


@pytest.fixture
def two_cores(monkeypatch, tmp_path):
    """Two cores of two threads each."""
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    monkeypatch.setattr(module, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(module.os, "getloadavg", lambda: (0.1, 0.1, 0.1), raising=False)


def test_the_header_says_what_it_ran_on(two_cores):
    found = json.loads(json.dumps(environment(torch.device("cpu"), threads=2, dtypes=["bfloat16"])))
    assert (found["device"], found["cpu"], found["physical_cores"], found["logical_cores"]) == ("CPU", "AMD EPYC 7763 64-Core Processor", 2, 4)
    assert set(found["versions"]) == {"python", "torch", "timm", "vit_prune"}
    text = environment_text(found)
    assert "device: CPU; CPU: AMD EPYC 7763 64-Core Processor, 2 physical and 4 logical cores, 2 threads" in text
    assert f"torch {torch.__version__}" in text
    assert "bfloat16; float32 matmul precision highest" in text


def test_no_host_name_and_no_path(two_cores):
    text = json.dumps(environment(torch.device("cpu"), threads=1, dtypes=["float32"])) + environment_text(
        environment(torch.device("cpu"), threads=1, dtypes=["float32"])
    )
    assert "/" not in text
    assert platform.node() not in text or len(platform.node()) < 4


def test_onnxruntime_has_a_version_where_it_is_used():
    onnxruntime = pytest.importorskip("onnxruntime")
    assert environment(torch.device("cpu"), threads=1, dtypes=[], onnxruntime=True)["versions"]["onnxruntime"] == onnxruntime.__version__


def test_threads_beyond_the_cores_and_other_users_are_warned_of(two_cores, monkeypatch):
    assert machine_warnings(threads=2) == []
    assert machine_warnings(threads=12)[0].startswith("12 threads on 2 physical cores (4 logical) wait for each other")
    monkeypatch.setattr(module.os, "getloadavg", lambda: (1.5, 0.1, 0.1))
    assert machine_warnings(threads=1) == ["others use this machine: 1.5 processes wanted to run in the last minute, so times will vary"]


def test_without_proc_the_platform_is_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "CPUINFO", tmp_path / "nothing")
    monkeypatch.setattr(module.platform, "processor", lambda: "some CPU")
    assert module.cpu_model() == "some CPU"
    physical, logical = module.cores()
    assert physical == logical > 0


@pytest.mark.gpu
def test_a_gpu_has_a_name_a_driver_and_a_capability():
    found = environment(torch.device("cuda"), threads=1, dtypes=["float32"])
    assert {"driver", "cuda", "compute_capability"} <= set(found)
    assert found["device"] in environment_text(found)
