"""Descriptions of objects ("big red cube") and phrases ("big red cube left of the ball") as plain data, and in words.

A phrase becomes prefix tokens of a program and, in the placeholders of a sentence, English with random synonyms. All
words are CLEVR's (Johnson et al. 2017, CLEVR, supplement B). The placeholders are explained in `templates.py`;
`question_generator.py` finds phrases.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

from iep.programs import ProgramCall
from iep.synth.world import ATTRIBUTES, VALUES

Description = tuple[str | None, ...]

# Every description: a value or None for each of ATTRIBUTES, 324 in all. A description's index is its position here.
DESCRIPTIONS: tuple[Description, ...] = tuple(product(*((None, *VALUES[attribute]) for attribute in ATTRIBUTES)))
LENGTHS = tuple(sum(value is not None for value in description) for description in DESCRIPTIONS)
MENTIONS = tuple(sum(1 << k for k in range(4) if description[k] is not None) for description in DESCRIPTIONS)
_INDEX = {description: index for index, description in enumerate(DESCRIPTIONS)}
# For each kind of object the 16 descriptions that fit it.
WITHIN = {
    values: tuple(_INDEX[choice] for choice in product(*((None, value) for value in values)))
    for values in product(*(VALUES[attribute] for attribute in ATTRIBUTES))
}


@dataclass(frozen=True)
class Phrase:
    """A description, and links that restrict the objects it applies to: none, one, or two that must both hold.

    A link is a program token, such as `relate[left]` or `same_size`, and the phrase of the one object that it starts
    from. `objects` is the set that the phrase names on its scene (bit i for object i). `other` is true if the object
    that a `same_` link starts from fits the description as well, so that the words need an "other".
    """

    description: Description
    links: tuple[tuple[str, "Phrase"], ...]
    objects: int
    other: bool = False

    @property
    def tokens(self) -> tuple[str, ...]:
        """The prefix tokens of the set. Filters run in the order of `ATTRIBUTES`, so the last one comes first."""
        filters = [
            f"filter_{attribute}[{value}]"
            for attribute, value in zip(ATTRIBUTES, self.description, strict=True)
            if value is not None
        ]
        base = [token for link, start in self.links for token in (link, "unique", *start.tokens)] or ["scene"]
        both = ["intersect"] if len(self.links) == 2 else []
        return (*reversed(filters), *both, *base)


def bits(objects: int) -> list[int]:
    """Return the indices in a set."""
    return [index for index in range(objects.bit_length()) if objects >> index & 1]


def mentions(attributes: Iterable[str]) -> int:
    """Return attributes as bits, to compare with `MENTIONS`."""
    return sum(1 << ATTRIBUTES.index(attribute) for attribute in attributes)


NOUNS = {
    None: ("thing", "object"),
    "cube": ("cube", "block"),
    "sphere": ("sphere", "ball"),
    "cylinder": ("cylinder",),
}
ADJECTIVES = {
    "large": ("large", "big"),
    "small": ("small", "tiny"),
    "metal": ("metal", "metallic", "shiny"),
    "rubber": ("rubber", "matte"),
}
RELATION_WORDS = {
    "relate[left]": ("left of", "to the left of", "on the left side of"),
    "relate[right]": ("right of", "to the right of", "on the right side of"),
    "relate[behind]": ("behind",),
    "relate[front]": ("in front of",),
}
NOTHING: Description = (None,) * len(ATTRIBUTES)
MOST_LINKS = 4
"""The most links, one after the other, in a phrase that is read from a program. CLEVR's questions have up to 3."""


def word(sentence: str, phrases: tuple[Phrase, ...], extra: Description | tuple[()], rng: Random) -> str:
    """Return the sentence with its placeholders filled; `extra` describes the things of a union's question."""
    return sentence.format_map(_Words(phrases, extra or NOTHING, rng))


def in_words(program: Sequence[ProgramCall], call: int, many: bool) -> str:
    """Return the set of objects that a call returns in words, such as "large cubes left of the red thing".

    A set that no phrase of CLEVR's questions names is "such things".
    """
    phrase = _read_phrase(program, call, MOST_LINKS)
    if phrase is None:
        return "such things" if many else "such thing"
    return _Words((), NOTHING, None).named(phrase, many)


def _read_phrase(program: Sequence[ProgramCall], call: int, most_links: int) -> Phrase | None:
    """Return the phrase of the set that a call returns, the inverse of `Phrase.tokens`; None if there is none."""
    values: dict[str, str | None] = {}
    while program[call].function.startswith("filter_"):
        attribute = program[call].function.removeprefix("filter_")
        if attribute in values:
            return None
        values[attribute] = program[call].value
        (call,) = program[call].inputs
    description = tuple(values.get(attribute) for attribute in ATTRIBUTES)
    base = program[call]
    links, is_other = [], False
    for source in {"scene": [], "intersect": base.inputs}.get(base.function, [call]):
        link = program[source]
        if not (most_links and link.function.startswith(("relate", "same_"))):
            return None
        unique = program[link.inputs[0]]
        start = _read_phrase(program, unique.inputs[0], most_links - 1)
        if start is None:
            return None
        links.append((link.token, start))
        fits = all(own in (None, value) for own, value in zip(description, start.description, strict=True))
        is_other = fits and base.function.startswith("same_")
    links.sort(key=lambda link: link[0])
    if len(links) == 2 and links[0][0].startswith("same_"):
        return None
    return Phrase(description, tuple(links), 0, is_other)


