"""CLEVR programs: the JSON list of function calls <-> prefix tokens, and what a token means to the engine.

A JSON program lists calls, arguments before the calls that use them; a prefix program lists the same tree from
its root by depth-first search, a function's value in brackets: `filter_color[red]` (Johnson et al. 2017,
Inferring and Executing Programs, section 3). Turning prefix tokens into a minibatch's graph is `batching/graph.py`;
running a program on a scene, `synth/executor.py`.
"""

import re
from collections.abc import Sequence

import numpy as np

from iep.errors import InputError

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
