"""CLEVR programs: what a token means, the tree of a program, and its conversion from JSON, to JSON and to a graph.

A JSON program lists function calls, and the arguments of a call come before it. A prefix program lists the same tree
from its root by depth-first search, with a function's value in brackets: `filter_color[red]` (Johnson et al. 2017,
Inferring and Executing Programs, section 3).

The meaning of tokens is defined here and nowhere else. A network may predict tokens that are not well-formed. Their
tree is the one that the engine runs: `<START>` is skipped, `<NULL>` and the end of the tokens stand for `scene`, tokens
after the complete tree are ignored, and other special tokens inside the tree are functions of one argument.
`program_tree` parses one program in plain Python, and `program_graph` parses a minibatch by array code.

Shapes: N programs, B programs of a minibatch, L program tokens, V program vocabulary.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from iep.batching.graph import Graph, graph_from_prefix
from iep.errors import InputError
from iep.vocab import END, NULL, SPECIAL_TOKENS, START

SCENE = "scene"
MOST_TOKENS = 998
"""The greatest length of a program in prefix order, without `<START>` and `<END>`."""
CHUNK = 65_536
"""The number of programs that `program_lengths` joins in one graph."""
WITH_VALUE = "filter_", "relate"
"""How the names of functions begin that take a value."""
BINARY_FUNCTIONS = frozenset({"union", "intersect", "less_than", "greater_than"})
_TOKEN = re.compile(r"^(?P<function>[^\[\]]+)(?:\[(?P<value>[^\[\]]*)\])?$")


def arity(token: str) -> int:
    """Return the number of arguments of a token: 0 for `scene`, 2 for the binary functions, otherwise 1.

    Special tokens inside a tree, such as `<END>`, are unary.
    """
    function = token.partition("[")[0]
    if function == SCENE:
        return 0
    return 2 if function in BINARY_FUNCTIONS or function.startswith("equal_") else 1


def arities(program_tokens: Sequence[str]) -> np.ndarray:
    """Return the arity of every token of a program vocabulary, (V,) integers."""
    return np.array([arity(token) for token in program_tokens], dtype=np.int64)


class ProgramCall(NamedTuple):
    """One call of a JSON program."""

    function: str
    value: str | None
    inputs: list[int]
    """The positions of the calls that it reads."""

    @property
    def token(self) -> str:
        """The call's token, such as `filter_color[red]`."""
        return self.function if self.value is None else f"{self.function}[{self.value}]"


def read_call(call: Any, position: int) -> ProgramCall:
    """Return a call of a JSON program, given its position.

    The public question generator has other keys than the released data: `type` for the function's name, and
    `side_inputs` for its values. Both mean the same here.

    Raises:
        InputError: the call is not an object, has no function name, a number of values other than its function takes,
            or a wrong number of inputs, or reads a call that is not an earlier one.
    """
    if not isinstance(call, dict):
        raise InputError(f"program call {position} is {call!r}, expected an object with 'function' and 'inputs'")
    function = call.get("function", call.get("type"))
    values = call.get("value_inputs") or call.get("side_inputs") or []
    if not isinstance(function, str) or not isinstance(values, list) or len(values) > 1:
        raise InputError(f"program call {position} is {call!r}, expected a function and at most one value")
    value = None if values in ([], [None], [""]) else str(values[0])
    if value is None and function.startswith(WITH_VALUE):
        raise InputError(f"program call {position} ({function}) has no value, expected one in 'value_inputs'")
    made = ProgramCall(function, value, call.get("inputs", []))
    inputs, count = made.inputs, arity(function)
    if not isinstance(inputs, list) or len(inputs) != count:
        raise InputError(f"program call {position} ({made.token}) has inputs {inputs!r}, expected {count}")
    if any(type(source) is not int or not 0 <= source < position for source in inputs):
        raise InputError(f"program call {position} ({made.token}) has inputs {inputs!r}, expected earlier calls")
    return made


