"""A static network of nodes that route messages by their states -> the graph of a minibatch, as in AMPNet.

The network is the intermediate representation of Gaunt et al. 2017 (AMPNet, sections 3 and 4). It is built once, with
loops and conditions, and an instance is a few messages that are pumped into it. A message has a *payload* of tensors
and a *state*, any hashable value, such as a `NamedTuple` of a position and a length. Control depends on states alone,
so that `MessageGraph.unroll` follows every message before a tensor is computed. Only `Apply` and `Reduce` become nodes
of the graph. The other nodes decide which values these read, and cost nothing when the plan runs: a payload consists
of references. The backward pass is that of the plan, and needs neither states nor messages.

Messages need not be grouped to be computed together, as in the paper: the schedule batches the nodes of an op, within
an instance and across instances.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain, count
from typing import NamedTuple

import numpy as np

from iep.batching.graph import Graph
from iep.batching.placement import OpPlacement, make_placed_plan
from iep.batching.plan import Plan, Read, Signature, Types, make_plan
from iep.batching.schedulers import make_schedule

REMEMBERED = 1024
"""The number of instances whose graphs a network remembers. Instances with equal states have equal graphs."""
State = Hashable
Payload = tuple[tuple[int, int], ...]
"""The slot of each tensor's value, and the position of the tensor in the value."""
Instance = Sequence[tuple[str, Sequence[int], State]]
"""The messages with which an instance begins: the node, the slots of the inputs in the payload, and the state."""


class Message(NamedTuple):
    """A message on its way to a node."""

    to: str
    """The name of the node. For port n of a `Concat`, ".n" follows."""
    payload: Payload
    state: State

    def error(self, what: str) -> ValueError:
        """Return an error that names the node and the state."""
        return ValueError(f"node {self.to!r}, state {self.state!r}: {what}")


class Apply(NamedTuple):
    """A payload transform: the module of an op maps the tensors of a payload to those of the message that is sent."""

    to: str
    op: int
    reads: int | tuple[Read, ...] = 1
    """How the module reads the payload; a number stands for so many tensors, each of which is an argument."""
    makes: tuple[int, ...] = (0,)
    """The columns of the tensors that the module returns."""

    @property
    def signature(self) -> Signature:
        return Signature(tuple(map(Read, range(self.reads))) if isinstance(self.reads, int) else self.reads, self.makes)


class Reduce(NamedTuple):
    """A payload transform that reduces any number of tensors to one, such as those of a `Group` to their sum.

    All nodes of an op have the same number of arguments. The module therefore reduces `arity` tensors at a time, filled
    up with a neutral one, and more tensors need a tree of nodes. Payloads of different sizes thus run in one call. An
    op for each size would need a call for each, and a chain of binary ops almost as many calls as there are tensors.
    """

    to: str
    op: int
    """The op, whose module is associative and maps (G, arity, ...) to (G, ...)."""
    arity: int
    """The number of tensors at a time, 2 or more."""
    neutral: int
    """The slot of an input that changes no result, such as zeros for a sum."""
    makes: tuple[int] = (0,)
    """The column of all these tensors."""

    @property
    def signature(self) -> Signature:
        return Signature((Read(0, self.arity),), self.makes)


class Cond(NamedTuple):
    """A condition, which sends a message to the successor that its state determines."""

    rule: Callable[[State], Hashable]
    routes: Mapping[Hashable, str | None]
    """The successor for each value of the rule; None ends a message, whose tensors other messages have too."""

    @property
    def to(self) -> Iterable[str | None]:
        return self.routes.values()


class Phi(NamedTuple):
    """A join point of several predecessors, such as the beginning of a loop, which sends their messages on."""

    to: str


class Isu(NamedTuple):
    """A state update, such as the next position of a loop. It need not be invertible here."""

    to: str
    update: Callable[[State], State]


class Bcast(NamedTuple):
    """A broadcast of every message to all successors."""

    to: tuple[str, ...]


class Flatmap(NamedTuple):
    """A node that sends the payload on once for each of several states, which may be none."""

    to: str
    states: Callable[[State], Iterable[State]]


class Split(NamedTuple):
    """A partition, which sends the first tensor of a payload to the first successor, and so on, or to none."""

    to: tuple[str | None, ...]


class Concat(NamedTuple):
    """A concatenation of the payloads of one message from each port in the same state, in the order of the ports."""

    to: str
    ports: int = 2


class Group(NamedTuple):
    """A group joins the payloads of several messages: the first tensors of all, then the second ones, and so on."""

    to: str
    size: Callable[[State], int]
    """The state of the group -> the number of its messages, one or more."""
    key: Callable[[State], State] = lambda state: state
    """The state of a message -> the state of its group."""
    order: Callable[[State], int] | None = None
    """The state of a message -> its position in the group; None for the order of arrival."""


