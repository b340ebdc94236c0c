"""What a user asks of `iep-bench engine` -> comparisons and files: opens the data, measures, writes as it goes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch

from iep.bench.engine import MIN_QUESTIONS, Comparison, Effort, compare
from iep.bench.machine import describe_machine, machine_line
from iep.bench.picture import draw_comparisons
from iep.bench.report import format_comparison, write_report
from iep.bench.strategy import Strategy
from iep.bench.workload import Workload, generated, preprocessed
from iep.config import PRECISIONS, EngineConfig
from iep.devices import is_out_of_memory
from iep.errors import InputError
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.placement import NONE
from iep.files import check_writable, write_bytes
from iep.networks import build, engine_kwargs, place
from iep.placing import Sample, check_options, describe_engine, place_engine, resolve_home
from iep.signals import Stopped

REPORT, TABLE, PICTURE = "engine.json", "engine.txt", "engine.png"


@dataclass(frozen=True)
class EngineBenchmark:
    """What to measure, and with what."""

    strategies: tuple[Strategy, ...]
    batch_sizes: tuple[int, ...]
    phases: tuple[str, ...]
    effort: Effort
    engine: EngineConfig
    data: Path | None = None
    """Directory that `iep-preprocess` wrote; None to have programs made."""
    split: str = "val"
    questions_per_image: int = 1
    feature_shape: tuple[int, int, int] = (1024, 14, 14)
    device: str = "auto"
    placement: str = "none"
    devices: tuple[str, ...] = ()
    memory_format: str | None = None
    """Of the convolutions, one of `MEMORY_FORMATS`; None for what training and evaluation use."""
    threads: int | None = None
    seed: int = 0


def run_engine_benchmark(
    benchmark: EngineBenchmark,
    command: str,
    out: Path | None = None,
    say: Callable[[str], None] = print,
    progress: Callable[[str], None] = lambda what: None,
) -> list[Comparison]:
    """Measure every phase at every minibatch size; small ones first.

    `say` hears the heading, then each table as soon as it is measured. Where `out` is given, table and JSON are written
    as often, each whole or not at all: an interruption loses no more than the comparison that it interrupts.
    `progress` hears what is measured next.

    Raises:
        InputError: there are too few questions, they have no programs, the engine cannot be built, or memory is short.
    """
    if out is not None:
        check_writable([out / REPORT, out / TABLE, out / PICTURE])
    check_options(benchmark.placement, benchmark.devices, benchmark.device)
    device = resolve_home(benchmark.placement, benchmark.devices, benchmark.device)
    if benchmark.threads is not None:
        torch.set_num_threads(benchmark.threads)
    workload = _open(benchmark)
    torch.manual_seed(benchmark.seed)
    engine = build("engine", engine_kwargs(benchmark.engine, workload.vocab, workload.feature_shape))
    engine = place(engine, device, benchmark.memory_format)
    machine = describe_machine(device)
    placed = [_place(benchmark, engine, workload)] if benchmark.placement != NONE else []
    heading = "\n".join([f"$ {command}", machine_line(machine), workload.description, *placed])
    say(heading)
    setting = {
        "command": command,
        "machine": machine,
        "workload": {"description": workload.description, "feature_shape": workload.feature_shape},
        "engine": asdict(benchmark.engine),
        "memory_format": benchmark.memory_format,
        "placement": None if engine.placement is None else asdict(engine.placement),
        "effort": asdict(benchmark.effort),
        "seed": benchmark.seed,
    }
    comparisons: list[Comparison] = []
    try:
        for comparison in _comparisons(benchmark, workload, engine, device, progress):
            comparisons.append(comparison)
            say(f"\n{format_comparison(comparison)}")
            if out is not None:
                write_report(out / REPORT, setting, comparisons)
                text = "\n\n".join([heading, *map(format_comparison, comparisons)]) + "\n"
                write_bytes(out / TABLE, text.encode())
    except (Stopped, InputError):
        if out is not None and comparisons:
            draw_comparisons(out / PICTURE, comparisons, machine_line(machine))
        raise
    if out is not None:
        draw_comparisons(out / PICTURE, comparisons, machine_line(machine))
    return comparisons


def _place(benchmark: EngineBenchmark, engine: ExecutionEngine, workload: Workload) -> str:
    """Put the engine's parts on their devices; returns what is where, and what will cross."""
    sample = Sample(workload.programs_QL, workload.image_idxs_Q, workload.description)
    costs = place_engine(engine, benchmark.placement, benchmark.devices, sample, benchmark.memory_format)
    size = max(benchmark.batch_sizes)
    return describe_engine(benchmark.placement, engine, costs, sample, engine.planner(), size, PRECISIONS[0])


def _comparisons(
    benchmark: EngineBenchmark,
    workload: Workload,
    engine: ExecutionEngine,
    device: torch.device,
    progress: Callable[[str], None],
) -> Iterator[Comparison]:
    for batch_size, phase in product(sorted(set(benchmark.batch_sizes)), benchmark.phases):
        with _short_memory_is_named(batch_size):
            comparison = compare(
                workload,
                engine,
                benchmark.strategies,
                phase,
                batch_size,
                benchmark.effort,
                device,
                progress=partial(_tell, progress, f"{phase} {batch_size}"),
            )
        yield comparison


def _tell(progress: Callable[[str], None], where: str, what: str) -> None:
    progress(f"{where} {what}")


def _open(benchmark: EngineBenchmark) -> Workload:
    largest = max(benchmark.batch_sizes)
    wanted = max(largest, MIN_QUESTIONS)
    if benchmark.data is None:
        return generated(
            wanted, benchmark.questions_per_image, benchmark.feature_shape, largest=largest, seed=benchmark.seed
        )
    workload = preprocessed(benchmark.data, benchmark.split, wanted, benchmark.seed)
    if len(workload) < largest:
        raise InputError(
            f"{benchmark.data}: split {benchmark.split} has {len(workload)} questions, expected at least {largest} "
            "for the largest of --batch-sizes"
        )
    return workload


@contextmanager
def _short_memory_is_named(batch_size: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        what = str(error).splitlines()[0]
        raise InputError(f"minibatches of {batch_size} questions do not fit into memory: {what}") from None
