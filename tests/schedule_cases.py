"""Graphs to schedule, the check of a schedule, and naive twins of what the schedulers measure."""

from collections import Counter
from collections.abc import Iterator
from random import Random

import hypothesis.strategies as st
import numpy as np
from batching_cases import ARITY_V, MEANING, matrix, toy_programs

from iep.batching.graph import Graph, graph_from_prefix
from iep.batching.schedulers import Schedule
from iep.programs import SCENE, arity, json_to_prefix
from iep.synth.presets import PRESETS
from iep.synth.synthesize import make_image


def tree_graph(rows, leaf_is_input=False, input_B=None) -> Graph:
    """Return the graph of toy programs."""
    tokens_BL = rows if isinstance(rows, np.ndarray) else matrix(rows)
    return graph_from_prefix(tokens_BL, ARITY_V, **MEANING, leaf_is_input=leaf_is_input, input_B=input_B)


def images_graph(rows, input_B=None) -> Graph:
    """Return the graph of toy programs whose leaves are inputs; `input_B` says which."""
    return tree_graph(rows, leaf_is_input=True, input_B=input_B)


def random_dag(seed: int, num_inputs: int = 4, num_nodes: int = 40, num_ops: int = 5) -> Graph:
    """Return nodes that read any earlier slots: shared results, several inputs, and nodes that nothing reads."""
    rng = np.random.default_rng(seed)
    op = rng.integers(0, num_ops, num_nodes)
    args = np.full((num_nodes, 2), -1)
    for node in range(num_nodes):
        args[node, : 1 + op[node] % 2] = rng.integers(0, num_inputs + node, 1 + op[node] % 2)
    example = rng.integers(0, num_inputs, num_nodes)
    return Graph(num_inputs, op, args, example, rng.integers(0, num_inputs + num_nodes, num_inputs))


graphs = st.one_of(
    toy_programs.map(tree_graph),
    toy_programs.map(images_graph),
    st.integers(0, 999).map(lambda seed: random_dag(seed, num_nodes=30)),
)
"""Trees with and without nodes for leaves, and graphs with shared nodes."""


def ladder(rungs: int, width: int, num_ops: int, seed: int = 0) -> Graph:
    """Return layers of nodes that read two nodes of the layer before: 2 ** rungs paths to each last node."""
    rng = np.random.default_rng(seed)
    below = np.arange(rungs * width) // width * width - width
    args = 1 + below[:, None] + rng.integers(0, width, (rungs * width, 2))
    args[:width] = 0
    nodes = rungs * width
    return Graph(1, rng.integers(0, num_ops, nodes), args, np.zeros(nodes, dtype=np.int64), np.array([nodes]))


def clevr_graph(questions: int, seed: int, scene_is_input: bool = False) -> Graph:
    """Return the graph of programs of some questions that iep-synth asks about images like CLEVR's, ten an image."""
    options, balance = PRESETS["clevr"], Counter()
    first = 1000 * seed
    images = range(first, first + questions // 10 + 1)
    asked = [question for image in images for question in make_image(options, "train", image, balance)[2]]
    programs = [json_to_prefix(list(question.program)) for question in Random(seed).sample(asked, questions)]
    tokens = sorted({token for program in programs for token in program})
    number = {token: index for index, token in enumerate(tokens)}
    rows = [[number[token] for token in program] for program in programs]
    arity_V = np.array([arity(token) for token in tokens])
    leaf = number[SCENE]
    return graph_from_prefix(matrix(rows, leaf), arity_V, leaf=leaf, leaf_is_input=scene_is_input)


def assert_valid(graph: Graph, schedule: Schedule) -> None:
    """Assert that every node runs once, after its arguments, and that a group has one op, or a family's in order."""
    done = set(range(graph.num_inputs))
    for op, nodes, segments in schedule:
        functions = graph.op[nodes].tolist()
        assert functions == (
            [op] * len(nodes)
            if segments is None
            else [each.op for each in segments for _ in range(each.rows.start, each.rows.stop)]
        )
        assert functions
        assert list(zip(functions, nodes.tolist(), strict=True)) == sorted(zip(functions, nodes.tolist(), strict=True))
        assert set(graph.args[nodes].ravel().tolist()) - {-1} <= done
        results = set((graph.num_inputs + nodes).tolist())
        assert len(results) == len(nodes)
        assert not results & done
        done |= results
    assert len(done) == graph.num_inputs + graph.num_nodes


def arguments_of(graph: Graph) -> list[list[int]]:
    """Return for every node the nodes whose results it reads."""
    return [[slot - graph.num_inputs for slot in slots if slot >= graph.num_inputs] for slots in graph.args.tolist()]


def readers_of(graph: Graph) -> list[list[int]]:
    """Return for every node the nodes that read its result."""
    readers: list[list[int]] = [[] for _ in range(graph.num_nodes)]
    for reader, taken in enumerate(arguments_of(graph)):
        for node in set(taken):
            readers[node].append(reader)
    return readers


def naive_distance(graph: Graph) -> list[int]:
    """Return the length of the longest path up from every node, by looking through all its readers."""
    readers, distance = readers_of(graph), {}
    for node in reversed(range(graph.num_nodes)):
        distance[node] = max((distance[reader] + 1 for reader in readers[node]), default=0)
    return [distance[node] for node in range(graph.num_nodes)]


def naive_height(graph: Graph) -> list[int]:
    """Return the length of the longest path down from every node."""
    height: list[int] = []
    for taken in arguments_of(graph):
        height.append(max((height[node] + 1 for node in taken), default=0))
    return height


def naive_paths(graph: Graph) -> set[tuple[int, ...]]:
    """Return the ops along every path from a node that reads no other to one that no other reads."""
    arguments, readers, ops = arguments_of(graph), readers_of(graph), graph.op.tolist()

    def up(node: int) -> Iterator[tuple[int, ...]]:
        if not readers[node]:
            yield (ops[node],)
        for reader in readers[node]:
            for rest in up(reader):
                yield (ops[node], *rest)

    return {path for node in range(graph.num_nodes) if not arguments[node] for path in up(node)}


def is_subsequence(short, long) -> bool:
    rest = iter(long)
    return all(item in rest for item in short)
