"""What a user asks of `iep-bench loader` -> a table and JSON: opens or makes the data, measures, writes."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from iep.bench.loader import Row, Setting, compare, ways
from iep.bench.machine import describe_machine, machine_line
from iep.bench.measure import Spread
from iep.bench.table import format_table
from iep.bench.workload import generated
from iep.data_files import Questions, open_split
from iep.devices import resolve_device
from iep.errors import InputError
from iep.execution_engine.plans import Planner, plan_programs
from iep.features import Features
from iep.files import check_writable, write_bytes, write_json
from iep.preprocess.features_file import FeaturesSpec, feature_rows
from iep.vocab import Vocab

FORMAT = "iep loader benchmark 1"
REPORT, TABLE = "loader.json", "loader.txt"
QUESTIONS_PER_IMAGE = 10
FEATURE_SHAPE = (1024, 14, 14)
DISTINCT_PROGRAMS = 2560
QUESTION_LENGTH = 46
_BLOCK = 64


@dataclass(frozen=True)
class LoaderBenchmark:
    """What to measure, and with what."""

    sources: tuple[str, ...]
    orders: tuple[str, ...]
    planning: tuple[bool, ...]
    workers: tuple[int, ...]
    data: Path | None = None
    """Directory that `iep-preprocess` wrote; None to have a file made."""
    split: str = "val"
    images: int = 10_000
    """Of the file made."""
    batch_size: int = 256
    prefetch: int = 2
    repeat: int = 3
    max_seconds: float = 20.0
    device: str = "cpu"
    seed: int = 0


def run_loader_benchmark(
    benchmark: LoaderBenchmark,
    command: str,
    out: Path | None = None,
    say: Callable[[str], None] = print,
    progress: Callable[[str], None] = lambda what: None,
) -> list[Row]:
    """Measure every way of loading; a file that is made lies in `out`, or where temporary files do, and is removed.

    Raises:
        InputError: a file is missing or damaged, the split has no programs to plan, or disk or memory are too small.
    """
    if out is not None:
        check_writable([out / REPORT, out / TABLE])
    device = resolve_device(benchmark.device)
    with _data(benchmark, out) as (questions, features, planner):
        machine = describe_machine(device)
        heading = "\n".join([f"$ {command}", machine_line(machine), _describe(benchmark, questions, features)])
        say(heading)
        setting = Setting(
            questions,
            features,
            features.in_memory() if "memory" in benchmark.sources else None,
            planner,
            benchmark.batch_size,
            benchmark.prefetch,
            benchmark.max_seconds,
            device,
            benchmark.seed,
        )
        chosen = ways(benchmark.sources, benchmark.orders, benchmark.planning, benchmark.workers)
        rows = compare(setting, chosen, benchmark.repeat, progress)
    table = format_rows(rows)
    say(f"\n{table}")
    if out is not None:
        asked = asdict(benchmark) | {"data": None if benchmark.data is None else str(benchmark.data)}
        content = {"format": FORMAT, "command": command, "machine": machine, "asked": asked}
        write_json(out / REPORT, {**content, "rows": [asdict(row) for row in rows]}, indent=2)
        write_bytes(out / TABLE, f"{heading}\n\n{table}\n".encode())
    return rows


@contextmanager
def _data(benchmark: LoaderBenchmark, out: Path | None) -> Iterator[tuple[Questions, Features, Planner | None]]:
    if benchmark.data is not None:
        vocab = Vocab.load(benchmark.data / "vocab.json")
        split = open_split(benchmark.data, benchmark.split, vocab, with_features=True, num_samples=None)
        if any(benchmark.planning) and split.questions.programs is None:
            raise InputError(f"{split.questions.path}: has no programs to plan; --plans without measures the rest")
        yield split.questions, split.features, _planner(vocab)
        return
    with tempfile.TemporaryDirectory(prefix="iep-loader-", dir=out) as directory:
        path = Path(directory) / "random_features.h5"
        write_random_features(path, (benchmark.images, *FEATURE_SHAPE), benchmark.seed)
        questions, vocab = _made_questions(path, benchmark.images, benchmark.seed)
        yield questions, Features(path), _planner(vocab)


def _planner(vocab: Vocab) -> Planner:
    def plan(programs_BL: Any, image_rows_B: Any) -> Any:
        return plan_programs(programs_BL, vocab.program, image_rows_B)

    return plan


def write_random_features(path: Path, shape: tuple[int, int, int, int], seed: int) -> None:
    """A features file as `iep-preprocess` writes it, of float16 and random bits.

    Raises:
        InputError: the disk is too small.
    """
    spec = FeaturesSpec(shape, np.dtype(np.float16), ("random",) * shape[0], {"backbone": "random bits"})
    random = np.random.default_rng(seed)
    with feature_rows(path, spec, overwrite=True, flush_seconds=60) as rows:
        for start in range(0, shape[0], _BLOCK):
            count = min(_BLOCK, shape[0] - start)
            bits = np.frombuffer(random.bytes(2 * count * int(np.prod(shape[1:]))), dtype=np.float16)
            rows.write(start, bits.reshape(count, *shape[1:]))
            rows.end_round(start + count)


def _made_questions(path: Path, images: int, seed: int) -> tuple[Questions, Vocab]:
    """Ten questions about each image, with CLEVR's programs, which repeat after a while."""
    count = images * QUESTIONS_PER_IMAGE
    workload = generated(min(count, DISTINCT_PROGRAMS), QUESTIONS_PER_IMAGE, (1, 1, 1), largest=1, seed=seed)
    random = np.random.default_rng(seed)
    return Questions(
        path=path,
        questions=random.integers(0, 80, (count, QUESTION_LENGTH)),
        image_idxs=np.arange(count) // QUESTIONS_PER_IMAGE,
        orig_idxs=np.arange(count),
        families=None,
        programs=workload.programs_QL[np.arange(count) % len(workload)],
        answers=random.integers(0, 28, count),
    ), workload.vocab


def _describe(benchmark: LoaderBenchmark, questions: Questions, features: Features) -> str:
    where = "made for this" if benchmark.data is None else f"{benchmark.data}, split {benchmark.split}"
    size = len(features) * features.row_bytes / 1e9
    return (
        f"{len(questions)} questions about {len(features)} images, {features.dtype} features {features.shape[1:]}, "
        f"{size:.2f} GB, {where}; {benchmark.batch_size} questions a batch, {benchmark.prefetch} ahead a worker; "
        f"median of {benchmark.repeat}"
    )


def format_rows(rows: Sequence[Row]) -> str:
    """A text table, one line a way."""
    headings = ("features", "order", "plans", "workers", "questions/s", "quartiles", "GB/s", "quartiles", "cached")
    return format_table([headings, *map(_cells, rows)], left=3)


def _cells(row: Row) -> tuple[str, ...]:
    way = row.way
    return (
        way.source,
        way.order,
        "yes" if way.planning else "no",
        str(way.workers),
        *_figures(row.questions_per_second, 1),
        *_figures(row.bytes_per_second, 1e9),
        f"{100 * row.resident:.0f}%",
    )


def _figures(value: Spread, unit: float) -> tuple[str, str]:
    return f"{value.median / unit:.4g}", f"{value.lower / unit:.4g}-{value.upper / unit:.4g}"
