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
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from operator import itemgetter
from typing import NamedTuple, Protocol

import numpy as np

from iep.batching.graph import Graph
from iep.batching.placement import OpPlacement, make_placed_plan
from iep.batching.plan import Plan, Read, Signature, Types, make_plan
from iep.batching.schedulers import make_schedule

MOST_MESSAGES = 1_000_000
"""The greatest number of messages of one instance. A loop without end sends more."""
REMEMBERED = 1024
"""The number of instances whose graphs a network remembers. Instances with equal states have equal graphs."""
State = Hashable
Payload = tuple[tuple[int, int], ...]


Instance = Iterable[tuple[str, Sequence[int], State]]
"""The messages with which an instance begins: the node, the slots of the inputs in the payload, and the state."""


class Message(NamedTuple):
    """A message on its way to a node."""

    to: str
    """The name of the node. For port n of a `Concat`, ".n" follows."""
    payload: Payload
    state: State


class Node(Protocol):
    """A node of a network."""

    to: str | Iterable[str | None]
    """The successor or successors, to which it sends messages; None stands for none."""

    def receive(self, run: "Unrolling", received: Message) -> list[Message]:
        """Return the messages that the node sends when it receives one.

        Raises:
            ValueError: the node cannot handle the message; the error names the node and the state.
        """
        ...


@dataclass(frozen=True)
class Apply:
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

    def receive(self, run: "Unrolling", received: Message) -> list[Message]:
        slot = run.compute(received, self.op, [received.payload])[0]
        return [Message(self.to, tuple([(slot, position) for position in range(len(self.makes))]), received.state)]


@dataclass(frozen=True)
class Reduce:
    """A payload transform that reduces any number of tensors to one, such as the sum of those that a `Group` joined.

    All nodes of an op have the same number of arguments. The module therefore reduces `width` tensors at a time, filled
    up with a neutral one, and more tensors need a tree of nodes. Payloads of different sizes thus run in one call, in
    contrast to an op for each size, and in contrast to a chain of binary ops without waiting for each other.
    """

    to: str
    op: int
    """The op, whose module is associative and maps (G, width, ...) to (G, ...)."""
    width: int
    """The number of tensors at a time, 2 or more."""
    neutral: int
    """The slot of an input that changes no result, such as zeros for a sum."""
    makes: tuple[int] = (0,)
    """The column of all these tensors."""

    @property
    def signature(self) -> Signature:
        return Signature((Read(0, self.width),), self.makes)

    def receive(self, run: "Unrolling", received: Message) -> list[Message]:
        tensors = list(received.payload)
        while True:
            tensors += [(-2 - self.neutral, 0)] * (-len(tensors) % self.width)
            parts = [tuple(tensors[first : first + self.width]) for first in range(0, len(tensors), self.width)]
            tensors = [(slot, 0) for slot in run.compute(received, self.op, parts)]
            if len(tensors) == 1:
                return [Message(self.to, tuple(tensors), received.state)]


@dataclass(frozen=True)
class Cond:
    """A condition, which sends a message to the successor that its state determines."""

    rule: Callable[[State], Hashable]
    routes: Mapping[Hashable, str | None]
    """The successor for each value of the rule; None ends a message, whose tensors other messages have too."""

    @property
    def to(self) -> Iterable[str | None]:
        return self.routes.values()

    def receive(self, run: "Unrolling", received: Message) -> list[Message]:
        value = self.rule(received.state)
        if value not in self.routes:
            raise error(received, f"no route for {value!r}, expected one of {', '.join(map(repr, self.routes))}")
        to = self.routes[value]
        return [] if to is None else [received._replace(to=to)]


@dataclass(frozen=True)
class Phi:
    """A join point of several predecessors, such as the begin of a loop, which sends their messages on."""

    to: str

    def receive(self, run: "Unrolling", received: Message) -> list[Message]:
        return [received._replace(to=self.to)]


@dataclass(frozen=True)
class Isu:
    """A state update, such as the next position of a loop. It need not be invertible here."""

    to: str
    update: Callable[[State], State]

    def receive(self, run: "Unrolling", received: Message) -> list[Message]:
        return [Message(self.to, received.payload, self.update(received.state))]


