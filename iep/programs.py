"""CLEVR programs: the JSON list of function calls <-> prefix tokens, what a token means, the tree of a program.

A JSON program lists calls, arguments before the calls that use them; a prefix program lists the same tree from
its root by depth-first search, a function's value in brackets: `filter_color[red]` (Johnson et al. 2017,
Inferring and Executing Programs, section 3).

A network may put out tokens that are not well-formed. Their tree is the one that the engine runs: `<START>` is skipped,
`<NULL>` and the end of the tokens stand for `scene`, what follows the complete tree is ignored, other special tokens
inside of it are functions of one argument. Which values are of a kind that nothing takes is the engine's to say
(`without`). Turning prefix tokens into a minibatch's graph is `batching/graph.py`; running a program on a scene,
`synth/executor.py`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from iep.errors import InputError
from iep.vocab import END, NULL, SPECIAL_TOKENS, START

SCENE = "scene"
BINARY_FUNCTIONS = frozenset({"union", "intersect", "less_than", "greater_than"})
_TOKEN = re.compile(r"^(?P<function>[^\[\]]+)(?:\[(?P<value>[^\[\]]*)\])?$")


def arity(token: str) -> int:
    """Number of arguments of a program token: 0 for `scene`, 2 for the binary functions, otherwise 1.

    Special tokens such as `<END>` inside a tree count as unary, which ill-formed predicted programs rely on.
    """
    function = token.partition("[")[0]
    if function == SCENE:
        return 0
    return 2 if function in BINARY_FUNCTIONS or function.startswith("equal_") else 1


def arities(program_tokens: Sequence[str]) -> np.ndarray:
    """(V,) integers: the arity of every token of a program vocabulary."""
    return np.array([arity(token) for token in program_tokens], dtype=np.int64)


def call_token(call: dict) -> str:
    """The token of one JSON call, `filter_color[red]`. Accepts the generator's key `type` for `function`.

    Raises:
        InputError: the call has no function name or more than one value.
    """
    function = call.get("function", call.get("type"))
    values = call.get("value_inputs") or []
    if not isinstance(function, str) or not isinstance(values, list) or len(values) > 1:
        raise InputError(f"not a program call: {call!r}, expected a function and at most one value")
    return f"{function}[{values[0]}]" if values else function


def json_to_prefix(program: Sequence[dict]) -> list[str]:
    """Prefix tokens of a JSON program; the last call is the root. A call used twice is written out twice.

    Raises:
        InputError: there is no list or it is empty, an input is not an earlier call, or a call has the wrong number of
            inputs.
    """
    if not isinstance(program, list):
        raise InputError(f"the program is {program!r:.60}, expected a list of calls")
    if not program:
        raise InputError("the program is empty, expected a list of calls")
    prefixes: list[list[str]] = []
    for position, call in enumerate(program):
        if not isinstance(call, dict):
            raise InputError(f"program call {position} is {call!r}, expected an object with 'function' and 'inputs'")
        token, inputs = call_token(call), call.get("inputs", [])
        if not isinstance(inputs, list) or len(inputs) != arity(token):
            raise InputError(f"program call {position} ({token}) has inputs {inputs!r}, expected {arity(token)}")
        if any(not isinstance(source, int) or not 0 <= source < position for source in inputs):
            raise InputError(f"program call {position} ({token}) has inputs {inputs!r}, expected earlier calls")
        prefixes.append([token, *(token for source in inputs for token in prefixes[source])])
    return prefixes[-1]


def prefix_to_json(tokens: Sequence[str]) -> list[dict]:
    """The JSON program of well-formed prefix tokens, in CLEVR's order: each argument's calls, left first.

    Raises:
        InputError: a token is malformed, the tokens end inside the tree, or go on after it.
    """
    program: list[dict] = []
    end = _append_call(tokens, 0, program)
    if end != len(tokens):
        raise InputError(f"program token {end} ({tokens[end]}) comes after the tree is complete")
    return program


def _append_call(tokens: Sequence[str], position: int, program: list[dict]) -> int:
    """Append the tree that starts at `position`, arguments first; return the position after it."""
    if position >= len(tokens):
        many = "1 token" if len(tokens) == 1 else f"{len(tokens)} tokens"
        raise InputError(f"the program ends after {many}, inside its tree")
    match = _TOKEN.match(tokens[position])
    if match is None:
        raise InputError(f"program token {position} ({tokens[position]!r}) is not of the form name or name[value]")
    inputs = []
    end = position + 1
    for _ in range(arity(tokens[position])):
        end = _append_call(tokens, end, program)
        inputs.append(len(program) - 1)
    values = [] if match["value"] is None else [match["value"]]
    program.append({"inputs": inputs, "function": match["function"], "value_inputs": values})
    return end


def question_type(root_token: str) -> str:
    """CLEVR's question type of a program's root: `exist`, `count`, `compare integer: less`, `query: color`, ..."""
    integer_comparisons = {"equal_integer": "equal", "less_than": "less", "greater_than": "more"}
    function = root_token.partition("[")[0]
    if function in integer_comparisons:
        return f"compare integer: {integer_comparisons[function]}"
    for prefix, name in (("query_", "query"), ("equal_", "compare")):
        if function.startswith(prefix):
            return f"{name}: {function.removeprefix(prefix)}"
    return function


QUESTION_TYPES = (
    "exist",
    "count",
    *(f"compare integer: {relation}" for relation in ("equal", "less", "more")),
    *(f"query: {attribute}" for attribute in ("size", "color", "material", "shape")),
    *(f"compare: {attribute}" for attribute in ("size", "color", "material", "shape")),
)


@dataclass(frozen=True)
class Node:
    """One function of a program."""

    token: str
    """What runs."""
    depth: int
    """Functions between it and the root, itself counted; the root has 0."""
    arguments: tuple[int, ...]
    """The nodes whose results it takes, in order, by their place in the tree's list."""
    is_filled_in: bool = False
    """`scene`, where the program has `<NULL>` or had ended."""
    unused: str = ""
    """Why its value is not taken, `scene`'s standing in its place; empty where it is."""


