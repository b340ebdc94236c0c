"""The slow twin of graph, schedule and execute: one example's prefix program by recursion, one node at a time.

Shares no code with them, so that each can be tested against the other. Not for training: it runs a batch of one.
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
    """Return the value of one prefix program; the meaning of its tokens is that of `graph.graph_from_prefix`.

    Args:
        tokens: L integers.
        arity: number of arguments of a token.
        run: called `run(token, *arguments)`, in post-order.
        input_value: the argument of tokens without arguments.
    """
    kept = (leaf if token == pad else token for token in tokens if token != skip)

    def value() -> Value:
        token = next(kept, leaf)
        if token == leaf and leaf_is_input:
            return input_value
        return run(token, *[value() for _ in range(arity(token))] or [input_value])

    return value()
