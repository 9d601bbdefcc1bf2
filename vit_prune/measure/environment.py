"""What a measurement ran on: device, CPU, threads, versions. No host names, no paths."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import timm
import torch

from vit_prune.version import __version__

CPUINFO = Path("/proc/cpuinfo")  # Linux
BUSY = 0.5  # processes that wanted to run in the last minute, on average, before we begin; our own start is a part of it


def environment(device: torch.device, *, threads: int, dtypes: Sequence[str], onnxruntime: bool = False) -> dict:
    """JSON-able. Matrix products in TF32 are what `float32_matmul_precision` other than "highest" allows on CUDA."""
    physical, logical = cores()
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "timm": timm.__version__, "vit_prune": __version__}
    if onnxruntime:
        versions["onnxruntime"] = importlib.metadata.version("onnxruntime")
    return {
        "device": device_name(device),
        **(cuda(device) if device.type == "cuda" else {}),
        "cpu": cpu_model(),
        "physical_cores": physical,
        "logical_cores": logical,
        "threads": threads,
        "dtypes": list(dtypes),
        "system": f"{platform.system()} {platform.machine()}",
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "versions": versions,
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def cuda(device: torch.device) -> dict:
    """Of the driver, of what torch was built for, and of the device."""
    major, minor = torch.cuda.get_device_capability(device)
    return {"driver": driver_version(), "cuda": torch.version.cuda, "compute_capability": f"{major}.{minor}"}


def driver_version() -> str:
    """NVIDIA's driver, "unknown" without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    asked = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True)
    return asked.stdout.splitlines()[0].strip() if asked.returncode == 0 and asked.stdout.strip() else "unknown"


def cpu_model() -> str:
    if CPUINFO.exists() and (found := re.search(r"^model name\s*:\s*(.+)$", CPUINFO.read_text(), re.MULTILINE)):
        return found[1].strip()
    return platform.processor() or platform.machine()


def cores() -> tuple[int, int]:
    """(physical, logical) cores that this process may use; the physical ones are the logical ones where the system does not tell."""
    logical = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    sockets, numbers = (re.findall(rf"^{name}\s*:\s*(\d+)$", text, re.MULTILINE) for name in ("physical id", "core id"))
    return min(len(set(zip(sockets, numbers, strict=False))) or logical, logical), logical


def machine_warnings(*, threads: int) -> list[str]:
    """What speaks against a measurement that begins now."""
    warnings = []
    physical, logical = cores()
    if threads > physical:
        warnings.append(f"{threads} threads on {physical} physical cores ({logical} logical) wait for each other: these are not the times of {threads} cores")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > BUSY:
        warnings.append(f"others use this machine: {load:.1f} processes wanted to run in the last minute, so times will vary")
    return warnings


def environment_text(found: dict) -> str:
    """Two lines for people."""
    gpu = f" (driver {found['driver']}, CUDA {found['cuda']}, compute capability {found['compute_capability']})" if "driver" in found else ""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    precision = f"float32 matmul precision {found['float32_matmul_precision']}" + (f", cuDNN TF32 {'on' if found['cudnn_tf32'] else 'off'}" if gpu else "")
    cpu = f"{found['cpu']}, {found['physical_cores']} physical and {found['logical_cores']} logical cores, {found['threads']} threads"
    return f"device: {found['device']}{gpu}; CPU: {cpu}; {found['system']}\n{', '.join(found['dtypes'])}; {precision}; {versions}"
