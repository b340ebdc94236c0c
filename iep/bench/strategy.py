"""Strategies, such as `lookahead+sharing+bfloat16`, which name the rows of a benchmark."""

from dataclasses import dataclass
from typing import Any

from iep.config import BATCHING, PRECISIONS, Config
from iep.errors import InputError, nearest
from iep.execution_engine.choices import DEFAULT_EXECUTION, EXECUTIONS

PHASES = ("train", "inference")
ALL = "all"
BEST = Config.batching
SHARING, DEFER = OPTIONS = ("sharing", "defer")
GROUPED = tuple(each for each in EXECUTIONS if each != DEFAULT_EXECUTION)


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
    precision: str = PRECISIONS[0]

    @property
    def name(self) -> str:
        """The name of the strategy, which `parse_strategies` reads."""
        options = [option for option in OPTIONS if getattr(self, option)]
        others = {self.execution, self.precision} - {DEFAULT_EXECUTION, PRECISIONS[0]}
        return "+".join([self.batching, *options, *sorted(others, reverse=True)])


def parse_strategies(text: str, options: tuple[str, ...] = (*OPTIONS, *GROUPED, *PRECISIONS)) -> list[Strategy]:
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
        _check(name, (*BATCHING, ALL), "scheduler")
        for each in added:
            _check(each, options, f"addition to {name}")
        chosen: dict[str, Any] = {option: option in added for option in OPTIONS}
        for kind, known, default in (
            ("precision", PRECISIONS, PRECISIONS[0]),
            ("execution", GROUPED, DEFAULT_EXECUTION),
        ):
            chosen[kind], *others = [each for each in added if each in known] or [default]
            if others:
                raise InputError(f"{item!r} has several {kind}s, expected one")
        names = BATCHING if name == ALL else (name,)
        if chosen["execution"] == "cuda_graph" and names != (BEST,):
            raise InputError(f"{item!r}: cuda_graph has calls of its own, expected it with {BEST}")
        strategies += [Strategy(batching, **chosen) for batching in names]
        if item == ALL:
            defers = (False, True) if DEFER in options else (False,)
            strategies += [Strategy(BEST, sharing=True, defer=defer) for defer in defers]
    return list(dict.fromkeys(strategies))


def _check(name: str, known: tuple[str, ...], what: str) -> None:
    if name not in known:
        raise InputError(f"{name!r} is not a known {what}, expected one of {', '.join(known)}{nearest(name, known)}")