@dataclass(frozen=True)
class Bcast:
    """A broadcast of every message to all successors."""

    to: tuple[str, ...]

    def receive(self, run: "Unrolling", received: Message) -> list[Message]:
        return [received._replace(to=each) for each in self.to]


@dataclass(frozen=True)
class Flatmap:
    """A node that sends the payload on once for each of several states, which may be none."""

    to: str
    states: Callable[[State], Iterable[State]]

    def receive(self, run: "Unrolling", received: Message) -> list[Message]:
        return [Message(self.to, received.payload, state) for state in self.states(received.state)]


@dataclass(frozen=True)
class Split:
    """A partition, which sends the first tensor of a payload to the first successor, and so on."""

    to: tuple[str | None, ...]
    """The successors; None for a tensor that is not sent."""

    def receive(self, run: "Unrolling", received: Message) -> list[Message]:
        if len(received.payload) != len(self.to):
            raise error(received, f"{len(received.payload)} tensors for {len(self.to)} successors, expected one each")
        parts = zip(self.to, received.payload, strict=True)
        return [Message(to, (tensor,), received.state) for to, tensor in parts if to is not None]


@dataclass(frozen=True)
class Concat:
    """A concatenation of the payloads of one message from each port in the same state, in the order of the ports."""

    to: str
    ports: int = 2

    def receive(self, run: "Unrolling", received: Message) -> list[Message]:
        name, _, port = received.to.partition(".")
        joined = run.join(received._replace(to=name), received.state, int(port), self.ports)
        return [Message(self.to, tuple(chain(*joined)), received.state)] if joined else []


@dataclass(frozen=True)
class Group:
    """A group joins the payloads of several messages: the first tensors of all, then the second ones, and so on."""

    to: str
    size: Callable[[State], int]
    """The state of the group -> the number of its messages, one or more."""
    key: Callable[[State], State] = lambda state: state
    """The state of a message -> the state of its group."""
    order: Callable[[State], int] | None = None
    """The state of a message -> its position in the group; None for the order of arrival."""

    def receive(self, run: "Unrolling", received: Message) -> list[Message]:
        state = self.key(received.state)
        joined = run.join(received, state, self.order and self.order(received.state), self.size(state))
        return [Message(self.to, tuple(chain(*zip(*joined, strict=True))), state)] if joined else []


@dataclass(frozen=True)
class Ungroup:
    """The reverse of a `Group`, which sends one message for each of several states."""

    to: str
    states: Callable[[State], Sequence[State]]

    def receive(self, run: "Unrolling", received: Message) -> list[Message]:
        states, payload = self.states(received.state), received.payload
        if not states or len(payload) % len(states):
            raise error(received, f"{len(payload)} tensors for {len(states)} states, expected as many for each")
        return [Message(self.to, payload[n :: len(states)], state) for n, state in enumerate(states)]


@dataclass(frozen=True)
class Result:
    """The end of messages of one tensor each, which a run of the plan returns."""

    order: Callable[[State], int] | None = None
    """The state of a message -> its position among those of its instance; None for the order of arrival."""
    to: tuple[()] = ()

    def receive(self, run: "Unrolling", received: Message) -> list[Message]:
        if len(received.payload) != 1:
            raise error(received, f"a result of {len(received.payload)} tensors, expected one")
        results = run.results[received.to]
        results.append((self.order(received.state) if self.order else len(results), *received.payload))
        return []


class Unrolled(NamedTuple):
    """The graph of one instance. Slots are numbered within it; input slot n of the minibatch is -2 - n."""

    ops: np.ndarray
    """The op of each node, (N,)."""
    args: np.ndarray
    """The slots and the fields of each node's arguments, (N, A, 2); slots are -1 after the last."""
    roots: list[np.ndarray]
    """The slots and the fields of what reached each `Result`, (R, 2)."""


