"""Files of a run: whole at any time, whatever happens to the disk or the process."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from vit_prune.train.run import run
from vit_prune.train.state import RunFolder

FULL_DISK = """
import json, resource, sys, torch
torch.set_num_threads(1)
sys.path.insert(0, "tools")
from vit_prune.train.cli import main
from vit_prune.train.config import TrainConfig
from vit_prune.train.run import run
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
main(lambda: run(TrainConfig(**json.loads(sys.argv[1]))))
"""


def with_full_disk(config, limit: int) -> subprocess.CompletedProcess:
    """The run in a process that cannot write files of more than `limit` bytes."""
    command = [sys.executable, "-W", "ignore", "-c", FULL_DISK, json.dumps(asdict(config)), str(limit)]
    return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["resume.pt", "model.safetensors"])
def test_a_full_disk_ends_the_run_with_a_sentence_and_leaves_the_last_good_files(tiny_config, name):
    config = tiny_config(epochs=2)
    folder = Path(run(tiny_config(epochs=1))["folder"])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "recipe.yaml"}
    size = (folder / "resume.pt" if name == "resume.pt" else folder / "last" / name).stat().st_size
    done = with_full_disk(tiny_config(**{**asdict(config), "resume": "auto"}), size // 2)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert name in done.stderr.splitlines()[-1]
    if name == "resume.pt":  # the epoch left no trace
        assert (folder / "resume.pt").read_bytes() == before[folder / "resume.pt"]
        assert (folder / "summary.csv").read_bytes() == before[folder / "summary.csv"]
    assert not list(folder.rglob("*.tmp"))
    assert RunFolder(folder).read()["rows"][-1]["epoch"] == 1
    assert run(tiny_config(epochs=2, resume="auto"))["last"]["epoch"] == 2


def test_a_commit_that_fails_halfway_leaves_the_old_file_whole(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    folder.open()
    folder.commit({"epoch": 1})

    def half(content, path):
        path.write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match=r"cannot write .*resume\.pt: PytorchStreamWriter failed"):
        folder.commit({"epoch": 2})
    assert folder.read() == {"epoch": 1}
    assert {path.name for path in folder.path.iterdir()} == {".lock", "resume.pt"}
