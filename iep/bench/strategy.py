"""`lookahead+sharing+bfloat16` <-> how the engine runs a minibatch: the names of a benchmark's rows."""

from dataclasses import dataclass, replace

from iep.config import BATCHING, PRECISIONS, Config
from iep.errors import InputError, nearest

PHASES = ("inference", "train")
ALL = "all"
BEST = Config.batching
SHARING, DEFER = "sharing", "defer"


@dataclass(frozen=True)
class Strategy:
    """A scheduler and what goes with it. `defer` computes each module's weight gradients once a step."""

    batching: str
    sharing: bool = False
    defer: bool = False
    precision: str = PRECISIONS[0]

    @property
    def name(self) -> str:
        """As `parse_strategies` reads it."""
        return "+".join([self.batching, *self.additions])

    @property
    def additions(self) -> tuple[str, ...]:
        """What goes with the scheduler, where it is not as the original has it."""
        precision = () if self.precision == PRECISIONS[0] else (self.precision,)
        return (*[SHARING] * self.sharing, *[DEFER] * self.defer, *precision)

    def in_phase(self, phase: str) -> "Strategy":
        """The same where it trains; without weight gradients there is nothing to defer."""
        return self if phase == "train" else replace(self, defer=False)


def parse_strategies(
    text: str, sharing: bool | None = None, defer: bool | None = None, precisions: str = PRECISIONS[0]
) -> list[Strategy]:
    """The strategies of a comma list, each once.

    An item is a scheduler and, after `+`, what it runs with: `sharing`, `defer`, and a precision. `all` is every
    scheduler, then the default one with sharing, then with sharing and deferral; `all+sharing` every one with sharing.

    Args:
        text: the list.
        sharing: for all of them, whatever they say; None, as they say.
        defer: likewise.
        precisions: comma list; strategies that name no precision run in each.

    Raises:
        InputError: a part of an item is unknown; names the nearest.
    """
    default_precisions = [_known(item, PRECISIONS, "precision") for item in _items(precisions)]
    strategies: dict[Strategy, None] = {}
    for batching, *additions in (part.split("+") for item in _items(text) for part in _expanded(item)):
        for precision in [addition for addition in additions if addition in PRECISIONS] or default_precisions:
            strategy = Strategy(
                batching,
                SHARING in additions if sharing is None else sharing,
                DEFER in additions if defer is None else defer,
                precision,
            )
            strategies[strategy] = None
    return list(strategies)


def _expanded(item: str) -> list[str]:
    """`item` without `all`."""
    if item == ALL:
        return [*BATCHING, f"{BEST}+{SHARING}", f"{BEST}+{SHARING}+{DEFER}"]
    name, *additions = item.split("+")
    _known(name, (*BATCHING, ALL), "scheduler")
    for addition in additions:
        _known(addition, (SHARING, DEFER, *PRECISIONS), f"addition to {name}")
    return ["+".join([batching, *additions]) for batching in (BATCHING if name == ALL else [name])]


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",")]


def _known(name: str, choices: tuple[str, ...], what: str) -> str:
    if name not in choices:
        raise InputError(f"{name!r} is no {what}, expected one of {', '.join(choices)}{nearest(name, choices)}")
    return name