@dataclass(frozen=True)
class ProgramTree:
    """The tree that a program stands for.

    Attributes:
        nodes: in prefix order, the root first: a node comes before its arguments.
        ignored: tokens after the tree was complete, up to `<END>`.
    """

    nodes: tuple[Node, ...]
    ignored: tuple[str, ...]

    @property
    def post_order(self) -> list[int]:
        """The nodes in the order in which one after the other can run: arguments first, left before right."""
        order, waiting = [], [0]
        while waiting:
            number = waiting.pop()
            order.append(number)
            waiting += self.nodes[number].arguments
        return order[::-1]


def program_tree(tokens: Sequence[str]) -> ProgramTree:
    """The tree of prefix tokens, special ones among them or not."""
    kept = [token for token in tokens if token != SPECIAL_TOKENS[START]]
    found: list[tuple[str, int, bool]] = []
    arguments: list[list[int]] = []
    open_places: list[tuple[int, int | None]] = [(0, None)]
    while open_places:
        depth, taker = open_places.pop()
        token = kept[len(found)] if len(found) < len(kept) else SPECIAL_TOKENS[NULL]
        is_filled_in = token == SPECIAL_TOKENS[NULL]
        token = SCENE if is_filled_in else token
        if taker is not None:
            arguments[taker].append(len(found))
        open_places += [(depth + 1, len(found))] * arity(token)
        found.append((token, depth, is_filled_in))
        arguments.append([])
    nodes = (
        Node(token, depth, tuple(taken), is_filled_in)
        for (token, depth, is_filled_in), taken in zip(found, arguments, strict=True)
    )
    rest = kept[len(found) :]
    end = rest.index(SPECIAL_TOKENS[END]) if SPECIAL_TOKENS[END] in rest else len(rest)
    return ProgramTree(tuple(nodes), tuple(token for token in rest[:end] if token != SPECIAL_TOKENS[NULL]))


NOT_USED = "not used"


def without(tree: ProgramTree, reasons: Mapping[int, str]) -> ProgramTree:
    """The tree with nodes marked as unused, by their place in its list, and with them all below them."""
    why = dict(reasons)
    nodes = []
    for number, node in enumerate(tree.nodes):
        nodes.append(replace(node, unused=why.get(number, "")))
        if number in why:
            why |= dict.fromkeys(node.arguments, NOT_USED)
    return replace(tree, nodes=tuple(nodes))


def tokens_run(tree: ProgramTree) -> list[str]:
    """The prefix tokens of what runs: `scene` in the place of each subtree that is not used."""
    tokens, waiting = [], [0]
    while waiting:
        node = tree.nodes[waiting.pop()]
        tokens.append(SCENE if node.unused else node.token)
        waiting += [] if node.unused else reversed(node.arguments)
    return tokens


def tree_lines(tree: ProgramTree, label: Callable[[Node], str]) -> list[str]:
    """The tree drawn with lines, the root above, a line of text for each node, named by `label`."""
    lines = []
    waiting = [(0, "", "")]  # a node, what stands before it, and before what is below it
    while waiting:
        number, before, before_arguments = waiting.pop()
        node = tree.nodes[number]
        lines.append(before + label(node))
        for place, argument in reversed(list(enumerate(node.arguments))):
            is_last = place == len(node.arguments) - 1
            branch, below = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
            waiting.append((argument, before_arguments + branch, before_arguments + below))
    return lines


def named(node: Node) -> str:
    """A node's token, with words where it was not in the program, or is not used."""
    said = [*(["filled in"] if node.is_filled_in else []), *([node.unused] if node.unused else [])]
    return f"{node.token} ({'; '.join(said)})" if said else node.token