class Ungroup(NamedTuple):
    """The reverse of a `Group`, which sends one message for each of several states."""

    to: str
    states: Callable[[State], Sequence[State]]


class Result(NamedTuple):
    """The end of messages of one tensor each, which a run of the plan returns."""

    order: Callable[[State], int] | None = None
    """The state of a message -> its position among those of its instance; None for the order of arrival."""
    to: tuple[()] = ()


Node = Apply | Reduce | Cond | Phi | Isu | Bcast | Flatmap | Split | Concat | Group | Ungroup | Result
"""A node of a network; `to` names its successors."""


class Unrolling:
    """The graph of one instance, while its messages pass through the network.

    Slots are numbered within the instance. Input slot n of the minibatch is -2 - n.
    """

    def __init__(self, num_inputs: int):
        self.num_inputs = num_inputs
        self.nodes: list[tuple[int, Payload]] = []
        """The op and the arguments of each node."""
        self.results: dict[str, list[tuple[int, tuple[int, int]]]] = defaultdict(list)
        """The position and the tensor of each message that reached a `Result`, by name."""
        self.waiting: dict[tuple[str, State], dict[int, Payload]] = defaultdict(dict)
        """By name and state of a node that joins messages, the payloads that have arrived by their positions."""

    def send(self, node: Node, message: Message) -> list[Message]:
        """Return the messages that a node sends for one that it has received.

        Raises:
            ValueError: the node expects another payload, or has a message for the position already.
            KeyError: the node has no route for the state.
        """
        to, payload, state = message
        match node:
            case Apply():
                if len(payload) != arity_of(node):
                    raise message.error(f"{len(payload)} tensors, but op {node.op} reads {arity_of(node)}")
                slot = self.add(node.op, payload)
                return [Message(node.to, tuple([(slot, position) for position in range(len(node.makes))]), state)]
            case Reduce(op=op, arity=arity):
                neutral = (-2 - node.neutral, 0)
                tensors = list(payload) or [neutral]
                while True:
                    tensors += [neutral] * (-len(tensors) % arity)
                    parts = [tuple(tensors[first : first + arity]) for first in range(0, len(tensors), arity)]
                    tensors = [(self.add(op, part), 0) for part in parts]
                    if len(tensors) == 1:
                        return [Message(node.to, tuple(tensors), state)]
            case Cond():
                route = node.routes[node.rule(state)]
                return [] if route is None else [Message(route, payload, state)]
            case Phi():
                return [Message(node.to, payload, state)]
            case Isu():
                return [Message(node.to, payload, node.update(state))]
            case Bcast():
                return [Message(each, payload, state) for each in node.to]
            case Flatmap():
                return [Message(node.to, payload, each) for each in node.states(state)]
            case Split():
                parts = zip(node.to, payload, strict=True)
                return [Message(each, (tensor,), state) for each, tensor in parts if each is not None]
            case Concat():
                name, _, port = to.partition(".")
                joined = self.join(message._replace(to=name), int(port), node.ports)
                return [Message(node.to, tuple(chain(*joined)), state)] if joined else []
            case Group():
                group = node.key(state)
                position = node.order and node.order(state)
                joined = self.join(message._replace(state=group), position, node.size(group))
                return [Message(node.to, tuple(chain(*zip(*joined, strict=True))), group)] if joined else []
            case Ungroup():
                states = node.states(state)
                return [Message(node.to, payload[n :: len(states)], each) for n, each in enumerate(states)]
            case Result():
                (tensor,) = payload
                self.results[to].append((node.order(state) if node.order else len(self.results[to]), tensor))
                return []

    def add(self, op: int, arguments: Payload) -> int:
        """Add a node, and return its slot."""
        self.nodes.append((op, arguments))
        return self.num_inputs + len(self.nodes) - 1

    def join(self, message: Message, position: int | None, size: int) -> list[Payload]:
        """Keep a message; return the payloads of all messages in order if it is the last of `size`, otherwise none."""
        kept = self.waiting[message.to, message.state]
        position = len(kept) if position is None else position
        if position in kept:
            raise message.error("several messages for one position, expected states that tell them apart")
        kept[position] = message.payload
        if len(kept) < size:
            return []
        del self.waiting[message.to, message.state]
        return [payload for _, payload in sorted(kept.items())]


def arity_of(node: Apply | Reduce) -> int:
    """Return the number of tensors that a node reads."""
    return max(read.first + read.width for read in node.signature.reads)


