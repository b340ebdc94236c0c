"""Graph, schedule, modules and inputs -> results: one module call per group of the schedule.

Values live in a list of slots, one row each. A group's arguments are gathered by slot, so nothing depends on the
order in which results arrive. What the modules compute, and on which device, is theirs; their results may have any
shape, as long as a group's row g is the result of its node g.

Shapes: G rows of a group, B examples.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from iep.batching.graph import Graph
from iep.batching.schedulers import Schedule

Module = Callable[..., torch.Tensor]


def execute(
    graph: Graph, schedule: Schedule, modules: Sequence[Module] | Mapping[int, Module], inputs: torch.Tensor
) -> torch.Tensor:
    """Run `schedule` and return the roots' values, (B, ...) in the order of the examples.

    Args:
        graph: what takes what.
        schedule: every node of `graph` once, arguments first.
        modules: by op, what maps a group's arguments, (G, ...) each in their order, to its results (G, ...).
        inputs: (num_inputs, ...), one row per input slot.

    Raises:
        ValueError: there are not as many inputs as the graph has, the graph has no roots, or a module returns another
            number of rows than it was given.
    """
    if len(inputs) != graph.num_inputs or not len(graph.roots):
        raise ValueError(
            f"{len(inputs)} inputs for a graph of {graph.num_inputs} inputs and {len(graph.roots)} roots, "
            "expected as many inputs as the graph has, and at least one root"
        )
    # Split and concatenated, every value is copied once on the way, its gradient once on the way back; index_select
    # would fill a gradient as large as its source for every group that takes from it.
    slots: list[torch.Tensor | None] = [*inputs.split(1), *[None] * graph.num_nodes]
    for op, nodes in schedule:
        arguments = [_gather(slots, column) for column in graph.args[nodes].T.tolist() if column[0] >= 0]
        result = modules[op](*arguments)
        if len(result) != len(nodes):
            raise ValueError(f"op {op} returned {len(result)} rows for a group of {len(nodes)}")
        for node, row in zip(nodes.tolist(), result.split(1), strict=True):
            slots[graph.num_inputs + node] = row
    return _gather(slots, graph.roots.tolist())


def _gather(slots: list[torch.Tensor | None], wanted: list[int]) -> torch.Tensor:
    rows = [slots[slot] for slot in wanted]
    return rows[0] if len(rows) == 1 else torch.cat(rows)
