"""A scene -> questions about it: families of templates become programs with an answer on the scene, and sentences.

For every question, the answer is chosen first (the one that its family has had least often); then a seeded search finds
phrases for it. Questions are never ill-posed (`unique` gets one object) nor degenerate: dropping a relation always
changes what its phrase names (Johnson et al. 2017, CLEVR, section 3.2 and supplement). Finding phrases is `search.py`,
wording `phrases.py`, the families `templates.py`. Shape suffix: D descriptions.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import numpy as np

from iep.programs import prefix_to_json
from iep.synth.executor import Facts
from iep.synth.phrases import Phrase, bits, mentions, word
from iep.synth.search import SIZES, TRIES, Accept, Search, describe_one, describe_set, search_on
from iep.synth.templates import FAMILIES_OF, Family, Link
from iep.synth.world import ATTRIBUTES, VALUES

COUNT_WEIGHTS = tuple(max(0.7**count, 0.12) for count in range(11))  # high counts are rarely possible
YES_NO = ("yes", "no")
LEAD = 1  # of two answers, one that is further ahead in its family waits for the other


@dataclass(frozen=True)
class Question:
    """One question: its sentence, answer, program (JSON) and family."""

    text: str
    answer: str
    program: tuple[dict, ...]
    family: int


def ask(
    facts: Facts,
    count: int,
    rng: Random,
    tally: Counter,
    emphasis: Mapping[str, float] | None = None,
    families: str = "clevr",
) -> list[Question]:
    """Return up to `count` different questions about a scene, of as many families as possible.

    Args:
        families: the families of a benchmark, a key of `FAMILIES_OF`.
        tally: counts answers by `(family, answer)`, and is updated; used for several scenes, it balances their answers.
        emphasis: how many times more likely the families of a group are to come first; the order is random (Efraimidis
            & Spirakis 2006, weighted sampling without replacement).
    """
    search = search_on(facts, rng)
    questions: list[Question] = []
    known: set[tuple[str, ...]] = set()
    for _ in range(TRIES):
        for family in _shuffled(FAMILIES_OF[families], rng, emphasis or {}):
            if len(questions) == count:
                return questions
            found = _instantiate(family, search, tally)
            if found is None or found.tokens in known:
                continue
            known.add(found.tokens)
            tally[family.index, found.answer] += 1
            text = word(rng.choice(family.sentences), found.phrases, found.extra, rng)
            questions.append(Question(text, found.answer, tuple(prefix_to_json(found.tokens)), family.index))
    return questions


def _shuffled(families: Sequence[Family], rng: Random, emphasis: Mapping[str, float]) -> list[Family]:
    keys = [rng.random() ** (1 / emphasis.get(family.group, 1.0)) for family in families]
    return [families[i] for i in sorted(range(len(families)), key=keys.__getitem__, reverse=True)]


class _Found(NamedTuple):
    """A family's question before it is put into words."""

    answer: str
    tokens: tuple[str, ...]
    """The program in prefix order."""
    phrases: tuple[Phrase, ...]
    extra: tuple[str | None, ...] = ()
    """The description of the things in a union's question; empty in other questions."""


def _instantiate(family: Family, search: Search, tally: Counter) -> _Found | None:
    """Return a question of a family, or None if the scene has none."""
    find = _FINDERS["query" if family.head.startswith("query_") else family.group]
    for answer in _wanted(family, search, tally):
        found = find(family, search, answer)
        if found is not None:
            return found
    return None


def _wanted(family: Family, search: Search, tally: Counter) -> list[str]:
    """Return the family's possible answers, beginning with the one furthest behind its share."""
    kind, _, attribute = family.head.partition("_")
    answers: Sequence[str] = YES_NO
    weights: Sequence[float] = (1,) * 8
    if kind == "query":
        answers = VALUES[attribute]
    elif kind == "count":
        answers, weights = [str(n) for n in range(len(search.facts.objects) + 1)], COUNT_WEIGHTS
    due = {
        answer: (tally[family.index, answer] + search.rng.random()) / weight
        for answer, weight in zip(answers, weights, strict=False)
    }
    order = sorted(due, key=due.__getitem__)
    if answers is YES_NO and tally[family.index, order[1]] > tally[family.index, order[0]] + LEAD:
        return order[:1]
    return order


def _find_query(family: Family, search: Search, answer: str) -> _Found | None:
    attribute = family.head.removeprefix("query_")
    targets = bits(search.facts.having[attribute][answer])
    for target in search.rng.sample(targets, len(targets)):
        phrase = describe_one(search, target, family.links[0], mentions(family.silent))
        if phrase is not None:
            return _Found(answer, (family.head, "unique", *phrase.tokens), (phrase,))
    return None


def _find_set(family: Family, search: Search, answer: str) -> _Found | None:
    """Find a phrase for `exist` and `count`."""
    accept = _accepts(answer)
    # "Are there any things?" asks nothing; "How many things are there?" does.
    shortest = _shortest(family.links[0]) if family.head == "exist" else 0
    longest = 0 if family.bare else 4
    phrase = describe_set(search, accept, family.links[0], mentions(family.silent), shortest, longest)
    return None if phrase is None else _Found(answer, (family.head, *phrase.tokens), (phrase,))


