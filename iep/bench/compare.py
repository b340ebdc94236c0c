"""Compare several ways to do the same work: the one measurement and table of every benchmark.

The machine may be shared, and its speed drifts. The competitors of a case therefore take turns: each round measures
every competitor once, and medians over the rounds are compared with that of a baseline.
"""

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import iep
from iep.runtime.files import check_writable, write_json
from iep.runtime.tables import align_rows

TOTAL = "total"
MIN_REPEATS, MIN_SAMPLES = 3, 64
"""The rounds of a slow competitor, and the fewest samples of a round. A round runs several small minibatches, because
programs, trees and sentences differ much in size."""
CPU = torch.device("cpu")
Fact = Any
"""A number or text, which has a column in the table; lists and mappings are in the JSON file alone."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Competitor:
    """One way to do the work of a case.

    Attributes:
        measure: run one round, and return the seconds that each part took for a minibatch (the mean over several).
        facts: return values that are counted rather than timed, such as calls; called once, after the last round.
    """

    name: str
    measure: Callable[[], Mapping[str, float]]
    facts: Callable[[], Mapping[str, Fact]] = dict


@dataclass(frozen=True)
class Case:
    """The work of one comparison.

    Attributes:
        setting: what distinguishes it from other cases, such as `{"phase": "train", "batch": 64}`, and what is known
            about its minibatches.
        size: samples of a minibatch.
        baseline: the name of the competitor that speed-ups are relative to; None for no speed-ups.
        warm_up: whether to run a first round that does not count.
    """

    setting: Mapping[str, Fact]
    size: int
    competitors: Sequence[Competitor]
    baseline: str | None = None
    warm_up: bool = True


@dataclass(frozen=True)
class Benchmark:
    """Cases to compare, and how to present them.

    Attributes:
        description: one or more lines for the head of the table.
        cases: the cases, small ones first; they may be created while the benchmark runs.
        unit: what a sample is called in the table, for example `question`.
    """

    description: str
    cases: Iterable[Case]
    unit: str
    device: torch.device = CPU


def seconds(run: Callable[[], object], *devices: torch.device) -> float:
    """Return the seconds that `run()` takes, including all work that it starts on GPUs."""
    gpus = {device for device in devices if device.type == "cuda"}
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    start = time.perf_counter()
    run()
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    return time.perf_counter() - start


def compare(case: Case, repeat: int, max_seconds: float) -> list[Row]:
    """Measure the competitors of a case in turns, and return a row for each.

    A competitor that has been measured for `max_seconds` ends after `MIN_REPEATS` rounds in place of `repeat`.
    """
    rounds: dict[str, list[Mapping[str, float]]] = {each.name: [] for each in case.competitors}
    spent = dict.fromkeys(rounds, 0.0)
    gc.collect()
    gc.freeze()  # a collection in timed code would otherwise visit all objects of the imported libraries
    for number in range(0 if case.warm_up else 1, repeat + 1):
        for name, measure in [(each.name, each.measure) for each in case.competitors]:
            if len(rounds[name]) >= MIN_REPEATS and spent[name] >= max_seconds:
                continue
            start = time.perf_counter()
            times = measure()
            if number:
                rounds[name].append(times)
                spent[name] += time.perf_counter() - start
    gc.unfreeze()
    rows: list[Row] = []
    for each in case.competitors:
        found = rounds[each.name]
        parts = {part: spread([times[part] for times in found]) for part in found[0]}
        total = spread([sum(times.values()) for times in found])
        rows.append({"name": each.name, "facts": each.facts(), "seconds": {**parts, TOTAL: total}, "speedup": None})
    medians = {row["name"]: row["seconds"][TOTAL]["median"] for row in rows}
    if case.baseline in medians:
        for row in rows:
            row["speedup"] = medians[case.baseline] / medians[row["name"]]
    return rows


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and quartiles of one or more values, interpolated between them, and their number."""
    found = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    lower, median, upper = sorted(found)  # those of almost equal values are rounded in any order
    return {"median": median, "lower": lower, "upper": upper, "repeats": len(values)}


def run_benchmark(
    benchmark: Benchmark, repeat: int, max_seconds: float, command: str, name: str = "", out: Path | None = None
) -> None:
    """Measure every case, print its table, and write all values to `out/NAME.json`, if `out` is given.

    The file is rewritten after every comparison, so that an interruption loses only the comparison that it interrupts.

    Raises:
        OSError: the file cannot be written.
    """
    file = None if out is None else out / f"{name}.json"
    if file is not None:
        check_writable([file])
    head = {"command": command, "machine": machine_line(benchmark.device), "description": benchmark.description}
    print("$", "\n".join(head.values()), flush=True)
    comparisons = []
    for case in benchmark.cases:
        rows = compare(case, repeat, max_seconds)
        print(f"\n{table(case, rows, benchmark.unit)}", flush=True)
        comparisons.append({**case.setting, "size": case.size, "baseline": case.baseline, "rows": rows})
        if file is not None:
            write_json(file, {**head, "comparisons": comparisons}, indent=2)
    if file is not None:
        print(f"\nWrote {file}")


def machine_line(device: torch.device) -> str:
    """Return a line that describes the machine: processor or GPU, threads, load, versions, and the time."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    where = names[0] if names else platform.processor() or platform.machine()
    where += f", {torch.get_num_threads()} of {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else where
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return f"{where}; torch {torch.__version__}, iep {iep.__version__}; {now}"


def table(case: Case, rows: Sequence[Row], unit: str) -> str:
    """Return a title and a table with a line for each row."""
    shown = ", ".join(value if name == "phase" else f"{name} {short(value)}" for name, value in case.setting.items())
    rounds = max(row["seconds"][TOTAL]["repeats"] for row in rows)
    ending = "" if case.size == 1 else "s"
    title = f"{shown}; milliseconds for {case.size} {unit}{ending}, median of up to {rounds} rounds"
    lines = []
    for row in rows:
        facts = {name: short(fact) for name, fact in row["facts"].items() if not isinstance(fact, dict | list)}
        parts = {part: short(1000 * taken["median"]) for part, taken in row["seconds"].items() if part != TOTAL}
        total = row["seconds"][TOTAL]
        of_total = {
            f"{unit}s/s": short(case.size / total["median"]),
            "quartiles": f"{short(case.size / total['upper'])}-{short(case.size / total['lower'])}",
            "speed-up": short(row["speedup"] and f"{row['speedup']:.2f}x"),
        }
        lines.append({"strategy": row["name"], **facts, **parts, **of_total})
    headings = dict.fromkeys(heading for line in lines for heading in line)
    columns = ([heading, *(line.get(heading, "-") for line in lines)] for heading in headings)
    return f"{title}\n" + align_rows([*zip(*(each for each in columns if set(each[1:]) != {"-"}), strict=True)])


def short(value: float | str | None) -> str:
    """Return a number with four digits, in thousands, millions or billions if it is large; `-` for None."""
    if value is None or isinstance(value, str):
        return value or "-"
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(factor, 1e5):
            return f"{value / factor:.4g}{letter}"
    return f"{value:.5g}" if abs(value) >= 1e4 else f"{value:.4g}"
