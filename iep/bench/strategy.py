"""`lookahead+sharing+families+bfloat16` <-> how a minibatch is run: the names of a benchmark's rows."""

from dataclasses import dataclass

from iep.config import BATCHING, PRECISIONS, Config
from iep.errors import InputError, nearest

PHASES = ("train", "inference")
ALL = "all"
BEST = Config.batching
SHARING, DEFER, FAMILIES = OPTIONS = ("sharing", "defer", "families")


@dataclass(frozen=True)
class Strategy:
    """A scheduler and what goes with it.

    Attributes:
        sharing: equal subtrees over one image run once, and so does each image's stem.
        defer: each module's weight gradients are computed once a step.
        families: the schedule is over families of functions of one architecture; a call runs several functions.
    """

    batching: str
    sharing: bool = False
    defer: bool = False
    families: bool = False
    precision: str = PRECISIONS[0]

    @property
    def name(self) -> str:
        """The name, as `parse_strategies` reads it."""
        options = [option for option in OPTIONS if getattr(self, option)]
        return "+".join([self.batching, *options, *[self.precision] * (self.precision != PRECISIONS[0])])


def parse_strategies(text: str, options: tuple[str, ...] = (*OPTIONS, *PRECISIONS)) -> list[Strategy]:
    """Return the strategies of a comma-separated list, without duplicates.

    An item is a scheduler and, after `+`, some of `options`. `all` is every scheduler, then the default one with
    sharing, then, where that is an option, with sharing and deferral; `all+sharing` is every one with sharing.

    Raises:
        InputError: a part of an item is unknown; names the nearest.
    """
    strategies = []
    for item in (item.strip() for item in text.split(",")):
        name, *added = item.split("+")
        _check(name, (*BATCHING, ALL), "scheduler")
        for each in added:
            _check(each, options, f"addition to {name}")
        chosen = {option: option in added for option in OPTIONS}
        precision, *others = [each for each in added if each in PRECISIONS] or PRECISIONS[:1]
        if others:
            raise InputError(f"{item!r} has several precisions, expected one")
        names = BATCHING if name == ALL else (name,)
        strategies += [Strategy(batching, **chosen, precision=precision) for batching in names]
        if item == ALL:
            defers = (False, True) if DEFER in options else (False,)
            strategies += [Strategy(BEST, sharing=True, defer=defer) for defer in defers]
    return list(dict.fromkeys(strategies))


def _check(name: str, known: tuple[str, ...], what: str) -> None:
    if name not in known:
        raise InputError(f"{name!r} is not a known {what}, expected one of {', '.join(known)}{nearest(name, known)}")
