"""Features files and questions -> how many questions a second reach whoever trains: the loader alone, no network.

A pass hands out every image's features once: in image order, the questions of an image together; or in random order,
one question of each image, as training at CLEVR's size draws them, where an image hardly ever comes twice in a batch.
It is cold when the file's pages have been dropped from memory before it. Passes take turns, as in `engine.py`.
"""

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch

from iep.bench.measure import Spread, spread
from iep.data_files import Questions
from iep.datasets import Batch, ClevrDataset
from iep.execution_engine.plans import Planner
from iep.features import Features
from iep.loader import Batches, Loading, on_device

ORDERS = ("image", "random")
SOURCES = ("cold", "warm", "memory")


@dataclass(frozen=True)
class Way:
    """One way of loading. On a CPU batches are counted as they come, in the file's dtype; converting them to float32 is
    the network's work there."""

    source: str
    """Where features come from: `cold`, the disk; `warm`, the system's cache of the file; `memory`, shared memory."""
    order: str
    """`image` or `random`."""
    planning: bool
    """Whether workers make the engine's plans too."""
    workers: int


@dataclass(frozen=True)
class Row:
    """What was measured of one way."""

    way: Way
    questions_per_second: Spread
    bytes_per_second: Spread
    """Of features, as they lie in the file."""
    resident: float
    """Share of the file's pages that were in memory before its passes; the greatest."""


@dataclass(frozen=True)
class Setting:
    """What all passes have in common."""

    questions: Questions
    features: Features
    in_memory: Features | None
    """The same, in memory; None where that is not measured."""
    planner: Planner | None
    batch_size: int
    prefetch: int
    max_seconds: float
    """A pass ends after so long, if not before."""
    device: torch.device
    seed: int


def ways(sources: Sequence[str], orders: Sequence[str], planning: Sequence[bool], workers: Sequence[int]) -> list[Way]:
    """All combinations."""
    return [Way(*each) for each in product(sources, orders, planning, workers)]


def compare(
    setting: Setting, chosen: Sequence[Way], repeat: int, progress: Callable[[str], None] = lambda what: None
) -> list[Row]:
    """Measure the ways in turns, `repeat` times each; `progress` hears what is measured next.

    Raises:
        InputError: features cannot be read.
    """
    figures: dict[Way, list[tuple[float, float, float]]] = {way: [] for way in chosen}
    for number in range(repeat):
        for way in chosen:
            progress(f"{way.source} {way.order} workers {way.workers}")
            figures[way].append(_measure(setting, way, number))
    rows = []
    for way, measured in figures.items():
        questions, sizes, resident = zip(*measured, strict=True)
        rows.append(Row(way, spread(questions), spread(sizes), max(resident)))
    return rows


def _measure(setting: Setting, way: Way, number: int) -> tuple[float, float, float]:
    """Questions and bytes a second, and the share of the file that was in memory before."""
    path = setting.features.path
    if way.source == "cold":
        drop_pages(path)
    elif way.source == "warm":
        touch_pages(path)
    resident = resident_share(path)
    batches = _batches(setting, way, number)
    if setting.device.type == "cuda":
        batches = on_device(batches, setting.device)
    for _ in range(_warm_up(setting, way)):  # the workers begin, and touch the memory that they share
        next(batches)
    start = time.perf_counter()
    questions = images = 0
    for batch in batches:
        questions += len(batch.index)
        images += len(batch.features)
        if time.perf_counter() - start > setting.max_seconds:
            break
    if setting.device.type == "cuda":
        torch.cuda.synchronize(setting.device)
    elapsed = time.perf_counter() - start
    return questions / elapsed, images * setting.features.row_bytes / elapsed, resident


def _warm_up(setting: Setting, way: Way) -> int:
    """Batches before the clock starts: two a worker and one, but no more than half of a small file's."""
    rows = len(order_rows(setting.questions.image_idxs, way.order, [0]))
    return min(1 + 2 * way.workers, -(-rows // setting.batch_size) // 2)


def _batches(setting: Setting, way: Way, number: int) -> Iterator[Batch]:
    rows = order_rows(setting.questions.image_idxs, way.order, [setting.seed, number])
    features = setting.in_memory if way.source == "memory" else setting.features
    dataset = ClevrDataset(setting.questions, features, setting.planner if way.planning else None)
    size = setting.batch_size

    def choose(batch: int) -> tuple[np.ndarray, None]:
        return rows[batch * size : (batch + 1) * size], None

    loading = Loading(way.workers, setting.prefetch, pin=setting.device.type == "cuda")
    numbers = range(-(-len(rows) // size))
    return iter(Batches(dataset.batch, choose, numbers, size * dataset.bytes_an_image, loading))


def order_rows(image_idxs: np.ndarray, order: str, seed: Sequence[int]) -> np.ndarray:
    """Positions of questions in the order of a pass; in random order one of each image."""
    if order == "image":
        return np.argsort(image_idxs, kind="stable")
    random = np.random.default_rng(seed)
    shuffled = random.permutation(len(image_idxs))
    _, firsts = np.unique(image_idxs[shuffled], return_index=True)
    return random.permutation(shuffled[firsts])


def drop_pages(path: Path) -> None:
    """Have the system forget what it holds in memory of a file; what is not yet on disk is written first."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def touch_pages(path: Path) -> None:
    """Read a file once, so that the system holds it in memory."""
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(2**22)
        while file.readinto(buffer):
            pass


def resident_share(path: Path) -> float:
    """The share of a file's pages that the system holds in memory (`mincore`)."""
    size = path.stat().st_size
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
        values = np.frombuffer(mapped, dtype=np.uint8)
        pages = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
        where, to = ctypes.c_void_p(values.ctypes.data), ctypes.c_void_p(pages.ctypes.data)
        failed = ctypes.CDLL(None, use_errno=True).mincore(where, ctypes.c_size_t(size), to)
        error = ctypes.get_errno()
        del values
    if failed:
        raise OSError(error, os.strerror(error), str(path))
    return float((pages & 1).mean())
