"""Vertex functions: what a vertex does, declared once, and edges, which are all that a sample brings -> results.

A vertex *gathers* what the vertices that it depends on have scattered, *pulls* rows from outside the graph, *scatters*
what others may gather and *pushes* what leaves the graph (Xu et al., Cavs: A Vertex-centric Symbolic Programming Model
for Dynamic Dataflow Graphs, section 2). A network is a few such functions of plain PyTorch code. Samples are integer
arrays, joined by array code; no graph is built by running code. Their vertices run together, all that are activated at
a time, through the same graph, schedulers and executor as everything else here.

Shapes: S samples, V vertices of one, N of all, A greatest number of children, G vertices of a call, U rows pulled.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from iep.batching.cells import Cell
from iep.batching.edges import Edges, Joined, join, names_of
from iep.batching.execute import execute
from iep.batching.graph import Graph
from iep.batching.layout import Layout, lay_out
from iep.batching.plans import key_of, remembered
from iep.batching.schedulers import Schedule, make_schedule
from iep.batching.sharing import share
from iep.batching.types import Read, Signature, Types


class Vertices:
    """The G vertices of one call, to the function that they run: all of them have as many children.

    What they gather and pull is to be read alone: it may be the memory of what was scattered or given.
    """

    def __init__(self, num_children: int, gathered: Mapping[str, Tensor], pulled: Mapping[str, Tensor]):
        """What is gathered and pulled, by name."""
        self.num_children = num_children
        self._gathered, self._pulled = gathered, pulled
        self.results: dict[str, Tensor] = {}

    def gather(self, state: str) -> Tensor:
        """(G, num_children, ...) what their children scattered, in order.

        Raises:
            ValueError: the function does not say that it gathers this state.
        """
        return self._argument(state, "gathers", self._gathered)

    def pull(self, name: str) -> Tensor:
        """(G, ...) their rows from outside.

        Raises:
            ValueError: the function does not say that it pulls these.
        """
        return self._argument(name, "pulls", self._pulled)

    @staticmethod
    def _argument(name: str, kind: str, arguments: Mapping[str, Tensor]) -> Tensor:
        if name not in arguments:
            known = ", ".join(arguments) or "nothing"
            raise ValueError(f"{name!r} is not among what the vertex function {kind}, expected of {known}")
        return arguments[name]

    def scatter(self, **states: Tensor) -> None:
        """Hand on (G, ...) states to the vertices that gather them."""
        self.results.update(states)

    def push(self, **outputs: Tensor) -> None:
        """Hand (G, ...) outputs to the outside."""
        self.results.update(outputs)


@dataclass(frozen=True)
class VertexFunction:
    """What a vertex does. Every function scatters all states of its network."""

    run: Callable[[Vertices], None] | Cell
    """Plain PyTorch code for G vertices. Or a cell: it takes what they pull and then what they gather, by the network's
    order of states, nothing of this without children, and makes what they scatter, by that order, and push."""
    gathers: tuple[str, ...] = ()
    """Names of the states that it gathers."""
    pulls: tuple[str, ...] = ()
    """Of the tables outside of which each vertex pulls a row."""
    pushes: tuple[str, ...] = ()
    """Of what each vertex pushes."""

    def __post_init__(self) -> None:
        for kind in ("gathers", "pulls", "pushes"):
            if isinstance(getattr(self, kind), str):
                raise ValueError(f"{kind}={getattr(self, kind)!r}, expected a tuple of names")


@dataclass(frozen=True, eq=False)
class VertexPlan:
    """How the vertices of a minibatch run: integers only."""

    graph: Graph
    schedule: Schedule
    layout: Layout
    rows: Mapping[str, Tensor]
    """(U,) by name, the rows of each table outside to bring, in this order; each once where vertices share."""

    def to(self, device: torch.device | str) -> "VertexPlan":
        """The same with its tensors on `device`."""
        rows = {name: ids.to(device, non_blocking=True) for name, ids in self.rows.items()}
        layout = self.layout.map(lambda index: index.to(device, non_blocking=True))
        return replace(self, layout=layout, rows=rows)


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a run of a vertex network returns."""

    roots: Mapping[str, Tensor]
    """(S, ...) by state, what every sample's last vertex scattered."""
    pushed: Mapping[str, Tensor]
    """By name, one row for each vertex that pushes, sample by sample in the order of the vertices; (0,) without any."""


