"""The project imports itself under one name, and importing it is cheap."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("planner", "cost_models", "hardware_profiles", "models", "api")
BARE = re.compile(rf"^\s*(?:from|import) (?:{'|'.join(FOLDERS)})\b", re.MULTILINE)
SOURCES = sorted(
    path
    for folder in (*FOLDERS, "shardwright", "tests", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_module_imports_a_folder_by_its_bare_name(path: Path) -> None:
    assert not BARE.search(path.read_text())


@pytest.mark.parametrize(
    ("package", "must_not_import"),
    [("cost_models", "jax"), ("hardware_profiles", "jax"), ("planner/solver", "jax")],
)
def test_dependencies_point_one_way(package: str, must_not_import: str) -> None:
    for path in (ROOT / package).glob("*.py"):
        assert not re.search(rf"^\s*(from|import) {must_not_import}\b", path.read_text(), re.M)


def test_importing_the_package_loads_neither_jax_nor_a_solver() -> None:
    code = (
        "import shardwright, sys; "
        "print([m for m in ('jax', 'ortools', 'numba', 'networkx') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
