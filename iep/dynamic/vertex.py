"""Vertex functions, declared once, and the edges of each sample -> states of the samples' last vertices and outputs.

A vertex *gathers* the states that its children have scattered, *pulls* rows from outside the graph, *scatters* states
that others may gather and *pushes* outputs that leave the graph (Xu et al., Cavs: A Vertex-centric Symbolic Programming
Model for Dynamic Dataflow Graphs, section 2). A network is a few such functions of plain PyTorch code. Samples are
integer arrays, joined by array code; no graph is built by running code. All vertices that are ready run
together, through the same graph, schedulers and executor as every other network.

Shapes: S samples, V vertices of one, N of all, A greatest number of children, G vertices of
a call, F functions, U rows pulled.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from iep.batching.execute import execute
from iep.batching.graph import Graph
from iep.batching.plan import Plan, Read, Signature, Types, make_plan
from iep.batching.schedulers import Schedule, make_schedule
from iep.batching.sharing import share
from iep.dynamic.plan_cache import cached_plan
from iep.kernels.deferred import weight_grad_context


@dataclass(frozen=True, eq=False)
class Edges:
    """The graph of the vertices of one sample.

    Raises:
        ValueError: a field is not an array of integers of the documented shape.
    """

    children: np.ndarray
    """The vertices from which each vertex gathers, (V, A), in order, all before itself; -1 after the last."""
    function: np.ndarray | None = None
    """The number of each vertex's function, (V,); may be None for a network of one function."""
    pulls: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The row that each vertex pulls, (V,) by input; ignored if the vertex's function does not pull this input."""

    def __post_init__(self) -> None:
        each = self.pulls if self.function is None else {"function": self.function, **self.pulls}
        for name, array in {"children": self.children, **each}.items():
            width = ("A",) if name == "children" else ()
            if array.dtype.kind not in "iu" or array.ndim != 1 + len(width) or len(array) != len(self.children):
                expected = ", ".join(map(str, (len(self.children), *width)))
                raise ValueError(f"{name} {array.dtype} {array.shape}, expected an array of integers ({expected})")


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
        """Return the states that the children scattered, (G, num_children, ...), in the order of the children."""
        return self._gathered[state]

    def pull(self, name: str) -> Tensor:
        """Return the rows of an input that the vertices pull, (G, ...)."""
        return self._pulled[name]

    def scatter(self, **states: Tensor) -> None:
        """Pass (G, ...) states to the vertices that gather them."""
        self.results.update(states)

    def push(self, **outputs: Tensor) -> None:
        """Add (G, ...) outputs of these vertices to the results of the run."""
        self.results.update(outputs)


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