class MessageGraph:
    """A network of named nodes.

    Args:
        nodes: the nodes by name. Their successors are names, such as "embedding", or "cell.0" for port 0 of a `Concat`.

    Raises:
        ValueError: a node has an unknown successor.
    """

    def __init__(self, **nodes: Node):
        self._nodes: dict[str, Node] = {}
        for name, node in nodes.items():
            ports = [f"{name}.{port}" for port in range(node.ports)] if isinstance(node, Concat) else [name]
            self._nodes.update(dict.fromkeys(ports, node))
        for name, node in nodes.items():
            for to in (node.to,) if isinstance(node.to, str) else node.to:
                if to is not None and to not in self._nodes:
                    raise ValueError(f"node {name!r} sends to {to!r}, expected one of {', '.join(self._nodes)}")
        computing = [node for node in nodes.values() if isinstance(node, Apply | Reduce)]
        self._signatures = {node.op: node.signature for node in computing}
        self._arity = max(map(arity_of, computing))
        self._results = [name for name, node in nodes.items() if isinstance(node, Result)]
        neutral = max([-1, *(node.neutral for node in computing if isinstance(node, Reduce))])
        self._tail = np.arange(neutral, -2, -1)  # slots -1, -2 and so on of an instance, which index from the end
        self._remembered = lru_cache(REMEMBERED)(self._follow)

    def unroll(self, instances: Iterable[Instance], inputs: np.ndarray) -> tuple[Graph, Types]:
        """Follow the messages of a minibatch, and return the graph of what they compute, with its types.

        The types have a root for each `Result`, with the tensors of all instances.

        Args:
            instances: the messages with which each of one or more instances begins. Instances do not exchange messages.
            inputs: the column of each input, (num_inputs,).

        Raises:
            ValueError: a node waits for messages that do not arrive, or receives several for one position or a payload
                of another size than it expects; the message names the node and the state.
            KeyError: an instance begins at an unknown node, or a node has no route for a state.
        """
        parts, slots, num_slots = [], [], len(inputs)
        for messages in instances:
            given = np.array([slot for _, numbers, _ in messages for slot in numbers], dtype=np.int64)
            parts.append(self._remembered(tuple([(to, len(numbers), state) for to, numbers, state in messages])))
            nodes = np.arange(num_slots, num_slots := num_slots + len(parts[-1][0]))
            slots.append(np.concatenate([given, nodes, self._tail]))
        ops, args, *roots = zip(*parts, strict=True)

        def joined(tensors: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
            """Return the slots in the minibatch and the fields of tensors of every instance."""
            found = [slots_S[each[..., 0]] for slots_S, each in zip(slots, tensors, strict=True)]
            return np.concatenate(found), np.concatenate(tensors)[..., 1]

        (args, fields), roots = joined(args), tuple(map(joined, roots))
        example = np.repeat(np.arange(len(ops)), list(map(len, ops)))
        graph = Graph(len(inputs), np.concatenate(ops), args, example, np.concatenate([slots for slots, _ in roots]))
        return graph, Types(inputs, self._signatures, roots, fields if fields.any() else None)

    def plan(self, instances: Iterable[Instance], inputs: np.ndarray, placement: OpPlacement | None = None) -> Plan:
        """Return the plan of a minibatch; arguments and errors are those of `unroll` and of `make_placed_plan`."""
        graph, types = self.unroll(instances, inputs)
        schedule = make_schedule(graph, "lookahead")
        return make_placed_plan(graph, schedule, placement, types) if placement else make_plan(graph, schedule, types)

    def _follow(self, messages: tuple[tuple[str, int, State], ...]) -> tuple[np.ndarray, ...]:
        """Return the graph of one instance, given the node, the number of tensors and the state of each message.

        Returns:
            the op of each node, (N,); the slots and fields of its arguments, (N, A, 2), -1 after the last; and the
            slots and fields of what reached each `Result`, (R, 2).
        """
        slots, queue = count(), deque[Message]()
        for to, size, state in messages:
            queue.append(Message(to, tuple([(next(slots), 0) for _ in range(size)]), state))
        run = Unrolling(next(slots))
        while queue:
            received = queue.popleft()
            queue.extend(run.send(self._nodes[received.to], received))
        for (name, state), kept in run.waiting.items():
            raise Message(name, (), state).error(f"only {len(kept)} messages have arrived, and it waits for more")
        args = [(*payload, *[(-1, 0)] * (self._arity - len(payload))) for _, payload in run.nodes]
        roots = [[tensor for _, tensor in sorted(run.results[name])] for name in self._results]
        return (
            np.array([op for op, _ in run.nodes], dtype=np.int64),
            np.array(args, dtype=np.int64).reshape(-1, self._arity, 2),
            *(np.array(each, dtype=np.int64).reshape(-1, 2) for each in roots),
        )