class Unrolling:
    """The graph of an instance, while its messages pass through the network."""

    def __init__(self, num_inputs: int, arity: Mapping[int, int]):
        self.num_inputs, self.arity = num_inputs, arity
        self.ops: list[int] = []
        self.args: list[Payload] = []
        self.makers: list[Message] = []
        """The message for which each node was added."""
        self.results: dict[str, list[tuple[int, tuple[int, int]]]] = defaultdict(list)
        """The position and the tensor of each message that reached a `Result`."""
        self.waiting: dict[tuple[str, State], tuple[int, list[tuple[int, Payload]]]] = {}
        """By node and state: the number of messages that it joins, and the position and payload of those received."""

    def compute(self, received: Message, op: int, payloads: Iterable[Payload]) -> list[int]:
        """Add a node of an op for each payload, and return their slots."""
        first = len(self.ops)
        for payload in payloads:
            if len(payload) != self.arity[op]:
                raise error(received, f"a payload of {len(payload)} tensors, but op {op} reads {self.arity[op]}")
            self.ops.append(op)
            self.args.append(payload)
            self.makers.append(received)
        return list(range(self.num_inputs + first, self.num_inputs + len(self.ops)))

    def join(self, received: Message, state: State, position: int | None, size: int) -> list[Payload]:
        """Keep a message; return the payloads of all messages in order if it is the last of `size`, otherwise none."""
        _, kept = self.waiting.setdefault((received.to, state), (size, []))
        kept.append((len(kept) if position is None else position, received.payload))
        if len(kept) < size:
            return []
        del self.waiting[received.to, state]
        kept.sort(key=itemgetter(0))
        if any(before == after for (before, _), (after, _) in pairwise(kept)):
            raise error(received, "several messages for one position, expected states that tell them apart")
        return [payload for _, payload in kept]

    def check(self) -> None:
        """Check at the end that nothing waits, and that a result depends on every node."""
        for (name, state), (size, kept) in self.waiting.items():
            raise error(Message(name, (), state), f"only {len(kept)} of {size} messages have arrived")
        needed = {tensor[0] for found in self.results.values() for _, tensor in found}
        for node in reversed(range(len(self.ops))):
            if self.num_inputs + node not in needed:
                raise error(self.makers[node], "no result depends on what it computes")
            needed.update([slot for slot, _ in self.args[node]])


