"""A static network of nodes that route messages by their states -> the graph of a minibatch, as in AMPNet.

The network is the intermediate representation of Gaunt et al. 2017 (AMPNet, sections 3 and 4). It is built once, with
loops and conditions, and an instance is a few messages that are pumped into it. A message has a *payload* of tensors
and a *state*, any hashable value, such as a `NamedTuple` of a position and a length. Control depends on states alone,
so that `MessageGraph.unroll` follows every message before a tensor is computed. Only `Apply` and `Reduce` become nodes
of the graph. The other nodes decide which values these read, and cost nothing when the plan runs: a payload consists
of references. The backward pass is that of the plan, and needs neither states nor messages, nor a node that joins the
branches of a condition.

Messages need not be grouped to be computed together, as in the paper: the schedule batches the nodes of an op, within
an instance and across instances.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from iep.batching.graph import Graph
from iep.batching.placement import OpPlacement, make_placed_plan
from iep.batching.plan import Plan, Read, Signature, Types, make_plan
from iep.batching.schedulers import make_schedule

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


Node = Apply | Reduce | Cond | Isu | Bcast | Flatmap | Split | Concat | Group | Ungroup | Result
"""A node of a network; `to` names its successors."""


class Unrolling:
    """The graph of a minibatch, while the messages of one instance after the other pass through the network.

    Args:
        nodes: the nodes of the network by name.
        num_inputs: the number of the minibatch's inputs.
    """

    def __init__(self, nodes: Mapping[str, Node], num_inputs: int):
        self.nodes, self.num_inputs = nodes, num_inputs
        self.calls: list[tuple[int, Payload]] = []
        """The op and the arguments of each node of the graph."""
        self.results: dict[str, list[tuple[int, tuple[int, int]]]] = defaultdict(list)
        """The position and the tensor of each message of the instance that reached a `Result`, by name."""
        self.waiting: dict[tuple[str, State], dict[int, Payload]] = defaultdict(dict)
        """By name and state of a node that joins messages, the payloads that have arrived by their positions."""

    def follow(self, messages: Instance) -> dict[str, list[tuple[int, int]]]:
        """Follow the messages of an instance, and return the tensors that reached each `Result` by its name.

        Raises:
            ValueError: a node waits for messages that do not arrive, or see `send`.
        """
        queue = deque(Message(to, tuple([(slot, 0) for slot in slots]), state) for to, slots, state in messages)
        self.results.clear()
        while queue:
            received = queue.popleft()
            queue.extend(self.send(self.nodes[received.to], received))
        for (name, state), kept in self.waiting.items():
            raise Message(name, (), state).error(f"only {len(kept)} messages have arrived, and it waits for more")
        return {name: [tensor for _, tensor in sorted(found)] for name, found in self.results.items()}

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
                neutral = (node.neutral, 0)
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
        """Add a node of the graph, and return its slot."""
        self.calls.append((op, arguments))
        return self.num_inputs + len(self.calls) - 1

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
        run, examples, tensors = Unrolling(self._nodes, len(inputs)), [], defaultdict(list)
        for number, messages in enumerate(instances):
            for name, found in run.follow(messages).items():
                tensors[name] += found
            examples += [number] * (len(run.calls) - len(examples))
        args = [(*payload, *[(-1, 0)] * (self._arity - len(payload))) for _, payload in run.calls]
        slots, fields = np.array(args, dtype=np.int64).reshape(-1, self._arity, 2).transpose(2, 0, 1).copy()
        roots = tuple(tuple(np.array(tensors[name], dtype=np.int64).reshape(-1, 2).T) for name in self._results)
        op, example = (np.array(each, dtype=np.int64) for each in ([op for op, _ in run.calls], examples))
        graph = Graph(len(inputs), op, slots, example, np.concatenate([each for each, _ in roots]))
        return graph, Types(inputs, self._signatures, roots, fields if fields.any() else None)

    def plan(self, instances: Iterable[Instance], inputs: np.ndarray, placement: OpPlacement | None = None) -> Plan:
        """Return the plan of a minibatch; arguments and errors are those of `unroll` and of `make_placed_plan`."""
        graph, types = self.unroll(instances, inputs)
        schedule = make_schedule(graph, "lookahead")
        return make_placed_plan(graph, schedule, placement, types) if placement else make_plan(graph, schedule, types)
