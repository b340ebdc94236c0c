"""The time and memory of schedules and plans, by structure, number of nodes, batch and number of functions.

The graphs have random functions, and no tensor is computed. CLEVR's programs are those of `iep-synth --preset clevr`.
"""

import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from iep.batching.graph import Graph
from iep.batching.plan import make_plan
from iep.batching.schedulers import make_schedule
from iep.bench.compare import Benchmark, Case, Competitor
from iep.bench.workload import generated
from iep.programs import program_graph

NEAR = 30
"""The greatest distance in ids from a node of a random graph to those that it reads."""


def planning(
    structures: Sequence[str],
    nodes: Sequence[int],
    batch_sizes: Sequence[int],
    functions: Sequence[int],
    schedulers: Sequence[str],
    seed: int,
) -> Benchmark:
    """Return the benchmark of planning; programs have one size and CLEVR's functions for each batch size."""

    def cases() -> Iterator[Case]:
        for structure, count, batch, kinds in product(structures, nodes, batch_sizes, functions):
            is_repeated = structure == "programs" and (count, kinds) != (nodes[0], functions[0])
            if is_repeated or (structure != "programs" and count < 2 * batch):
                continue
            graph = STRUCTURES[structure](count // batch, batch, kinds, np.random.default_rng(seed))
            setting = {"structure": structure, "nodes": graph.num_nodes, "batch": batch, "functions": kinds}
            yield Case(setting, batch, [competitor(graph, name) for name in schedulers], baseline=None)

    return Benchmark("schedules and plans", cases(), "sample")


def competitor(graph: Graph, scheduler: str) -> Competitor:
    """Return the competitor that plans a graph with a scheduler."""

    def measure() -> dict[str, float]:
        new = replace(graph)  # without what another scheduler has computed of it
        begin = time.perf_counter()
        schedule = make_schedule(new, scheduler)
        scheduled = time.perf_counter()
        make_plan(new, schedule)
        return {"schedule": scheduled - begin, "plan": time.perf_counter() - scheduled}

    def facts() -> dict[str, float]:
        tracemalloc.start()
        schedule = make_schedule(replace(graph), scheduler)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return {"calls": len(schedule), "bytes a node": round(peak / graph.num_nodes)}

    return Competitor(scheduler, measure, facts)


def _joined(args: Sequence[Sequence[Sequence[int]]], functions: int, rng: np.random.Generator) -> Graph:
    """Return the graph of samples, given the nodes that each node of each sample reads; a leaf reads an input."""
    batch, width = len(args), max(len(reads) for sample in args for reads in sample)
    rows, first = [], batch
    for number, sample in enumerate(args):
        for reads in sample:
            slots = [first + node for node in reads] or [number]
            rows.append(slots + [-1] * (max(1, width) - len(slots)))
        first += len(sample)
    args_NA, sizes = np.array(rows), [len(sample) for sample in args]
    # Nodes of one function have one number of arguments.
    op_N = rng.integers(0, functions, len(rows)) * (width + 1) + (args_NA >= 0).sum(axis=1)
    return Graph(batch, op_N, args_NA, np.repeat(np.arange(batch), sizes), batch + np.cumsum(sizes) - 1)


def chains(length: int, batch: int, functions: int, rng: np.random.Generator) -> Graph:
    """Return chains, half of which are shorter."""
    lengths = [length - number % 2 * length // 4 for number in range(batch)]
    return _joined([[[node - 1] if node else [] for node in range(each)] for each in lengths], functions, rng)


def trees(length: int, batch: int, functions: int, rng: np.random.Generator) -> Graph:
    """Return random binary trees."""

    def tree() -> list[list[int]]:
        made: list[list[int]] = []
        stack: list[int] = []
        while len(made) < length - 1 or len(stack) > 1:
            merges = len(stack) > 1 and (len(made) + len(stack) >= length or rng.random() < 0.5)
            made.append([stack.pop(), stack.pop()][::-1] if merges else [])
            stack.append(len(made) - 1)
        return made

    return _joined([tree() for _ in range(batch)], functions, rng)


def lattices(length: int, batch: int, functions: int, rng: np.random.Generator) -> Graph:
    """Return square grids, whose nodes read those on the left and above."""
    side = max(2, int(length**0.5))

    def reads(node: int) -> list[int]:
        return ([node - 1] if node % side else []) + ([node - side] if node >= side else [])

    return _joined([[reads(node) for node in range(side * side)] for _ in range(batch)], functions, rng)


def dags(length: int, batch: int, functions: int, rng: np.random.Generator) -> Graph:
    """Return random graphs, whose nodes read two of the `NEAR` nodes before them."""

    def reads(node: int) -> list[int]:
        return rng.integers(max(0, node - NEAR), node, 2).tolist() if node else []

    return _joined([[reads(node) for node in range(length)] for _ in range(batch)], functions, rng)


def programs(length: int, batch: int, functions: int, rng: np.random.Generator) -> Graph:
    """Return the graph of `batch` questions of CLEVR, whatever the length and the number of functions."""
    workload = generated(batch, 1, (1, 1, 1), 1, seed=int(rng.integers(1 << 31)))
    return program_graph(workload.programs_QL, workload.vocab.program)


STRUCTURES: dict[str, Callable[[int, int, int, np.random.Generator], Graph]] = {
    "chains": chains,
    "trees": trees,
    "lattices": lattices,
    "dags": dags,
    "programs": programs,
}