class VertexNetwork:
    """Vertex functions, and the states that their vertices hand on."""

    def __init__(
        self,
        functions: Sequence[VertexFunction],
        states: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype | None = None,
    ):
        """
        Args:
            functions: numbered as the samples' `Edges.function` says.
            states: the shape of each state of a vertex.
            dtype: of what a vertex without children gathers; None for that of what it pulls first, or PyTorch's default
                where that is whole numbers. What is scattered is kept in the dtype of the first that is.

        Raises:
            ValueError: a function gathers what is no state, or a name is used for two things.
        """
        self.functions, self.shapes, self.dtype = tuple(functions), dict(states), dtype
        self.pulls = names_of([function.pulls for function in self.functions])
        self.pushes = names_of([function.pushes for function in self.functions])
        self._bundles = _gathered_together(tuple(self.shapes), self.functions)
        self.states = tuple(chain(*self._bundles))
        functions = [(function.gathers, function.pulls, function.pushes) for function in self.functions]
        self._signatures: dict[int, Signature] = {}
        self._kind = repr((self.states, functions))
        names = (*self.states, *self.pushes, *self.pulls)
        if len(set(names)) < len(self.states) + len(self.pushes) + len(self.pulls):
            raise ValueError("states, pulls and pushes have a name in common, expected different ones")
        for place, function in enumerate(self.functions):
            unknown = sorted(set(function.gathers) - set(self.states))
            if unknown:
                raise ValueError(f"function {place} gathers {unknown[0]!r}, expected of {', '.join(self.states)}")

    def plan(
        self,
        samples: Sequence[Edges],
        scheduler: str = "lookahead",
        sharing: bool = False,
        tables: Mapping[str, int] | None = None,
    ) -> VertexPlan:
        """How to run a minibatch of samples. Those of the same shape as an earlier one run as that did.

        Args:
            scheduler: a name in `SCHEDULERS`.
            sharing: run vertices once that run the same function on the same rows and the same children's results.
            tables: how many rows the tables outside have that are to be given whole, in their order.

        Raises:
            ValueError: there is no sample, or one without vertices; a child is not before its parent; there is no such
                function, table or scheduler; a vertex lacks a row that its function pulls, or neither pulls nor
                gathers.
        """
        unknown = sorted(set(tables or {}) - set(self.pulls))
        if unknown:
            raise ValueError(f"no function pulls of a table {unknown[0]!r}, expected of {', '.join(self.pulls)}")
        pulls, pushes = ([getattr(f, name) for f in self.functions] for name in ("pulls", "pushes"))
        joined = join(samples, pulls, pushes, sharing, tables or {})
        graph = share(joined.graph) if sharing else joined.graph
        is_whole = [name in (tables or {}) for name in self.pulls]
        key = key_of(f"{scheduler} {sharing} {is_whole} {self._kind}", *_integers(graph, joined, len(samples)))
        (schedule, layout, arrival), _ = remembered(
            key, graph.num_nodes, lambda: self._lay_out(graph, joined, len(samples), scheduler, sharing, is_whole)
        )
        rows = np.concatenate([np.empty(0, dtype=np.int64), *joined.rows.values()])[arrival]
        each = torch.from_numpy(rows).split([len(ids) for ids in joined.rows.values()])
        return VertexPlan(graph, schedule, layout, dict(zip(joined.rows, each, strict=True)))

    def _lay_out(
        self, graph: Graph, joined: Joined, num_samples: int, scheduler: str, sharing: bool, is_whole: list[bool]
    ) -> tuple[Schedule, Layout, np.ndarray]:
        """Schedule and layout, and the input slots in the order in which they arrive."""
        schedule = make_schedule(graph, scheduler)
        last, *pushing = np.split(graph.roots, np.cumsum([num_samples, *map(len, joined.places)])[:-1])
        roots = [(last, bundle) for bundle in range(len(self._bundles))]
        # What no vertex pushes has no shape, and is left out.
        pushed = zip(pushing, joined.places, strict=True)
        roots += [(slots, len(self._bundles) + places) for slots, places in pushed if len(slots)]
        ops = {group.op for group in schedule}
        for op in ops - self._signatures.keys():
            self._signatures[op] = self._signature(op)
        signatures = {op: self._signatures[op] for op in ops}
        inputs = joined.pulls + len(self._bundles) + len(self.pushes)
        arrival = _by_use(graph, schedule, joined, sharing, is_whole)
        types = Types(inputs, signatures, tuple(roots), parts=tuple(map(len, self._bundles)), arrival=arrival)
        return schedule, lay_out(graph, schedule, types, reuse=False), arrival

    def __call__(self, plan: VertexPlan, inputs: Mapping[str, Tensor], defer_weight_grads: bool = True) -> Outcome:
        """Run the vertices of a minibatch.

        Args:
            plan: its tensors where the inputs are.
            inputs: by name of what is pulled, (U, ...) the rows `plan.rows[name]` of the table outside.
            defer_weight_grads: compute the gradient of each weight once, over all calls.

        Raises:
            ValueError: rows are missing, or a function does not scatter or push what it should.
        """
        missing = sorted(set(self.pulls) - inputs.keys())
        if missing:
            raise ValueError(f"no rows of {missing[0]!r} are given, which vertices pull")
        modules = {op: self._module(op) for op in {group.op for group in plan.schedule}}
        first = len(self.states) + len(self.pushes)
        columns = {first + place: inputs[name] for place, name in enumerate(self.pulls)}
        results = execute(plan.layout, modules, columns, defer_weight_grads, read_only=True)
        count = len(self.states)
        pushing = {name for op in modules for name in self._function(op)[0].pushes}
        pushed = dict.fromkeys(self.pushes, results[0].new_empty(0))
        pushed.update(zip((name for name in self.pushes if name in pushing), results[count:], strict=True))
        return Outcome(dict(zip(self.states, results[:count], strict=True)), pushed)

    def _function(self, op: int) -> tuple[VertexFunction, int]:
        """The function of an op, and how many children its vertices have."""
        num_children, place = divmod(op, len(self.functions))
        return self.functions[place], num_children

    def _signature(self, op: int) -> Signature:
        function, num_children = self._function(op)
        first, count = len(function.pulls), len(self._bundles)
        gathers = [
            Read(first, num_children, place)
            for place, bundle in enumerate(self._bundles)
            if num_children and bundle[0] in function.gathers
        ]
        pushes = [count + self.pushes.index(name) for name in function.pushes]
        return Signature((*map(Read, range(first)), *gathers), (*range(count), *pushes))

    def _module(self, op: int) -> Callable[..., tuple[Tensor, ...]]:
        """What maps the arguments of a call to its results."""
        function, num_children = self._function(op)
        if isinstance(function.run, Cell):
            return function.run
        gathers = [state for state in self.states if state in function.gathers]
        made = (*self.states, *function.pushes)

        first = len(function.pulls)

        def module(*arguments: Tensor) -> tuple[Tensor, ...]:
            """What is pulled (G, ...), then what is gathered (G, children, ...) -> the states and what is pushed.

            Raises:
                ValueError: the function hands on something else.
            """
            if num_children:
                gathered = arguments[first:]
            else:
                like = arguments[0]
                dtype = self.dtype or (like.dtype if like.is_floating_point() else torch.get_default_dtype())
                gathered = [like.new_empty(len(like), 0, *self.shapes[name], dtype=dtype) for name in gathers]
            pulled = dict(zip(function.pulls, arguments[:first], strict=True))
            vertices = Vertices(num_children, dict(zip(gathers, gathered, strict=True)), pulled)
            function.run(vertices)
            results = vertices.results
            if len(results) != len(made) or any(not isinstance(results.get(name), Tensor) for name in made):
                done = ", ".join(f"{name} ({type(each).__name__})" for name, each in results.items()) or "nothing"
                raise ValueError(
                    f"function {op % len(self.functions)} hands on {done}, expected tensors {', '.join(made)}"
                )
            for name, shape in self.shapes.items():
                if results[name].shape[1:] != shape:
                    found = tuple(results[name].shape[1:])
                    raise ValueError(f"state {name!r} is {found} of a vertex, expected {tuple(shape)}")
            return tuple([results[name] for name in made])

        return module