class _Words(dict):
    """Fill a placeholder when the sentence needs it, so that only used words draw random numbers.

    Without random numbers, each synonym is the first one.
    """

    def __init__(self, phrases: tuple[Phrase, ...], extra: Description, rng: Random | None) -> None:
        super().__init__()
        self.phrases, self.extra, self.rng = phrases, extra, rng

    def __missing__(self, name: str) -> str:
        return _PLACEHOLDERS[name](self)

    def pick(self, options: tuple[str, ...]) -> str:
        return options[0 if self.rng is None else int(self.rng.random() * len(options))]

    def noun(self, description: Description, many: bool) -> str:
        """Return adjectives and noun without article: "big red cubes"."""
        *adjectives, shape = description
        words = [self.pick(ADJECTIVES.get(value, (value,))) for value in adjectives if value is not None]
        return " ".join([*words, self.pick(NOUNS[shape]) + ("s" if many else "")])

    def named(self, phrase: Phrase, many: bool, other: bool = True) -> str:
        """Return a phrase without article: "other big cubes that are left of the ball"."""
        noun = self.noun(phrase.description, many)
        if other and phrase.other:
            noun = f"other {noun}"
        return f"{noun} {self.clause(phrase, many)}" if phrase.links else noun

    def the(self, phrase: Phrase) -> str:
        return f"the {self.named(phrase, many=False)}"

    def a(self, phrase: Phrase) -> str:
        return _article(self.named(phrase, many=False, other=False), phrase.other)

    def clause(self, phrase: Phrase, many: bool) -> str:
        """Return what follows the noun: "that are left of the ball", "of the same size as the cube"."""
        be, have = ("are", "have") if many else ("is", "has")
        (link, start), *rest = phrase.links
        if rest and rest[0][0].startswith("same"):
            alike = self.alike(*rest[0])
            return f"that {be} {self.relation(link, start)} and {self.pick((be, have))} {alike}"
        if rest:
            both = self.pick(("", "both "))
            return f"that {be} {both}{self.relation(link, start)} and {self.relation(*rest[0])}"
        if link.startswith("relate"):
            return self.pick(("", f"that {be} ")) + self.relation(link, start)
        attribute = link.removeprefix("same_")
        made = ("made of ",) if attribute == "material" else ()
        opening = self.pick((f"that {be} ", f"that {have} ", "of ", *(f"that {be} {m}" for m in made)))
        return f"{opening}the same {attribute} as {self.the(start)}"

    def relation(self, link: str, start: Phrase) -> str:
        return f"{self.pick(RELATION_WORDS[link])} {self.the(start)}"

    def are(self, phrase: Phrase) -> str:
        """Return a statement without its subject's article: "big cubes are left of the ball"."""
        noun = self.noun(phrase.description, many=True)
        (link, start), *rest = phrase.links
        if rest:
            return f"{noun} are {self.pick(('', 'both '))}{self.relation(link, start)} and {self.relation(*rest[0])}"
        if link.startswith("relate"):
            return f"{noun} are {self.relation(link, start)}"
        noun = f"other {noun}" if phrase.other else noun
        return f"{noun} {self.pick(('are', 'have'))} {self.alike(link, start)}"

    def alike(self, link: str, start: Phrase) -> str:
        """Return a comparison: "the same size as the cube"."""
        return f"the same {link.removeprefix('same_')} as {self.the(start)}"


def _article(noun: str, other: bool) -> str:
    if other:
        return f"another {noun}"
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _start(words: _Words) -> Phrase:
    """Return the phrase of the object that the first phrase's relation starts from."""
    return words.phrases[0].links[0][1]


_PLACEHOLDERS: dict[str, Callable[[_Words], str]] = {
    "a": lambda words: words.named(words.phrases[0], many=True),
    "b": lambda words: words.named(words.phrases[1], many=True),
    "the_a": lambda words: words.the(words.phrases[0]),
    "the_b": lambda words: words.the(words.phrases[1]),
    "The_a": lambda words: words.the(words.phrases[0]).capitalize(),
    "an_a": lambda words: words.a(words.phrases[0]),
    "are_a": lambda words: words.are(words.phrases[0]),
    "an_o": lambda words: words.a(_start(words)),
    "own": lambda words: words.noun(words.phrases[0].description, many=True),
    "an_own": lambda words: _article(words.noun(words.phrases[0].description, many=False), other=False),
    "it": lambda words: f"{words.pick(RELATION_WORDS[words.phrases[0].links[0][0]])} it",
    "thing": lambda words: words.noun(words.extra, many=False),
    "things": lambda words: words.noun(words.extra, many=True),
    "same": lambda words: words.clause(words.phrases[0], many=False),
    "same_many": lambda words: words.clause(words.phrases[0], many=True),
    "as": lambda words: words.alike(*words.phrases[0].links[0]),
}
