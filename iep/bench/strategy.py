"""Strategies, such as `lookahead+sharing+bfloat16`, which name the rows of a benchmark."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from iep.config import BATCHING, DTYPES, Config
from iep.errors import InputError, nearest
from iep.execution_engine.choices import DEFAULT_EXECUTION, EXECUTIONS

PHASES = ("train", "inference")
ALL = "all"
BEST = Config.batching
SHARING, DEFER = OPTIONS = ("sharing", "defer")
GROUPED = tuple(each for each in EXECUTIONS if each != DEFAULT_EXECUTION)
ADDITIONS: dict[str, tuple[str, Any]] = {
    **{each: (each, True) for each in OPTIONS},
    **{each: ("execution", each) for each in GROUPED},
    **{each: ("precision", each) for each in DTYPES},
}
"""The field of a strategy that each addition to a scheduler sets, and its value."""


@dataclass(frozen=True)
class Strategy:
    """A scheduler and its options.

    Attributes:
        sharing: run each image's stem, and equal subtrees over one image, once.
        defer: compute the gradients of each module's weights once per step.
        execution: one of `EXECUTIONS`. Other than with "calls", a call runs all functions of one architecture.
    """

    batching: str
    sharing: bool = False
    defer: bool = False
    execution: str = DEFAULT_EXECUTION
    precision: str = DTYPES[0]

    @property
    def name(self) -> str:
        """The name of the strategy, which `parse_strategies` reads."""
        added = [each for each, (field, value) in ADDITIONS.items() if getattr(self, field) == value]
        return "+".join([self.batching, *(each for each in added if each != DTYPES[0])])


def parse_strategies(text: str, options: Sequence[str] = tuple(ADDITIONS)) -> list[Strategy]:
    """Return the strategies of a comma-separated list, without duplicates.

    An item is a scheduler and, after `+`, some of `options`. `all` stands for every scheduler, for the default one with
    sharing and, where that is an option, with sharing and deferral; `all+sharing` stands for every scheduler with
    sharing.

    Raises:
        InputError: a part of an item is unknown; suggests the nearest.
    """
    strategies = []
    for item in (item.strip() for item in text.split(",")):
        name, *added = item.split("+")
        for each, known in [(name, (*BATCHING, ALL)), *((each, options) for each in added)]:
            if each not in known:
                choices = ", ".join(known)
                raise InputError(f"{item!r}: unknown {each!r}, expected one of {choices}{nearest(each, known)}")
        chosen = dict(ADDITIONS[each] for each in added)
        if "cuda_graph" in added and name != BEST:
            raise InputError(f"{item!r}: cuda_graph has calls of its own, expected it with {BEST}")
        strategies += [Strategy(each, **chosen) for each in (BATCHING if name == ALL else (name,))]
        if item == ALL:
            defers = (False, True) if DEFER in options else (False,)
            strategies += [Strategy(BEST, sharing=True, defer=defer) for defer in defers]
    return list(dict.fromkeys(strategies))
