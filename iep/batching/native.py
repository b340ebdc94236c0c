"""C source beside the modules -> functions on the memory of tensors, compiled at first use, kept in the user's cache.

For small loops in which PyTorch would go over memory many times. Where there is no C compiler, or IEP_NATIVE=0 is set,
`library` is None, and the caller has PyTorch do it: every kernel here has such a twin, to which it is tested.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import torch

FLAGS = ("-O3", "-march=native", "-ffast-math", "-fPIC")
FLAGS_OF_X86 = ("-mno-recip",)
"""Its approximate reciprocal of infinity, one step refined, is not a number; division is as fast here."""
TYPES = {torch.float32: "float", torch.float64: "double", torch.int64: "long"}
WORTH_A_THREAD = 1 << 17
"""Numbers that a thread should have to work on, so that to wake it pays."""


@lru_cache
def library(name: str) -> ctypes.CDLL | None:
    """What `name`.c, in whichever part of this package, compiles to; None without a compiler."""
    if os.environ.get("IEP_NATIVE") == "0":
        return None
    source = next(Path(__file__).parents[1].glob(f"*/{name}.c"), None)
    if source is None:
        return None
    flags = (*FLAGS, *(FLAGS_OF_X86 if platform.machine() == "x86_64" else ()))
    try:
        compiler = shlex.split(os.environ.get("CC", "cc"))
        key = hashlib.sha256(repr((source.read_text(), compiler, flags, _processor())).encode()).hexdigest()[:16]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "iep"
        built = cache / f"{name}-{key}.so"
        if not built.exists():
            _compile(source, compiler, flags, built)
        return ctypes.CDLL(str(built))
    except (OSError, subprocess.SubprocessError, RuntimeError, ValueError):  # the last two: no home, CC="'"
        return None


@lru_cache
def function(library_name: str, name: str, dtype: torch.dtype, arguments: str) -> Callable[..., None] | None:
    """A library's function for numbers of that dtype; None where PyTorch is to do it.

    Args:
        arguments: of each, l for an integer or p for an address.
    """
    built = library(library_name)
    if built is None or dtype not in TYPES:
        return None
    found = built[f"{name}_{TYPES[dtype]}"]
    found.argtypes = [{"l": ctypes.c_long, "p": ctypes.c_void_p}[each] for each in arguments]
    found.restype = None
    return found


def _compile(source: Path, compiler: list[str], flags: tuple[str, ...], built: Path) -> None:
    """Other processes may compile the same at the same time: the last to end wins, and each finds a whole file."""
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        made = Path(folder) / built.name
        compiled = str(made.with_suffix(".o"))
        # Linked apart: with -ffast-math gcc would link code that turns denormal numbers off in the whole thread.
        for command in ([*flags, "-c", "-o", compiled, str(source)], ["-shared", "-o", str(made), compiled, "-lm"]):
            subprocess.run([*compiler, *command], check=True, capture_output=True, timeout=120)
        made.replace(built)


def _processor() -> str:
    """What the compiled code may depend on: caches are shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.libc_ver()} {flags}"


def over_rows(kernel: Callable[..., None], rows: int, numbers: int, arguments: tuple[int, ...]) -> None:
    """`kernel(start, end, *arguments)` over all rows, by as many threads as PyTorch uses, if it pays.

    Args:
        numbers: how many there are in all rows together.
    """
    threads = min(torch.get_num_threads(), numbers // WORTH_A_THREAD, rows)
    if threads < 2:
        kernel(0, rows, *arguments)
        return
    parts = deque(pairwise(rows * part // threads for part in range(threads + 1)))
    errors = []

    def work(_: int | None = None) -> None:
        try:
            while (part := _next(parts)) is not None:
                kernel(*part, *arguments)
        except BaseException as error:  # raised below, in the caller's thread
            errors.append(error)

    if openmp := _openmp():
        openmp(_WORK(work), None, threads, 0)
    else:
        others = [_pool().submit(work) for _ in range(threads - 1)]
        work()
        for other in others:
            other.result()
    if not errors:
        work()  # what an interrupted thread may have left
    if errors:
        raise errors[0]


def _next(parts: deque[tuple[int, int]]) -> tuple[int, int] | None:
    """A part that no other thread has taken; None where all are."""
    with suppress(IndexError):  # asking first would leave another thread the time to take it
        return parts.popleft()
    return None


_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_forked: list[bool] = []


@lru_cache
def _openmp() -> Callable[..., None] | None:
    """GNU OpenMP's way to have its threads do something, if PyTorch came with it or one that has the same: these
    wait for work in a loop, and other threads would have to share processors with them."""
    if _forked:
        return None
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except (OSError, AttributeError, TypeError):
        return None
    found.argtypes, found.restype = [_WORK, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return found


@lru_cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1)


def _forget_threads() -> None:
    """A process that was forked from this one has none of its threads, and OpenMP does not know."""
    _pool.cache_clear()
    _openmp.cache_clear()
    _forked.append(True)


os.register_at_fork(after_in_child=_forget_threads)