@dataclass(frozen=True, eq=False)
class VertexPlan:
    """The plan by which the vertices of a minibatch run, which consists of integers."""

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
        ValueError: a name is used for two things.
    """

    def __init__(
        self,
        functions: Sequence[VertexFunction],
        states: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype | None = None,
    ):
        self.functions, self.dtype = tuple(functions), dtype
        self.shapes = {name: tuple(shape) for name, shape in states.items()}
        self.pulls = _distinct([function.pulls for function in functions])
        self.pushes = _distinct([function.pushes for function in functions])
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
            ValueError: there is no sample, or one has no vertices; a child is not before its parent; a function or the
                scheduler is unknown; a vertex has no row of an input that its function pulls, or has no arguments.
        """
        results = [self._results(function) for function in self.functions]
        graph, fields, pulls, all_rows = _join(samples, self.functions, results, sharing)
        graph = share(graph) if sharing else graph
        (schedule, plan, order), _ = cached_plan(
            lambda: self._make_plan(graph, fields, pulls, len(samples), scheduler),
            graph.num_nodes,
            f"{scheduler} {sharing} {self._kind}",
            *(len(samples), graph.num_inputs),
            *(graph.op, graph.args, graph.roots, pulls, *fields),
        )
        ids = np.concatenate([np.empty(0, dtype=np.int64), *all_rows.values()])[order]
        rows = torch.from_numpy(ids).split([len(each) for each in all_rows.values()])
        return VertexPlan(schedule, plan, dict(zip(all_rows, rows, strict=True)))

    def __call__(self, plan: VertexPlan, inputs: Mapping[str, Tensor], defer_weight_grads: bool = True) -> Results:
        """Run the vertices of a minibatch.

        Args:
            plan: the plan, with its tensors on the device of the inputs.
            inputs: the rows `plan.rows[name]` of each input, (U, ...), by name.
            defer_weight_grads: compute the gradient of each weight once, over all calls.

        Raises:
            ValueError: an input has another number of rows than in the plan, a function does not scatter and push what
                it declares, or a state has another shape than declared.
        """
        modules = {op: self._module(op) for op in {group.op for group in plan.schedule}}
        columns = {self._column[name]: inputs[name] for name, ids in plan.rows.items() if len(ids)}
        results = execute(plan.plan, modules, columns, weight_grad_context(defer_weight_grads))
        count = len(self.shapes)
        pushing = {name for op in modules for name in self._function(op)[0].pushes}
        pushed = dict.fromkeys(self.pushes, results[0].new_empty(0))
        pushed.update(zip((name for name in self.pushes if name in pushing), results[count:], strict=True))
        return Results(dict(zip(self.shapes, results[:count], strict=True)), pushed)

    def _make_plan(
        self, graph: Graph, fields: list[np.ndarray], pulls: np.ndarray, num_samples: int, scheduler: str
    ) -> tuple[Schedule, Plan, np.ndarray]:
        """Return schedule and plan, and the order in which the run needs the inputs of the joined graph."""
        schedule = make_schedule(graph, scheduler)
        order = _by_use(graph, schedule, pulls)
        slot = np.append(np.arange(graph.num_inputs + graph.num_nodes), -1)
        slot[order] = np.arange(graph.num_inputs)
        graph = replace(graph, args=slot[graph.args])
        last, *pushing = np.split(graph.roots, np.cumsum([num_samples, *map(len, fields)])[:-1])
        # An output that no vertex of the minibatch pushes has no shape and is omitted.
        pushed = [root for root in zip(pushing, fields, strict=True) if len(root[0])]
        states: list[tuple[np.ndarray, np.ndarray | int]] = [(last, state) for state in range(len(self.shapes))]
        signatures = {op: self._signature(op) for op in {group.op for group in schedule}}
        types = Types(pulls + self._column[self.pulls[0]], signatures, (*states, *pushed))
        return schedule, make_plan(graph, schedule, types), order

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

        def module(*arguments: Tensor) -> tuple[Tensor, ...]:
            """Run the function on the rows that it pulls, followed by the states that it gathers."""
            gathered: Sequence[Tensor] = arguments[first:]
            if not num_children:
                like = arguments[0]
                dtype = self.dtype or (like.dtype if like.is_floating_point() else torch.get_default_dtype())
                gathered = [like.new_empty(len(like), 0, *self.shapes[each], dtype=dtype) for each in function.gathers]
            pulled = dict(zip(function.pulls, arguments, strict=False))
            vertices = Vertices(num_children, dict(zip(function.gathers, gathered, strict=True)), pulled)
            function.run(vertices)
            if vertices.results.keys() != set(names):
                given = ", ".join(vertices.results) or "nothing"
                raise ValueError(f"a vertex function scatters and pushes {given}, expected {', '.join(names)}")
            shapes = {name: tuple(vertices.results[name].shape[1:]) for name in self.shapes}
            if shapes != self.shapes:
                raise ValueError(f"states have shapes {shapes}, expected {self.shapes}")
            return tuple(vertices.results[name] for name in names)

        return module


