"""A file imports only from its own floor or from lower ones (docs/layout.md)."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = {"kernels": 0, "ops": 1, "methods": 2, "patch": 3}  # anything else in the package: 4
FILES = [*ROOT.glob("vit_prune/**/*.py"), *ROOT.glob("kernels/**/*.py")]


def floor(module: str) -> int:
    parts = module.split(".")
    return FLOORS.get(parts[1], 4) if len(parts) > 1 else 4


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("vit_prune", *parts) if parts[0] == "kernels" else parts).removesuffix(".__init__")


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def test_no_file_imports_from_a_higher_floor():
    upward = [
        f"{module_of(path)} imports {name}"
        for path in FILES
        for name in imports(path)
        if name.split(".")[0] == "vit_prune" and floor(name) > floor(module_of(path))
    ]
    assert FILES
    assert upward == []


def test_kernels_are_imported_under_the_packages_name():
    for path in [*FILES, *ROOT.glob("tools/*.py"), *ROOT.glob("tests/**/*.py")]:
        assert not [name for name in imports(path) if name.split(".")[0] == "kernels"], path


def test_tools_stay_scripts():
    assert [path.name for path in ROOT.glob("tools/*.py") if len(path.read_text().splitlines()) > 100] == []
