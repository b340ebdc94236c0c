"""Graphs to schedule, what makes a schedule valid, and slow twins of what the schedulers measure."""

from collections import Counter
from collections.abc import Iterator
from random import Random

import numpy as np
from batching_cases import ARITY_V, MEANING, matrix

from iep.batching.graph import Graph, graph_from_prefix
from iep.batching.schedulers import Schedule
from iep.programs import SCENE, arity, json_to_prefix
from iep.synth.presets import PRESETS
from iep.synth.synthesize import make_image


def tree_graph(rows, leaf_is_input=False, input_B=None) -> Graph:
    """The graph of toy programs."""
    tokens_BL = rows if isinstance(rows, np.ndarray) else matrix(rows)
    return graph_from_prefix(tokens_BL, ARITY_V, **MEANING, leaf_is_input=leaf_is_input, input_B=input_B)


def images_graph(rows, input_B=None) -> Graph:
    """The same where leaves are inputs, `input_B` says which."""
    return tree_graph(rows, leaf_is_input=True, input_B=input_B)


def random_dag(seed: int, num_inputs: int = 4, num_nodes: int = 40, num_ops: int = 5) -> Graph:
    """Nodes that take any earlier slots, of any example: shared results, several inputs, nodes that nothing uses."""
    rng = np.random.default_rng(seed)
    op = rng.integers(0, num_ops, num_nodes)
    args = np.full((num_nodes, 2), -1)
    for node in range(num_nodes):
        args[node, : 1 + op[node] % 2] = rng.integers(0, num_inputs + node, 1 + op[node] % 2)
    example = rng.integers(0, num_inputs, num_nodes)
    return Graph(num_inputs, op, args, example, rng.integers(0, num_inputs + num_nodes, num_inputs))


def ladder(rungs: int, width: int, num_ops: int, seed: int = 0) -> Graph:
    """Layers of nodes of random ops that take two nodes of the layer before: 2 ** rungs paths to every last node."""
    rng = np.random.default_rng(seed)
    below = np.arange(rungs * width) // width * width - width
    args = 1 + below[:, None] + rng.integers(0, width, (rungs * width, 2))
    args[:width] = 0
    nodes = rungs * width
    return Graph(1, rng.integers(0, num_ops, nodes), args, np.zeros(nodes, dtype=np.int64), np.array([nodes]))


def clevr_graph(questions: int, seed: int, scene_is_input: bool = False) -> Graph:
    """The programs of some of the questions that iep-synth asks about images like CLEVR's, ten an image."""
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
    """Every node once, ids rising within a group, one op to a group, arguments in earlier groups."""
    done = set(range(graph.num_inputs))
    for group in schedule:
        assert len(group.nodes) > 0
        assert (np.diff(group.nodes) > 0).all()
        assert (graph.op[group.nodes] == group.op).all()
        slots = set(graph.args[group.nodes].ravel().tolist()) - {-1}
        assert slots <= done
        results = set((graph.num_inputs + group.nodes).tolist())
        assert not results & done
        done |= results
    assert len(done) == graph.num_inputs + graph.num_nodes


def takes_of(graph: Graph) -> list[list[int]]:
    """For every node the nodes whose results it takes."""
    return [[slot - graph.num_inputs for slot in slots if slot >= graph.num_inputs] for slots in graph.args.tolist()]


def takers_of(graph: Graph) -> list[list[int]]:
    """For every node the nodes that take its result."""
    takes = takes_of(graph)
    return [[taker for taker, taken in enumerate(takes) if node in taken] for node in range(graph.num_nodes)]


def naive_distance(graph: Graph) -> list[int]:
    """Longest path up from every node, by looking through all its takers."""
    takers, distance = takers_of(graph), {}
    for node in reversed(range(graph.num_nodes)):
        distance[node] = max((distance[taker] + 1 for taker in takers[node]), default=0)
    return [distance[node] for node in range(graph.num_nodes)]


def naive_height(graph: Graph) -> list[int]:
    """Longest path down from every node."""
    height: list[int] = []
    for taken in takes_of(graph):
        height.append(max((height[node] + 1 for node in taken), default=0))
    return height


def naive_paths(graph: Graph) -> set[tuple[int, ...]]:
    """The ops along every path from a node that takes no other to one that no other takes."""
    takes, takers, ops = takes_of(graph), takers_of(graph), graph.op.tolist()

    def up(node: int) -> Iterator[tuple[int, ...]]:
        if not takers[node]:
            yield (ops[node],)
        for taker in takers[node]:
            for rest in up(taker):
                yield (ops[node], *rest)

    return {path for node in range(graph.num_nodes) if not takes[node] for path in up(node)}


def is_subsequence(short, long) -> bool:
    rest = iter(long)
    return all(item in rest for item in short)
