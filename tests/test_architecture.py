"""The files of `iep/` depend on each other in one direction, and importing them has no side effects."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import iep

ROOT = Path(iep.__file__).parents[1]
ORDER = (
    *("iep", "errors", "runtime", "vocab", "batching", "kernels", "dynamic", "asynchronous"),
    *("programs", "reward", "synth", "backbone", "program_generator", "execution_engine", "baselines", "config"),
    *("data", "models", "preprocess", "evaluation", "training", "asking"),
    *("bench", "cli"),
)
"""The folders and loose files of `iep/`; each imports only itself and what stands before it."""
OF_NETWORKS = ("programs", "program_generator", "execution_engine", "baselines", "models")


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


def part(module: str) -> str:
    """The folder, or the loose file, that a module of `iep` belongs to."""
    return module.split(".")[1] if "." in module else module


FILES = {module_name(path): path for path in (ROOT / "iep").rglob("*.py")}
IMPORTS = {name: {other for other in imported(path) if other in FILES} for name, path in FILES.items()}


def test_the_toolkit_needs_neither_the_benchmarks_nor_private_names_of_torch() -> None:
    for name, path in FILES.items():
        for other in imported(path):
            assert not other.startswith("benchmarks"), name
            assert part(name) not in OF_NETWORKS or not other.startswith("torch") or "._" not in other, name


def test_every_file_imports_only_what_stands_before_its_folder() -> None:
    assert {part(name) for name in FILES} == set(ORDER)
    for name, imports in IMPORTS.items():
        if name == "iep":  # imports `iep.load` when it is first used
            continue
        allowed = ORDER[: ORDER.index(part(name)) + 1]
        assert {part(other) for other in imports} <= set(allowed), f"{name} imports {sorted(imports)}"


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("batching", {"batching"}),
        ("kernels", {"batching", "kernels"}),
        ("dynamic", {"batching", "kernels", "dynamic"}),
        ("asynchronous", {"batching", "asynchronous"}),
    ],
)
def test_the_core_and_what_stands_on_it_know_nothing_of_clevr(folder: str, allowed: set[str]) -> None:
    for name, imports in IMPORTS.items():
        if part(name) == folder:
            assert {part(other) for other in imports} <= allowed, f"{name} imports {sorted(imports)}"


@pytest.mark.parametrize("module", ["iep", "iep.batching.graph"])
def test_a_module_without_tensors_is_imported_without_torch(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert module in loaded
    assert "torch" not in loaded


HOST = """
import importlib, pkgutil, signal, sys, threading, warnings
import torchvision, torch.utils.tensorboard, h5py, filelock, matplotlib.figure  # with hooks of their own

def settings():
    handlers = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
    return handlers, sys.excepthook, sys.unraisablehook, threading.excepthook, warnings.showwarning, warnings.filters[:]

sys.argv[0] = "iep-train"  # the name of a command alone makes no command
before = settings()
import iep, iep.cli, iep.data.loader, iep.training.run_training, iep.evaluation.run_evaluation
for command in pkgutil.iter_modules(iep.cli.__path__, "iep.cli."):
    importlib.import_module(command.name)
iep.load(device="cpu").ask(sys.argv[1], "How many things are there?")
print(settings() == before, *(getattr(iep, name).__name__ for name in iep.__all__))
"""


def test_the_package_has_its_names_and_changes_no_handler_or_hook_of_its_host() -> None:
    image = ROOT / "data/sample/images/val/CLEVR_val_000002.png"
    ended = subprocess.run([sys.executable, "-c", HOST, image], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "True Model iep.dynamic load iep.reward\n"