def _gathered_together(states: tuple[str, ...], functions: Sequence[VertexFunction]) -> tuple[tuple[str, ...], ...]:
    """The states in bundles that the same functions gather."""
    bundles: dict[tuple[bool, ...], list[str]] = {}
    for state in states:
        bundles.setdefault(tuple(state in function.gathers for function in functions), []).append(state)
    return tuple(map(tuple, bundles.values()))


def _integers(graph: Graph, joined: Joined, num_samples: int) -> list[np.ndarray | int]:
    """All that a plan depends on but for the functions' names."""
    return [num_samples, graph.num_inputs, graph.op, graph.args, graph.roots, joined.pulls, *joined.places]


def _by_use(graph: Graph, schedule: Schedule, joined: Joined, sharing: bool, is_whole: list[bool]) -> np.ndarray:
    """(num_inputs,) the input slots, pull by pull, in the order in which the calls take them, so that each call's lie
    side by side; those of tables that are given whole in their own."""
    args = graph.args[np.concatenate([group.nodes for group in schedule])]
    parts = []
    for pull, whole in enumerate(is_whole):
        slots = np.flatnonzero(joined.pulls == pull)
        if not whole and len(slots):
            taken = args[(args >= slots[0]) & (args <= slots[-1])]
            if sharing:
                taken = taken[np.sort(np.unique(taken, return_index=True)[1])]
            slots = taken
        parts.append(slots)
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])
