"""Run a tool as from its command line, but in this process."""

import runpy
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def run_tool(monkeypatch, capsys):
    """run_tool("train.py", "--flag", value) -> (exit status or None, stdout, stderr)."""

    def call(name: str, *flags: object) -> tuple[int | str | None, str, str]:
        tool = str(TOOLS / name)
        monkeypatch.setattr(sys, "argv", [tool, *map(str, flags)])
        try:
            runpy.run_path(tool, run_name="__main__")
            code = None
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