def _join(
    samples: Sequence[Edges], functions: Sequence[VertexFunction], results: Sequence[tuple[str, ...]], sharing: bool
) -> tuple[Graph, list[np.ndarray], np.ndarray, dict[str, np.ndarray]]:
    """Return one graph of all samples, in which vertices keep their order, and what its inputs and outputs are.

    Args:
        results: the names of all states and outputs that a function computes, by function.
        sharing: a row of an input is one input of the graph, even if several vertices pull it.

    Returns:
        The graph, whose roots are the last vertex of each sample, then for each output the vertices that push it; the
        index of each output among the results of the functions of these vertices; the index of the name of each input
        of the graph, (num_inputs,); and the rows of each name, (U,).
    """
    pulls, pushes = ([getattr(function, kind) for function in functions] for kind in ("pulls", "pushes"))
    sizes_S = np.array([len(sample.children) for sample in samples], dtype=np.int64)
    if not len(sizes_S) or not sizes_S.all():
        empty = f"sample {np.argmin(sizes_S)} has no vertices" if len(sizes_S) else "there is no sample"
        raise ValueError(f"{empty}, expected one vertex or more")
    sample_N = np.repeat(np.arange(len(sizes_S)), sizes_S)
    first_N = (sizes_S.cumsum() - sizes_S)[sample_N]
    children_NA, function_N = _children(samples), _functions(samples, len(functions), sample_N)
    _check_children(children_NA, first_N, sample_N)

    rows, name_of_input, num_inputs = {}, [np.empty(0, dtype=np.int64)], 0
    args = np.full((len(sample_N), max(map(len, pulls)) + children_NA.shape[1]), -1)
    for number, name in enumerate(_distinct(pulls)):
        argument_N = _index_of(name, pulls)[function_N]
        vertices = np.flatnonzero(argument_N >= 0)
        ids = np.concatenate([sample.pulls[name] for sample in samples])[vertices]
        if ids.min(initial=0) < 0:
            where = _vertex(vertices[np.argmin(ids)], first_N, sample_N)
            raise ValueError(f"{where}: its function pulls {name!r}, but it has no row")
        rows[name], slots = np.unique(ids, return_inverse=True) if sharing else (ids, np.arange(len(ids)))
        args[vertices, argument_N[vertices]] = num_inputs + slots
        num_inputs += len(rows[name])
        name_of_input.append(np.full(len(rows[name]), number))
    slots_NA = np.where(children_NA >= 0, children_NA + (first_N[:, None] + num_inputs), -1)
    for number, names in enumerate(pulls):
        vertices, first = np.flatnonzero(function_N == number), len(names)
        args[vertices, first : first + slots_NA.shape[1]] = slots_NA[vertices]

    outputs, fields = [num_inputs + sizes_S.cumsum() - 1], []
    for name in _distinct(pushes):
        vertices = np.flatnonzero(_index_of(name, pushes)[function_N] >= 0)
        outputs.append(num_inputs + vertices)
        fields.append(_index_of(name, results)[function_N[vertices]])
    op = (children_NA.T >= 0).sum(axis=0) * len(functions) + function_N
    graph = Graph(num_inputs, op, args, sample_N, np.concatenate(outputs))
    return graph, fields, np.concatenate(name_of_input), rows


def _distinct(names_F: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the distinct names of all functions, in the order in which they first occur."""
    return tuple(dict.fromkeys(name for names in names_F for name in names))


def _index_of(name: str, names_F: Sequence[Sequence[str]]) -> np.ndarray:
    """Return the index of the name among those of each function, (F,), or -1."""
    return np.array([names.index(name) if name in names else -1 for names in names_F])


def _children(samples: Sequence[Edges]) -> np.ndarray:
    """Return the children of all vertices, (N, A), as numbers within their samples."""
    children, width = [sample.children for sample in samples], max(sample.children.shape[1] for sample in samples)
    if any(each.shape[1] < width for each in children):
        children = [np.pad(each, ((0, 0), (0, width - each.shape[1])), constant_values=-1) for each in children]
    return np.concatenate(children)


def _functions(samples: Sequence[Edges], count: int, sample_N: np.ndarray) -> np.ndarray:
    """Return the function of each vertex, (N,)."""
    if count == 1:
        return np.zeros(len(sample_N), dtype=np.int64)
    function_N = np.concatenate([sample.function for sample in samples])
    if not 0 <= function_N.min() <= function_N.max() < count:
        at = int(np.argmax((function_N < 0) | (function_N >= count)))
        raise ValueError(f"sample {sample_N[at]}: function {function_N[at]}, expected 0 to {count - 1}")
    return function_N


def _check_children(children_NA: np.ndarray, first_N: np.ndarray, sample_N: np.ndarray) -> None:
    own_N, children_AN = np.arange(len(first_N)) - first_N, children_NA.T
    bad_N = ((children_AN >= own_N) | (children_AN < -1)).any(axis=0)
    bad_N |= ((children_AN[1:] >= 0) & (children_AN[:-1] < 0)).any(axis=0)  # a vertex after -1
    if bad_N.any():
        at = int(np.argmax(bad_N))
        where, children = _vertex(at, first_N, sample_N), children_NA[at].tolist()
        raise ValueError(f"{where} has children {children}, expected vertices before it, then -1")


def _vertex(at: int, first_N: np.ndarray, sample_N: np.ndarray) -> str:
    return f"sample {sample_N[at]}, vertex {at - first_N[at]}"


def _by_use(graph: Graph, schedule: Schedule, pulls: np.ndarray) -> np.ndarray:
    """Return the order of inputs by pull and, within each pull, by the calls that read them.

    The rows of a call are then adjacent. `pulls` is the pull to which each input belongs, (num_inputs,).
    """
    args = graph.args[np.concatenate([group.nodes for group in schedule])]
    reads = args[(args >= 0) & (args < graph.num_inputs)]
    position = np.arange(graph.num_inputs)
    position[reads[::-1]] = np.arange(len(reads))[::-1]  # the first read of each input
    return np.lexsort((position, pulls))
