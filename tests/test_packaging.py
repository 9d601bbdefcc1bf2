import configparser
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def listed():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return set(parser["options"]["packages"].split())


def on_disk():
    folders = {path.parent.relative_to(ROOT) for path in ROOT.glob("vit_prune/**/__init__.py")}
    return {".".join(folder.parts) for folder in folders} | {"vit_prune.kernels"}


def test_every_package_is_listed_by_name():
    assert listed() == on_disk()  # `find:` would drop the mapped folder kernels/ from the wheel in silence


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(copy)]
    subprocess.run(command, capture_output=True, text=True, check=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_every_module_and_nothing_else(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    expected = {str(path.relative_to(ROOT)) for path in ROOT.glob("vit_prune/**/*.py")}
    expected |= {"vit_prune/" + str(path.relative_to(ROOT)) for path in ROOT.glob("kernels/**/*.py")}
    assert held == expected


def test_the_wheel_imports_from_an_empty_environment(wheel, tmp_path):
    """A new venv that sees this one's dependencies, but neither the checkout nor its editable install."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    zipfile.ZipFile(wheel).extractall(site)
    dependencies = Path(__import__("torch").__file__).parents[1]
    (site / "dependencies.pth").write_text(f"{dependencies}\n")  # .pth files inside it, the editable install's among them, are not read
    imports = "\n".join(f"import {name}" for name in sorted(listed()))
    code = f"{imports}\nimport timm\nassert vit_prune.__file__.startswith({str(site)!r})\nassert timm.is_model('deit_s_bias')\nprint('fine')"
    done = subprocess.run([str(tmp_path / "venv/bin/python"), "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "fine", done.stderr
