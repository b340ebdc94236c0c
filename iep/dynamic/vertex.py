"""Vertex functions, declared once, and the edges of each sample -> states of the samples' last vertices and outputs.

A vertex *gathers* the states that its children have scattered, *pulls* rows from outside the graph, *scatters* states
that others may gather and *pushes* outputs that leave the graph (Xu et al., Cavs: A Vertex-centric Symbolic Programming
Model for Dynamic Dataflow Graphs, section 2). A network is a few such functions of plain PyTorch code. Samples are
integer arrays (`edges.py`), joined by array code; no graph is built by running code. All vertices that are ready run
together, through the same graph, schedulers and executor as every other network.

Shapes: S samples, V vertices of one, N of all, G vertices of a call, U rows pulled.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from iep.batching.execute import execute
from iep.batching.graph import Graph
from iep.batching.plan import Plan, Read, Signature, Types, make_plan
from iep.batching.schedulers import Schedule, make_schedule
from iep.batching.sharing import share
from iep.dynamic.edges import Edges, Joined, join, names_of
from iep.dynamic.remembered import key_of, remembered


class Vertices:
    """The G vertices of one call of a vertex function. All of them have the same number of children.

    A function must not change the tensors that it gathers or pulls in place.
    """

    def __init__(self, num_children: int, gathered: Mapping[str, Tensor], pulled: Mapping[str, Tensor]):
        self.num_children = num_children
        self._gathered, self._pulled = gathered, pulled
        self.results: dict[str, Tensor] = {}
        """The tensors that the function has scattered and pushed, by name."""

    def gather(self, state: str) -> Tensor:
        """Return the states that the children scattered, (G, num_children, ...), in the order of the children.

        Raises:
            ValueError: the function does not declare that it gathers this state.
        """
        return _declared(state, "gathers", self._gathered)

    def pull(self, name: str) -> Tensor:
        """Return the rows of an input that the vertices pull, (G, ...).

        Raises:
            ValueError: the function does not declare that it pulls this input.
        """
        return _declared(name, "pulls", self._pulled)

    def scatter(self, **states: Tensor) -> None:
        """Pass (G, ...) states to the vertices that gather them."""
        self.results.update(states)

    def push(self, **outputs: Tensor) -> None:
        """Add (G, ...) outputs of these vertices to the results of the run."""
        self.results.update(outputs)


def _declared(name: str, kind: str, tensors: Mapping[str, Tensor]) -> Tensor:
    if name not in tensors:
        raise ValueError(f"the vertex function {kind} {', '.join(tensors) or 'nothing'}, but reads {name!r}")
    return tensors[name]


@dataclass(frozen=True)
class VertexFunction:
    """The computation of a vertex. Every function scatters all states of its network."""

    run: Callable[[Vertices], None]
    """Plain PyTorch code for the G vertices of a call."""
    gathers: tuple[str, ...] = ()
    """The names of the states that the function gathers."""
    pulls: tuple[str, ...] = ()
    """The names of the inputs from which each vertex pulls a row."""
    pushes: tuple[str, ...] = ()
    """The names of the outputs to which each vertex pushes a row. The name of a state pushes the scattered state."""

    def __post_init__(self) -> None:
        for kind in ("gathers", "pulls", "pushes"):
            if isinstance(getattr(self, kind), str):
                raise ValueError(f"{kind}={getattr(self, kind)!r}, expected a tuple of names")


@dataclass(frozen=True, eq=False)
class VertexPlan:
    """The plan by which the vertices of a minibatch run, which consists of integers."""

    graph: Graph
    schedule: Schedule
    plan: Plan
    rows: Mapping[str, Tensor]
    """The rows of each input that a run needs, (U,), in this order. With sharing, each row occurs once."""

    def to(self, device: torch.device | str) -> "VertexPlan":
        """Return the plan with its tensors on `device`."""
        rows = {name: ids.to(device, non_blocking=True) for name, ids in self.rows.items()}
        return replace(self, plan=self.plan.to(device), rows=rows)


@dataclass(frozen=True, eq=False)
class Results:
    """The results of a run of a vertex network."""

    roots: Mapping[str, Tensor]
    """The value of each state that the last vertex of each sample scattered, (S, ...)."""
    pushed: Mapping[str, Tensor]
    """One row of each output for every vertex that pushes it, by samples and vertices in order; (0,) if none does."""


class VertexNetwork:
    """A network of vertex functions, and the states that vertices pass to each other.

    Args:
        functions: the functions, in the order of the numbers in `Edges.function`.
        states: the shape of each state of one vertex.
        dtype: the dtype of the states that a vertex without children gathers. None stands for that of the first input
            that it pulls, or PyTorch's default dtype if that is an integer type. A state is kept in the dtype in which
            it is first scattered.

    Raises:
        ValueError: a function is not a `VertexFunction` or gathers an unknown state, a state has no shape, or a name is
            used for two things.
    """

    def __init__(
        self,
        functions: Sequence[VertexFunction],
        states: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype | None = None,
    ):
        for index, function in enumerate(functions):
            if not isinstance(function, VertexFunction):
                raise ValueError(f"function {index} is {function!r}, expected a VertexFunction")
            unknown = sorted(set(function.gathers) - set(states))
            if unknown:
                raise ValueError(f"function {index} gathers {unknown[0]!r}, expected of {', '.join(states)}")
        for name, shape in states.items():
            if not isinstance(shape, Sequence):
                raise ValueError(f"state {name!r} has shape {shape!r}, expected a tuple of sizes, such as ({shape},)")
        self.functions, self.dtype = tuple(functions), dtype
        self.shapes = {name: tuple(shape) for name, shape in states.items()}
        self.pulls = names_of([function.pulls for function in functions])
        self.pushes = names_of([function.pushes for function in functions])
        outputs = tuple(name for name in self.pushes if name not in states)
        names = (*states, *outputs, *self.pulls)  # each has a column of the plan, in this order
        if len(set(names)) < len(names):
            raise ValueError("an input has the name of a state or an output, expected different names")
        self._column = {name: column for column, name in enumerate(names)}
        self._kind = repr((names, [(function.gathers, function.pulls, function.pushes) for function in functions]))

    def plan(self, samples: Sequence[Edges], scheduler: str = "lookahead", sharing: bool = False) -> VertexPlan:
        """Return the plan of a minibatch. Minibatches of the same shape are scheduled once.

        Args:
            scheduler: a name in `iep.batching.schedulers.SCHEDULERS`.
            sharing: merge vertices that run the same function on the same rows and the same children's states.

        Raises:
            ValueError: there is no sample, or one has no vertices; a child is not before its parent; a function, an
                input or the scheduler is unknown; a vertex has no row of an input that its function pulls, or neither
                pulls nor gathers.
        """
        pulls, pushes = ([getattr(function, kind) for function in self.functions] for kind in ("pulls", "pushes"))
        results = [self._results(function) for function in self.functions]
        joined = join(samples, pulls, pushes, results, sharing)
        graph = share(joined.graph) if sharing else joined.graph
        key = key_of(
            f"{scheduler} {sharing} {self._kind}",
            *(len(samples), graph.num_inputs, graph.op, graph.args, graph.roots, joined.pulls),
            *joined.fields,
        )
        (graph, schedule, plan, order), _ = remembered(
            key, graph.num_nodes, lambda: self._make_plan(graph, joined, len(samples), scheduler)
        )
        ids = np.concatenate([np.empty(0, dtype=np.int64), *joined.rows.values()])[order]
        rows = torch.from_numpy(ids).split([len(each) for each in joined.rows.values()])
        return VertexPlan(graph, schedule, plan, dict(zip(joined.rows, rows, strict=True)))

    def __call__(self, plan: VertexPlan, inputs: Mapping[str, Tensor], defer_weight_grads: bool = True) -> Results:
        """Run the vertices of a minibatch.

        Args:
            plan: the plan, with its tensors on the device of the inputs.
            inputs: the rows `plan.rows[name]` of each input, (U, ...), by name.
            defer_weight_grads: compute the gradient of each weight once, over all calls.

        Raises:
            ValueError: an input is missing or has another number of rows, or a function does not scatter or push all
                tensors that it declares.
        """
        for name, ids in plan.rows.items():
            if name not in inputs:
                raise ValueError(f"no rows of {name!r} are given, which vertices pull")
            if len(inputs[name]) != len(ids):
                raise ValueError(f"{len(inputs[name])} rows of {name!r} are given, expected {len(ids)}, as in the plan")
        modules = {op: self._module(op) for op in {group.op for group in plan.schedule}}
        columns = {self._column[name]: inputs[name] for name, ids in plan.rows.items() if len(ids)}
        results = execute(plan.plan, modules, columns, defer_weight_grads)
        count = len(self.shapes)
        pushing = {name for op in modules for name in self._function(op)[0].pushes}
        pushed = dict.fromkeys(self.pushes, results[0].new_empty(0))
        pushed.update(zip((name for name in self.pushes if name in pushing), results[count:], strict=True))
        return Results(dict(zip(self.shapes, results[:count], strict=True)), pushed)

    def _make_plan(
        self, graph: Graph, joined: Joined, num_samples: int, scheduler: str
    ) -> tuple[Graph, Schedule, Plan, np.ndarray]:
        """Return graph, schedule and plan, and the order in which the run needs the inputs of the joined graph."""
        schedule = make_schedule(graph, scheduler)
        order = _by_use(graph, schedule, joined.pulls)
        slot = np.append(np.arange(graph.num_inputs + graph.num_nodes), -1)
        slot[order] = np.arange(graph.num_inputs)
        graph = replace(graph, args=slot[graph.args])
        last, *pushing = np.split(graph.roots, np.cumsum([num_samples, *map(len, joined.fields)])[:-1])
        # An output that no vertex of the minibatch pushes has no shape and is omitted.
        pushed = [root for root in zip(pushing, joined.fields, strict=True) if len(root[0])]
        roots = (*((last, state) for state in range(len(self.shapes))), *pushed)
        signatures = {op: self._signature(op) for op in {group.op for group in schedule}}
        types = Types(joined.pulls + self._column[self.pulls[0]], signatures, roots)
        return graph, schedule, make_plan(graph, schedule, types), order

    def _function(self, op: int) -> tuple[VertexFunction, int]:
        """Return the function of an op and the number of children of its vertices."""
        num_children, function = divmod(op, len(self.functions))
        return self.functions[function], num_children

    def _results(self, function: VertexFunction) -> tuple[str, ...]:
        """Return the names of the states and outputs that a function computes, in order."""
        return *self.shapes, *(name for name in function.pushes if name not in self.shapes)

    def _signature(self, op: int) -> Signature:
        function, num_children = self._function(op)
        first = len(function.pulls)
        gathers = [self._column[state] for state in function.gathers] if num_children else []
        reads = [*map(Read, range(first)), *(Read(first, num_children, state) for state in gathers)]
        return Signature(tuple(reads), tuple(self._column[name] for name in self._results(function)))

    def _module(self, op: int) -> Callable[..., tuple[Tensor, ...]]:
        """Return the function of an op as a module from inputs and children's states to states and outputs."""
        function, num_children = self._function(op)
        names, first = self._results(function), len(function.pulls)
        index, shapes = op % len(self.functions), list(self.shapes.items())

        def module(*arguments: Tensor) -> tuple[Tensor, ...]:
            """Run the function on the rows that it pulls, followed by the states that it gathers."""
            gathered = arguments[first:]
            if not num_children:
                like = arguments[0]
                dtype = self.dtype or (like.dtype if like.is_floating_point() else torch.get_default_dtype())
                gathered = [like.new_empty(len(like), 0, *self.shapes[each], dtype=dtype) for each in function.gathers]
            pulled = dict(zip(function.pulls, arguments, strict=False))
            vertices = Vertices(num_children, dict(zip(function.gathers, gathered, strict=True)), pulled)
            function.run(vertices)
            results = tuple([vertices.results.get(name) for name in names])
            if len(vertices.results) != len(names) or not all(isinstance(each, Tensor) for each in results):
                given = ", ".join(f"{name} ({type(each).__name__})" for name, each in vertices.results.items())
                expected = f"expected tensors {', '.join(names)}"
                raise ValueError(f"function {index} scatters and pushes {given or 'nothing'}, {expected}")
            for result, (name, shape) in zip(results, shapes, strict=False):
                if result.shape[1:] != shape:
                    raise ValueError(f"state {name!r} has shape {tuple(result.shape[1:])}, expected {shape}")
            return results

        return module


def _by_use(graph: Graph, schedule: Schedule, pulls: np.ndarray) -> np.ndarray:
    """Return the order of inputs by pull and, within each pull, by the calls that read them.

    The rows of a call are then adjacent. `pulls` is the pull to which each input belongs, (num_inputs,).
    """
    args = graph.args[np.concatenate([group.nodes for group in schedule])]
    reads = args[(args >= 0) & (args < graph.num_inputs)]
    position = np.arange(graph.num_inputs)
    position[reads[::-1]] = np.arange(len(reads))[::-1]  # the first read of each input
    return np.lexsort((position, pulls))
