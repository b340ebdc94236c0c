"""The slow twin of graph, schedule and execute: one example's prefix program by recursion, one node at a time.

It shares no code with them, so that each can be tested against the other. It is not for training: it runs one example.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

Value = TypeVar("Value")


def run_prefix(
    tokens: Sequence[int],
    arity: Callable[[int], int],
    run: Callable[..., Value],
    input_value: Value,
    leaf: int,
    skip: int | None = None,
    pad: int | None = None,
    leaf_is_input: bool = False,
) -> Value:
    """Return the value of one prefix program, whose tokens have the same meaning as in `graph.graph_from_prefix`.

    Args:
        tokens: L integers.
        arity: the number of arguments of a token.
        run: a function that is called as `run(token, *arguments)`, in post-order.
        input_value: the argument of tokens without arguments.
    """
    kept = (leaf if token == pad else token for token in tokens if token != skip)

    def value() -> Value:
        token = next(kept, leaf)
        if token == leaf and leaf_is_input:
            return input_value
        return run(token, *[value() for _ in range(arity(token))] or [input_value])

    return value()
