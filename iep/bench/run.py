"""What a user asks of `iep-bench` -> workload, engine, comparisons, files: opens, measures, writes as it goes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch

from iep.bench.engine import MIN_QUESTIONS, Comparison, Effort, compare
from iep.bench.machine import describe_machine, machine_line
from iep.bench.picture import draw_comparisons
from iep.bench.report import format_comparison, write_report
from iep.bench.show import describe_programs, describe_schedule, draw_schedule, walk
from iep.bench.strategy import Strategy
from iep.bench.workload import Workload, clevr_vocab, encode, generated, preprocessed, programs_of
from iep.config import EngineConfig
from iep.data_files import open_split
from iep.devices import resolve_device
from iep.errors import InputError, nearest
from iep.execution_engine.engine import plan_programs
from iep.files import write_bytes
from iep.networks import build, engine_kwargs, place
from iep.vocab import Vocab

REPORT, TABLE, PICTURE = "engine.json", "engine.txt", "engine.png"


@dataclass(frozen=True)
class EngineBenchmark:
    """What to measure; the defaults are the command's."""

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
    device = resolve_device(benchmark.device)
    if benchmark.threads is not None:
        torch.set_num_threads(benchmark.threads)
    workload = _open(benchmark)
    torch.manual_seed(benchmark.seed)
    engine = build("engine", engine_kwargs(benchmark.engine, workload.vocab, workload.feature_shape))
    engine = place(engine, device)
    machine = describe_machine(device)
    heading = "\n".join([f"$ {command}", machine_line(machine), workload.description])
    say(heading)
    setting = {
        "command": command,
        "machine": machine,
        "workload": {"description": workload.description, "feature_shape": workload.feature_shape},
        "engine": asdict(benchmark.engine),
        "effort": asdict(benchmark.effort),
        "seed": benchmark.seed,
    }
    comparisons: list[Comparison] = []
    try:
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
            comparisons.append(comparison)
            say(f"\n{format_comparison(comparison)}")
            if out is not None:
                write_report(out / REPORT, setting, comparisons)
                text = "\n\n".join([heading, *map(format_comparison, comparisons)]) + "\n"
                write_bytes(out / TABLE, text.encode())
    finally:
        if out is not None and comparisons:
            draw_comparisons(out / PICTURE, comparisons, machine_line(machine))
    return comparisons


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
        what = str(error).splitlines()[0]
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in what:
            raise
        raise InputError(f"minibatches of {batch_size} questions do not fit into memory: {what}") from None


@dataclass(frozen=True)
class PlanRequest:
    """What to show the schedules of: `programs` given token by token, or else a preprocessed split's first."""

    batching: tuple[str, ...]
    programs: tuple[str, ...] = ()
    data: Path | None = None
    split: str = "val"
    num_samples: int = 8
    questions_per_image: int = 1
    sharing: bool = True
    scene: str = "module"


def show_plans(request: PlanRequest, out: Path | None = None, say: Callable[[str], None] = print) -> None:
    """Say the programs and each scheduler's calls; draw them into `out` where it is given, with the scheduler in the
    name where there are several.

    Raises:
        InputError: a token is unknown (the nearest is suggested), or the split is not there or has no programs.
    """
    tokens, programs_BL, image_idxs_B = _programs(request)
    _, image_rows_B = np.unique(image_idxs_B, return_inverse=True)
    for number, batching in enumerate(request.batching):
        plan = plan_programs(programs_BL, tokens, image_rows_B, request.scene, batching, request.sharing)
        examples = walk(plan.graph, tokens)
        if number == 0:
            say(describe_programs(examples))
        text = describe_schedule(batching, plan.graph, plan.schedule, examples, tokens)
        say(f"\n{text}")
        if out is not None:
            path = out if len(request.batching) == 1 else out.with_stem(f"{out.stem}-{batching}")
            draw_schedule(path, text.splitlines()[0], plan.schedule, examples)
            say(f"Wrote {path}")


def _programs(request: PlanRequest) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """Vocabulary, (B, L) programs and (B,) image indices."""
    vocab = clevr_vocab() if request.data is None else Vocab.load(request.data / "vocab.json")
    if request.programs:
        tokens = vocab.program
        programs = [_split(number, text, tokens) for number, text in enumerate(request.programs)]
        return tokens, encode(programs, tokens), np.arange(len(programs)) // request.questions_per_image
    questions = open_split(request.data, request.split, vocab, False, request.num_samples).questions
    return vocab.program, programs_of(questions), questions.image_idxs


def _split(number: int, text: str, known: tuple[str, ...]) -> list[str]:
    tokens = text.split()
    if not tokens:
        raise InputError(f"program {number} is empty, expected functions in prefix order, such as: count scene")
    for position, token in enumerate(tokens):
        if token not in known:
            raise InputError(f"program {number}, token {position}: unknown function {token!r}{nearest(token, known)}")
    return tokens