class MessageGraph:
    """A network of named nodes.

    Args:
        nodes: the nodes by name. Their successors are names, such as "embedding", or "cell.0" for port 0 of a `Concat`.

    Raises:
        ValueError: a node has an unknown successor, a `Reduce` has a width of less than 2, or nodes of one op differ in
            what they read or make.
    """

    def __init__(self, **nodes: Node):
        self.signatures: dict[int, Signature] = {}
        self._nodes: dict[str, Node] = {}
        for name, node in nodes.items():
            ports = [f"{name}.{port}" for port in range(node.ports)] if isinstance(node, Concat) else [name]
            self._nodes.update(dict.fromkeys(ports, node))
        neutral = -1
        for name, node in nodes.items():
            for to in (node.to,) if isinstance(node.to, str) else node.to:
                if to is not None and to not in self._nodes:
                    raise ValueError(f"node {name!r} sends to {to!r}, expected one of {', '.join(self._nodes)}")
            if not isinstance(node, Apply | Reduce):
                continue
            if self.signatures.setdefault(node.op, node.signature) != node.signature:
                raise ValueError(f"node {name!r} and another one of op {node.op} have different signatures")
            if isinstance(node, Reduce):
                neutral = max(neutral, node.neutral)
                if node.width < 2:
                    raise ValueError(f"node {name!r} reduces {node.width} tensors at a time, expected 2 or more")
        self._results = [name for name, node in nodes.items() if isinstance(node, Result)]
        reads = {op: signature.reads for op, signature in self.signatures.items()}
        self._arity = {op: max(read.first + read.width for read in each) for op, each in reads.items()}
        self._constants = np.arange(neutral, -1, -1)
        self._follow = lru_cache(REMEMBERED)(self._unroll_one)  # equal states have equal graphs

    def unroll(self, instances: Iterable[Instance], inputs: np.ndarray) -> tuple[Graph, Types]:
        """Follow the messages of each instance, and return the graph of what they compute, with its types.

        The types have a root for each `Result` of the network, with its tensors by instance and order.

        Args:
            instances: the messages with which each instance begins; instances do not receive each other's messages.
            inputs: the column of each input, (num_inputs,).

        Raises:
            ValueError: a node has no route for a state, gets two messages in a state that should tell them apart, waits
                for messages that do not arrive, gets a payload of another size than it expects, or is unknown; no
                result depends on what a node computes; or there are more than `MOST_MESSAGES`. The message names the
                node and the state.
        """
        unrolled, slots, num_slots = [], [], len(inputs)
        for messages in instances:
            found = self._follow(tuple([(to, len(given), state) for to, given, state in messages]))
            nodes = np.arange(num_slots, num_slots := num_slots + len(found.ops))
            slots.append(np.concatenate([*(given for _, given, _ in messages), nodes, self._constants, [-1]]))
            unrolled.append(found)
        if not unrolled:
            raise ValueError("there are no instances, expected one or more")

        def joined(tensors: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
            """Return the slots in the minibatch, and the fields, of tensors of all instances."""
            tensors = list(tensors)
            found = [slots_S[each[..., 0]] for slots_S, each in zip(slots, tensors, strict=True)]
            return np.concatenate(found).astype(np.int64), np.concatenate(tensors)[..., 1]

        args, fields = joined(each.args for each in unrolled)
        example = np.repeat(np.arange(len(unrolled)), [len(each.ops) for each in unrolled])
        roots = tuple(joined(each) for each in zip(*(each.roots for each in unrolled), strict=True))
        ops = np.concatenate([each.ops for each in unrolled])
        graph = Graph(len(inputs), ops, args, example, np.concatenate([slots for slots, _ in roots]))
        return graph, Types(inputs, self.signatures, roots, fields if fields.any() else None)

    def plan(
        self,
        instances: Iterable[Instance],
        inputs: np.ndarray,
        placement: OpPlacement | None = None,
        scheduler: str = "lookahead",
    ) -> Plan:
        """Return the plan of a minibatch, placed if a placement is given.

        Args:
            instances: the messages with which each instance begins.
            inputs: the column of each input, (num_inputs,).
            placement: the devices or workers of the ops.
            scheduler: a name in `iep.batching.schedulers.SCHEDULERS`.

        Raises:
            ValueError: as `unroll`, or the placement lacks an op, or no scheduler has this name.
        """
        graph, types = self.unroll(instances, inputs)
        schedule = make_schedule(graph, scheduler)
        return make_placed_plan(graph, schedule, placement, types) if placement else make_plan(graph, schedule, types)

    def _unroll_one(self, messages: tuple[tuple[str, int, State], ...]) -> Unrolled:
        """Return the graph of one instance, given the node, the number of tensors and the state of each message."""
        sizes, queue, computed = [size for _, size, _ in messages], deque(), set()
        for (to, size, state), end in zip(messages, accumulate(sizes), strict=True):
            queue.append(Message(to, tuple([(slot, 0) for slot in range(end - size, end)]), state))
        run, left = Unrolling(sum(sizes), self._arity), MOST_MESSAGES
        while queue:
            received, left = queue.popleft(), left - 1
            node = self._nodes.get(received.to)
            if node is None:
                raise error(received, f"no such node, expected one of {', '.join(self._nodes)}")
            if not left:
                raise error(received, f"{MOST_MESSAGES} messages of one instance, expected loops that end")
            if isinstance(node, Apply | Reduce):
                if received[::2] in computed:
                    raise error(received, "a second message, expected states that tell messages apart")
                computed.add(received[::2])
            queue.extend(node.receive(run, received))
        run.check()
        width = max(self._arity.values())
        args = [(*payload, *[(-1, 0)] * (width - len(payload))) for payload in run.args]
        roots = [[tensor for _, tensor in sorted(run.results[name])] for name in self._results]
        return Unrolled(
            np.array(run.ops, dtype=np.int64),
            np.array(args, dtype=np.int64).reshape(-1, width, 2),
            [np.array(each, dtype=np.int64).reshape(-1, 2) for each in roots],
        )


def error(received: Message, what: str) -> ValueError:
    """Return an error that names the node and the state of a message."""
    return ValueError(f"node {received.to!r}, state {received.state!r}: {what}")