def json_to_prefix(program: Sequence[dict]) -> list[str]:
    """Return the prefix tokens of a JSON program, whose last call is the root.

    A call that is an input of several others is written out for each of them.

    Raises:
        InputError: the program is not a list or is empty, a call is malformed (as for `read_call`), or there are more
            than `MOST_TOKENS` tokens.
    """
    if not isinstance(program, list):
        raise InputError(f"the program is {program!r:.60}, expected a list of calls")
    if not program:
        raise InputError("the program is empty, expected a list of calls")
    prefixes: list[list[str]] = []
    for position, given in enumerate(program):
        call = read_call(given, position)
        length = 1 + sum(len(prefixes[source]) for source in call.inputs)
        if length > MOST_TOKENS:
            what = f"program call {position} ({call.token}) has {length:,} tokens"
            raise InputError(f"{what} with all calls that it reads, written out; expected at most {MOST_TOKENS}")
        prefixes.append([call.token, *(token for source in call.inputs for token in prefixes[source])])
    return prefixes[-1]


def prefix_to_json(tokens: Sequence[str]) -> list[dict]:
    """Return the JSON program of well-formed prefix tokens in CLEVR's order: the calls of each argument, left first.

    Raises:
        InputError: a token is malformed or special, or the tokens end before the tree is complete or continue after it.
    """
    for position, token in enumerate(tokens):
        if token in SPECIAL_TOKENS or not _TOKEN.match(token):
            raise InputError(f"program token {position} ({token!r}) is not of the form name or name[value]")
    nodes = (tree := program_tree(tokens)).nodes
    if len(nodes) > len(tokens):
        many = "1 token" if len(tokens) == 1 else f"{len(tokens)} tokens"
        raise InputError(f"the program ends after {many}, inside its tree")
    if len(nodes) < len(tokens):
        raise InputError(f"program token {len(nodes)} ({tokens[len(nodes)]}) comes after the tree is complete")
    order = tree.post_order
    call_of = {node: call for call, node in enumerate(order)}
    program = []
    for node in order:
        match = _TOKEN.match(tokens[node])
        assert match is not None  # as was checked above
        values = [] if match["value"] is None else [match["value"]]
        inputs = [call_of[argument] for argument in nodes[node].arguments]
        program.append({"inputs": inputs, "function": match["function"], "value_inputs": values})
    return program


def split_program(text: str) -> list[str]:
    """Return the tokens of a program's text, which spaces separate; a value in brackets may contain spaces."""
    return re.findall(r"[^\s\[]*\[[^\]]*\]|\S+", text)


def question_type(root_token: str) -> str:
    """Return CLEVR's question type of a program's root, such as `exist`, `compare integer: less` or `query: color`."""
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
CLOSURE_GROUPS = (
    "and_mat_spa",
    "compare_mat",
    "compare_mat_spa",
    "embed_mat_spa",
    "embed_spa_mat",
    "or_mat",
    "or_mat_spa",
)
"""The groups of question families of CLOSURE (Bahdanau et al. 2019, section 3), as its files are named."""


def scene_index(program_tokens: Sequence[str]) -> int:
    """Return the index of `scene` in a program vocabulary.

    Raises:
        ValueError: the vocabulary has no `scene`.
    """
    if SCENE not in program_tokens:
        raise ValueError(f"the program vocabulary {', '.join(program_tokens)} has no {SCENE!r}")
    return list(program_tokens).index(SCENE)


def program_graph(
    programs_BL: Any, program_tokens: Sequence[str], scene_is_input: bool = True, input_B: np.ndarray | None = None
) -> Graph:
    """Return the graph of the trees of a minibatch, well-formed or not.

    Args:
        programs_BL: indices into `program_tokens`, an array or a `torch.Tensor`.
        scene_is_input: `scene` is not a node; the functions that read it read the program's input.
        input_B: the input slot of each program, counted from 0 without gaps; None if program b has slot b.

    Raises:
        ValueError: the vocabulary has no `scene`, `programs_BL` is not a matrix of integers, or a token is outside the
            vocabulary.
    """
    scene = scene_index(program_tokens)
    return graph_from_prefix(programs_BL, arities(program_tokens), scene, START, NULL, scene_is_input, input_B)


def program_lengths(programs_NL: np.ndarray, program_tokens: Sequence[str]) -> np.ndarray:
    """Return the length of each program, (N,): the number of functions besides `scene` in its tree.

    Special tokens inside a tree are not counted as functions. Without `scene` in the vocabulary there are no trees, and
    every length is -1.
    """
    lengths_N = np.full(len(programs_NL), -1)
    for first in range(0, len(programs_NL) if SCENE in program_tokens else 0, CHUNK):
        graph = program_graph(programs_NL[first : first + CHUNK], program_tokens)
        functions = graph.op >= len(SPECIAL_TOKENS)
        lengths_N[first : first + CHUNK] = np.bincount(graph.example[functions], minlength=len(graph.roots))
    return lengths_N


