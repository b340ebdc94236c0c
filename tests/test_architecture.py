"""How the files of `iep/` depend on each other."""

import ast
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import iep

ROOT = Path(iep.__file__).parents[1]
ORDER = (
    *("iep", "errors", "runtime", "vocab", "batching", "dynamic", "asynchronous", "programs", "reward"),
    *("synth", "backbone", "program_generator", "execution_engine", "baselines", "config"),
    *("data", "models", "preprocess", "evaluation", "training", "asking"),
    *("bench", "cli"),
)
"""The folders and loose files of `iep/`; each imports only itself and what stands before it."""
WITH_CODE = {"iep", "iep.dynamic", "iep.synth"}
"""Packages that are more than a docstring: the version, and names to import."""
NAMESAKES = {"__init__", "placement"}
"""Placement is one concept, in the core and in the engine."""


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


def test_the_toolkit_does_not_need_the_benchmarks() -> None:
    for name, path in FILES.items():
        assert not [other for other in imported(path) if other.split(".")[0] == "benchmarks"], name


def test_no_file_imports_itself_by_way_of_others() -> None:
    graph = {name: imports - {name} for name, imports in IMPORTS.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(FILES)  # a circle would be a CycleError


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
        ("dynamic", {"batching", "dynamic"}),
        ("asynchronous", {"batching", "asynchronous"}),
    ],
)
def test_the_core_and_what_stands_on_it_know_nothing_of_clevr(folder: str, allowed: set[str]) -> None:
    for name, imports in IMPORTS.items():
        if part(name) == folder:
            assert {part(other) for other in imports} <= allowed, f"{name} imports {sorted(imports)}"


def test_a_package_is_a_docstring_and_its_files() -> None:
    for name, path in FILES.items():
        if path.name == "__init__.py" and name not in WITH_CODE:
            assert ast.get_docstring(module := ast.parse(path.read_text())), name
            assert len(module.body) == 1, name


def test_files_of_the_same_name_mean_the_same() -> None:
    counts = Counter(path.stem for path in FILES.values())
    assert {name for name, count in counts.items() if count > 1} <= NAMESAKES


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("iep", ("iep.", "torch")),
        ("iep.batching.graph", ("iep.dynamic", "torch")),
        ("iep.execution_engine.engine", ("iep.dynamic", "iep.config")),
    ],
)
def test_a_module_is_imported_without_what_it_does_not_need(module: str, unwanted: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert module in loaded
    assert not [name for name in loaded if name.startswith(unwanted)]


def test_the_names_of_the_package_are_imported_when_they_are_used() -> None:
    code = "import iep; print([getattr(iep, name).__name__ for name in iep.__all__], iep.dynamic.scope.__name__)"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed == "['Model', 'iep.dynamic', 'load', 'iep.reward'] scope\n"


def test_the_networks_import_no_private_name_of_torch() -> None:
    for name, path in FILES.items():
        if part(name) in ("programs", "program_generator", "execution_engine", "baselines", "models"):
            names = [other for other in imported(path) if other.startswith("torch")]
            assert not [other for other in names if "._" in other], name


HOST = """
import atexit, importlib, pkgutil, signal, sys, threading, time, warnings
from pathlib import Path

def settings():
    handlers = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
    return handlers, sys.excepthook, sys.unraisablehook, threading.excepthook, warnings.showwarning, warnings.filters[:]

def serve(ready):
    def end(*_):
        Path(sys.argv[1]).write_text("told to end")
        raise SystemExit
    signal.signal(signal.SIGTERM, end)
    ready.set()
    time.sleep(60)

def register(function, *arguments, register=atexit.register, **named):
    assert not function.__module__.startswith("iep"), function
    return register(function, *arguments, **named)

handlers = settings()[0]
sys.argv[0] = "iep-train"  # the name of a command alone makes no command
import iep.cli
assert settings()[0] == handlers
import multiprocessing
context = multiprocessing.get_context("fork")
ready = context.Event()
context.Process(target=serve, args=(ready,), daemon=True).start()
ready.wait()
signal.signal(signal.SIGCHLD, lambda *_: None)
import torchvision, torch.utils.tensorboard, h5py, filelock, matplotlib.figure  # with hooks of their own
before = settings()
atexit.register(lambda: print(settings() == before))
atexit.register = register
import iep, iep.dynamic, iep.reward, iep.data.loader, iep.training.run_training, iep.evaluation.run_evaluation
for command in pkgutil.iter_modules(iep.cli.__path__, "iep.cli."):
    importlib.import_module(command.name)
iep.load(device="cpu").ask(sys.argv[2], "How many things are there?")
print(settings() == before)
"""


def test_the_package_changes_no_handler_or_hook_of_its_host_and_ends_none_of_its_children(tmp_path: Path) -> None:
    image = ROOT / "data/sample/images/val/CLEVR_val_000002.png"
    command = [sys.executable, "-c", HOST, str(tmp_path / "child"), str(image)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\nTrue\n", "")
    assert (tmp_path / "child").read_text() == "told to end"