def _find_union(family: Family, search: Search, answer: str) -> _Found | None:
    """Find two phrases that both add objects to their union, of which `extra` selects those with one more value."""
    silent, wanted = mentions((*family.silent, *filter(None, [family.extra]))), int(answer)
    for _ in range(TRIES // 2):
        value, kept = _kept(search, family.extra, wanted)
        # Each side adds an object, so without an extra value the left side has fewer objects than wanted.
        most = wanted if family.extra else wanted - 1
        if kept.bit_count() < wanted or most < 0:
            return None

        def fits(objects_D: np.ndarray, kept: int = kept, most: int = most) -> np.ndarray:
            return (objects_D != 0) & (SIZES[objects_D & kept] <= most)

        left = describe_set(search, fits, family.links[0], silent, _shortest(family.links[0]))
        if left is None:
            continue

        def accept(objects_D: np.ndarray, kept: int = kept, ours: int = left.objects) -> np.ndarray:
            adds_D = ((objects_D & ~ours) != 0) & ((ours & ~objects_D) != 0)
            return adds_D & (SIZES[(objects_D | ours) & kept] == wanted)

        right = describe_set(search, accept, family.links[1], silent, _shortest(family.links[1]))
        if right is not None:
            filters = (f"filter_{family.extra}[{value}]",) if family.extra else ()
            extra = tuple(value if attribute == family.extra else None for attribute in ATTRIBUTES)
            return _Found(answer, ("count", *filters, "union", *left.tokens, *right.tokens), (left, right), extra)
    return None


def _kept(search: Search, attribute: str | None, wanted: int) -> tuple[str | None, int]:
    """Draw the extra value of a union; return it and the objects with it, or all objects if there is no attribute."""
    if attribute is None:
        return None, search.facts.everything
    having = search.facts.having[attribute]
    values = [value for value, objects in having.items() if objects.bit_count() >= wanted] or list(having)
    value = search.rng.choice(values)
    return value, having[value]


def _shortest(link: Link) -> int:
    """Return the fewest attributes of a description with this link; "things" without a link is no description."""
    return 1 if link == 0 else 0


def _find_integers(family: Family, search: Search, answer: str) -> _Found | None:
    """Find two phrases that name different sets, or none at all, and whose sizes compare as wanted."""
    compare = _COMPARE[family.head]
    for _ in range(TRIES):
        size = search.rng.choices((0, 1, 2, 3), (0.25, 0.35, 0.25, 0.15))[0]

        def fits(objects_D: np.ndarray, size: int = size) -> np.ndarray:
            return np.minimum(SIZES[objects_D], 3) == size

        left = describe_set(search, fits, family.links[0])
        if left is None:
            continue

        def accept(objects_D: np.ndarray, ours: int = left.objects) -> np.ndarray:
            is_other_D = (objects_D != ours) | (ours == 0)
            return is_other_D & (compare(ours.bit_count(), SIZES[objects_D]) == (answer == "yes"))

        right = describe_set(search, accept, family.links[1])
        if right is not None and right.tokens != left.tokens:
            return _Found(answer, (family.head, "count", *left.tokens, "count", *right.tokens), (left, right))
    return None


def _find_comparison(family: Family, search: Search, answer: str) -> _Found | None:
    """Find phrases for two objects that share the attribute or not; neither mentions it."""
    attribute = family.head.removeprefix("equal_")
    same, silent = search.facts.same[attribute], mentions(family.silent)
    pairs = [
        (left, right)
        for left in range(len(same))
        for right in range(len(same))
        if left != right and (same[left] >> right & 1 == 1) == (answer == "yes")
    ]
    for left, right in search.rng.sample(pairs, min(len(pairs), TRIES)):
        first = describe_one(search, left, family.links[0], silent)
        second = first and describe_one(search, right, family.links[1], silent)
        if first and second:
            query = (f"query_{attribute}", "unique")
            return _Found(answer, (family.head, *query, *first.tokens, *query, *second.tokens), (first, second))
    return None


_COMPARE: dict[str, Callable[[int, np.ndarray], Any]] = {
    "equal_integer": lambda left, right: left == right,
    "less_than": lambda left, right: left < right,
    "greater_than": lambda left, right: left > right,
}
_FINDERS: dict[str, Callable[[Family, Search, str], _Found | None]] = {
    "query": _find_query,
    "comparison": _find_comparison,
    "compare_integer": _find_integers,
    "single_or": _find_union,
    **dict.fromkeys(("compare_mat", "compare_mat_spa"), _find_comparison),
    **dict.fromkeys(("or_mat", "or_mat_spa"), _find_union),
    **dict.fromkeys(("embed_mat_spa", "embed_spa_mat"), _find_set),
    **dict.fromkeys(("zero_hop", "one_hop", "two_hop", "three_hop", "single_and", "same_relate"), _find_set),
}


def _accepts(answer: str) -> Accept:
    """Return which sets give the wanted answer to `exist` or `count`."""
    if answer in YES_NO:
        return lambda objects_D: (objects_D != 0) == (answer == "yes")
    return lambda objects_D: SIZES[objects_D] == int(answer)
