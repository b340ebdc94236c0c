"""How the files of the core depend on each other."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import iep

ROOT = Path(iep.__file__).parents[1]
FOLDERS = ("batching", "dynamic", "workloads", "execution_engine", "bench")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path) -> set[str]:
    """The modules that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


FILES = {module_name(path): path for folder in FOLDERS for path in (ROOT / "iep" / folder).rglob("*.py")}
IMPORTS = {name: imported(path) for name, path in FILES.items()}


def test_no_file_of_the_core_imports_itself_by_way_of_others() -> None:
    graph = {
        name: {other for other in imports if other in FILES and other != name} for name, imports in IMPORTS.items()
    }
    assert len(list(TopologicalSorter(graph).static_order())) == len(FILES)  # a circle would be a CycleError


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("batching", ["batching"]),
        ("dynamic", ["batching", "dynamic"]),
        ("workloads", ["batching", "dynamic", "workloads", "errors", "files"]),
    ],
)
def test_a_folder_imports_only_what_is_below_it(folder: str, allowed: list[str]) -> None:
    for name, imports in IMPORTS.items():
        if name.startswith(f"iep.{folder}"):
            ours = {other.split(".")[1] for other in imports if other.startswith("iep.")}
            assert ours <= set(allowed), f"{name} imports {ours - set(allowed)}"


def test_the_graph_can_be_imported_without_torch_and_the_front_ends() -> None:
    code = "import sys, iep.batching.graph; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "iep.batching.graph" in loaded
    assert not [name for name in loaded if name.startswith(("iep.dynamic", "torch"))]
