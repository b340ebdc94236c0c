"""Descriptions of objects ("big red cube") and phrases ("big red cube left of the ball") as plain data.

A phrase turns into prefix tokens of a program here, and into words in `language.py`; `questions.py` finds them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from iep.synth.world import ATTRIBUTES, VALUES

Description = tuple[str | None, str | None, str | None, str | None]

# Every description: a value or None for each of ATTRIBUTES, 324 in all. The other tables go by a description's index.
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
    """A description of the objects that its links lead to: none (all of the scene), one, or two that must both hold.

    A link is a program token, `relate[left]` or `same_size`, and the phrase of the one object that it starts from.
    `objects` is the set named on the scene at hand (bit i for object i); `other` says that the object which a `same_`
    link starts from fits the description too, so that the words need an "other".
    """

    description: Description
    links: tuple[tuple[str, "Phrase"], ...]
    objects: int
    other: bool = False

    @property
    def tokens(self) -> tuple[str, ...]:
        """Prefix tokens of the set. Filters run in the order of `ATTRIBUTES`, so that the last stands first."""
        filters = [
            f"filter_{attribute}[{value}]"
            for attribute, value in zip(ATTRIBUTES, self.description, strict=True)
            if value is not None
        ]
        base = [token for link, start in self.links for token in (link, "unique", *start.tokens)] or ["scene"]
        both = ["intersect"] if len(self.links) == 2 else []
        return (*reversed(filters), *both, *base)

    def tokens_after(self, *functions: str) -> tuple[str, ...]:
        """Prefix tokens with functions put on top."""
        return (*functions, *self.tokens)


def bits(objects: int) -> list[int]:
    """The indices in a set."""
    return [index for index in range(objects.bit_length()) if objects >> index & 1]


def mentions(attributes: Iterable[str]) -> int:
    """Attributes as bits, to be held against `MENTIONS`."""
    return sum(1 << ATTRIBUTES.index(attribute) for attribute in attributes)