@dataclass(frozen=True)
class Node:
    """One function of a program."""

    token: str
    depth: int
    """The number of functions on the path from the root to this one; 0 for the root."""
    arguments: tuple[int, ...]
    """The positions in the tree's list of the nodes that are its arguments, in order."""
    is_filled_in: bool = False
    """True for a `scene` that stands for `<NULL>` or for the end of the tokens."""
    unused: str = ""
    """The reason why `scene` is used instead of the node's value; empty if the value is used."""


@dataclass(frozen=True)
class ProgramTree:
    """The tree of a program."""

    nodes: tuple[Node, ...]
    """The nodes in prefix order: the root is first, and a node comes before its arguments."""
    ignored: tuple[str, ...]
    """The tokens after the complete tree, up to `<END>`."""

    @property
    def post_order(self) -> list[int]:
        """An order in which the nodes can run one after the other: arguments first, left before right."""
        order, waiting = [], [0]
        while waiting:
            number = waiting.pop()
            order.append(number)
            waiting += self.nodes[number].arguments
        return order[::-1]


def program_tree(tokens: Sequence[str]) -> ProgramTree:
    """Return the tree of prefix tokens, well-formed or not."""
    kept = [token for token in tokens if token != SPECIAL_TOKENS[START]]
    found: list[tuple[str, int, bool]] = []
    arguments: list[list[int]] = []
    missing: list[tuple[int, int | None]] = [(0, None)]  # depth and reader of each argument still to come
    while missing:
        depth, reader = missing.pop()
        token = kept[len(found)] if len(found) < len(kept) else SPECIAL_TOKENS[NULL]
        is_filled_in = token == SPECIAL_TOKENS[NULL]
        token = SCENE if is_filled_in else token
        if reader is not None:
            arguments[reader].append(len(found))
        missing += [(depth + 1, len(found))] * arity(token)
        found.append((token, depth, is_filled_in))
        arguments.append([])
    nodes = (
        Node(token, depth, tuple(read), is_filled_in)
        for (token, depth, is_filled_in), read in zip(found, arguments, strict=True)
    )
    rest = kept[len(found) :]
    end = rest.index(SPECIAL_TOKENS[END]) if SPECIAL_TOKENS[END] in rest else len(rest)
    return ProgramTree(tuple(nodes), tuple(token for token in rest[:end] if token != SPECIAL_TOKENS[NULL]))


NOT_USED = "not used"


def without(tree: ProgramTree, reasons: Mapping[int, str]) -> ProgramTree:
    """Return the tree with nodes marked as unused, together with all nodes below them.

    Args:
        reasons: the reason for each such node, by its position in the tree's list.
    """
    why = dict(reasons)
    nodes = []
    for number, node in enumerate(tree.nodes):
        nodes.append(replace(node, unused=why.get(number, "")))
        if number in why:
            why |= dict.fromkeys(node.arguments, NOT_USED)
    return replace(tree, nodes=tuple(nodes))


def tokens_run(tree: ProgramTree) -> list[str]:
    """Return the prefix tokens of the functions that run, with `scene` in the place of each unused subtree."""
    tokens, waiting = [], [0]
    while waiting:
        node = tree.nodes[waiting.pop()]
        tokens.append(SCENE if node.unused else node.token)
        waiting += [] if node.unused else reversed(node.arguments)
    return tokens


def tree_lines(tree: ProgramTree, label: Callable[[Node], str]) -> list[str]:
    """Return the tree drawn as text, one line for each node with its `label`, and the root at the top."""
    lines = []
    waiting = [(0, "", "")]  # a node, the text before its label, and the text before those of its arguments
    while waiting:
        number, before, before_arguments = waiting.pop()
        node = tree.nodes[number]
        lines.append(before + label(node))
        for position, argument in reversed(list(enumerate(node.arguments))):
            is_last = position == len(node.arguments) - 1
            branch, below = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
            waiting.append((argument, before_arguments + branch, before_arguments + below))
    return lines


def named(node: Node) -> str:
    """Return a node's token, followed by a remark if it was not in the program or is not used."""
    remarks = [*(["filled in"] if node.is_filled_in else []), *([node.unused] if node.unused else [])]
    return f"{node.token} ({'; '.join(remarks)})" if remarks else node.token
