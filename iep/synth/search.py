"""Find phrases that name a wanted object, or a set of objects with a wanted property, on a scene.

The search is seeded. It tries all descriptions and a sample of relations. No phrase has a relation that could be
dropped without changing what the phrase names. Sets of objects are integers, as in `executor.py`. Shape suffix: D
descriptions.
"""

from bisect import bisect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, combinations, product
from random import Random

import numpy as np

from iep.synth.executor import Facts
from iep.synth.phrases import DESCRIPTIONS, LENGTHS, MENTIONS, WITHIN, Phrase, mentions
from iep.synth.templates import Link
from iep.synth.world import ATTRIBUTES, RELATIONS

TRIES = 12  # relations tried for a phrase, and first phrases for a question of two
LENGTH_WEIGHTS = (0.05, 0.21, 0.32, 0.28, 0.14)  # how often a description mentions 0, 1, .. 4 attributes
_LENGTH_STEPS = tuple(accumulate(LENGTH_WEIGHTS))[:-1]
# Accepts some of many sets: (D,) sets as integers -> (D,) booleans, D descriptions.
Accept = Callable[[np.ndarray], np.ndarray]
_LENGTHS_D = np.array(LENGTHS)
_MENTIONS_D = np.array(MENTIONS)
SIZES = np.array([objects.bit_count() for objects in range(1 << 10)])  # of every set of at most 10 objects


@dataclass(frozen=True)
class Search:
    """A scene's facts, the set of objects that fits each of `DESCRIPTIONS`, and the random number generator."""

    facts: Facts
    fitting: tuple[int, ...]
    fitting_D: np.ndarray
    rng: Random


def search_on(facts: Facts, rng: Random) -> Search:
    """Return a search on a scene."""
    fitting = [facts.everything]
    for attribute in ATTRIBUTES:  # in the order of DESCRIPTIONS
        masks = (facts.everything, *facts.having[attribute].values())
        fitting = [objects & mask for objects in fitting for mask in masks]
    return Search(facts, tuple(fitting), np.array(fitting), rng)


def describe_one(search: Search, target: int, link: Link, silent: int = 0, avoid: int = 0) -> Phrase | None:
    """Return a phrase with this link that names only the target, or None.

    `silent` are the attributes, as bits, that its description must not mention; `avoid` the objects that its links must
    not start from.
    """
    alone = 1 << target
    within = WITHIN[search.facts.objects[target]]
    for links, base, weaker in _bases(search, link, target, avoid | alone):
        options = [
            d
            for d in within
            if not MENTIONS[d] & silent
            and search.fitting[d] & base == alone
            and all(search.fitting[d] & other != alone for other in weaker)
        ]
        if options:
            length = _draw_length(search.rng)
            nearest = min(abs(LENGTHS[d] - length) for d in options)
            chosen = search.rng.choice([d for d in options if abs(LENGTHS[d] - length) == nearest])
            return _phrase(search, chosen, links, base)
    return None


def describe_set(
    search: Search, accept: Accept, link: Link, silent: int = 0, shortest: int = 0, longest: int = 4
) -> Phrase | None:
    """Return a phrase of `shortest` to `longest` attributes with this link whose set `accept` accepts, or None."""
    allowed_D = _allowed(silent, shortest, longest)
    for links, base, weaker in _bases(search, link, None, 0):
        named_D = search.fitting_D & base
        ok_D = allowed_D & accept(named_D)
        for other in weaker:
            ok_D &= search.fitting_D & other != named_D
        options = ok_D.nonzero()[0]
        if len(options):
            away = np.abs(_LENGTHS_D[options] - _draw_length(search.rng))
            return _phrase(search, search.rng.choice(options[away == away.min()].tolist()), links, base)
    return None


@cache
def _allowed(silent: int, shortest: int, longest: int) -> np.ndarray:
    """Return (D,) booleans: which descriptions have `shortest` to `longest` attributes, none of them in `silent`."""
    return np.isin(_LENGTHS_D, range(shortest, longest + 1)) & (_MENTIONS_D & silent == 0)


def _draw_length(rng: Random) -> int:
    """Draw how many attributes a description should mention if possible."""
    return bisect(_LENGTH_STEPS, rng.random())


def _phrase(search: Search, description: int, links: tuple, base: int) -> Phrase:
    fitting = search.fitting[description]
    other = any(link.startswith("same_") and inner.objects & fitting for link, inner in links)
    return Phrase(DESCRIPTIONS[description], links, fitting & base, other)


Base = tuple[tuple[tuple[str, Phrase], ...], int, tuple[int, ...]]


def _bases(search: Search, link: Link, target: int | None, avoid: int) -> Iterator[Base]:
    """Yield possible links of a phrase, the set they lead to, and the sets that dropping one link would lead to.

    With a target, every set contains it. Links do not start from objects in `avoid`.
    """
    if link == 0:
        yield (), search.facts.everything, ()
    elif link == "and":
        yield from _double_bases(combinations(_single_links(search, 1, target, avoid), 2))
    elif isinstance(link, tuple) and link[0] == "and":
        relations, others = (list(_single_links(search, each, target, avoid)) for each in (1, link[1]))
        yield from _double_bases(product(relations, others))
    else:
        for token, base, inner in _single_links(search, link, target, avoid):
            yield ((token, inner),), base, (search.facts.everything,)


Start = tuple[str, int, Phrase]
"""The token of a relation, the set it leads to, and the phrase of the one object that it starts from."""


def _double_bases(pairs: Iterable[tuple[Start, Start]]) -> Iterator[Base]:
    for (first, left, left_inner), (second, right, right_inner) in pairs:
        if left_inner.objects != right_inner.objects and left & right:
            yield ((first, left_inner), (second, right_inner)), left & right, (left, right)


def _single_links(search: Search, link: Link, target: int | None, avoid: int) -> Iterator[Start]:
    """Yield up to `TRIES` relations of a link whose sets contain the target, if there is one."""
    facts = search.facts
    if not isinstance(link, tuple):
        link = (link, 0) if isinstance(link, str) else (1, link - 1)
    first, inner_link = link
    if isinstance(first, str):
        attribute = first.removeprefix("same_")
        tokens, silent = {first: facts.same[attribute]}, mentions((attribute,))
    else:
        tokens, silent = {f"relate[{relation}]": facts.related[relation] for relation in RELATIONS}, 0
    wanted = 0 if target is None else 1 << target
    starts = [
        (token, start, objects)
        for token, sets in tokens.items()
        for start, objects in enumerate(sets)
        if not avoid >> start & 1 and objects & wanted == wanted and (objects or isinstance(first, str))
    ]
    for token, start, objects in search.rng.sample(starts, min(len(starts), TRIES)):
        inner = describe_one(search, start, inner_link, silent, avoid)
        if inner is not None:
            yield token, objects, inner
