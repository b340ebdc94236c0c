"""Words for questions: a sentence with placeholders and its phrases become English, synonyms drawn at random.

Uses CLEVR's words and no others (Johnson et al. 2017, CLEVR, supplement B). The placeholders are explained in
`templates.py`.
"""

from collections.abc import Callable
from random import Random

from iep.synth.phrases import Description, Phrase
from iep.synth.world import ATTRIBUTES

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


def word(sentence: str, phrases: tuple[Phrase, ...], extra: Description | tuple[()], rng: Random) -> str:
    """The sentence with its placeholders filled; `extra` describes the things of a union's question."""
    return sentence.format_map(_Words(phrases, extra or NOTHING, rng))


class _Words(dict):
    """Fills a placeholder when the sentence asks for it, so that only used words take from the chance."""

    def __init__(self, phrases: tuple[Phrase, ...], extra: Description, rng: Random) -> None:
        super().__init__()
        self.phrases, self.extra, self.rng = phrases, extra, rng

    def __missing__(self, name: str) -> str:
        return _PLACEHOLDERS[name](self)

    def pick(self, options: tuple[str, ...]) -> str:
        return options[int(self.rng.random() * len(options))]

    def noun(self, description: Description, many: bool) -> str:
        """Adjectives and noun without article: "big red cubes"."""
        *adjectives, shape = description
        words = [self.pick(ADJECTIVES.get(value, (value,))) for value in adjectives if value is not None]
        return " ".join([*words, self.pick(NOUNS[shape]) + ("s" if many else "")])

    def named(self, phrase: Phrase, many: bool, other: bool = True) -> str:
        """A phrase without article: "other big cubes that are left of the ball"."""
        noun = self.noun(phrase.description, many)
        if other and phrase.other:
            noun = f"other {noun}"
        return f"{noun} {self.clause(phrase, many)}" if phrase.links else noun

    def the(self, phrase: Phrase) -> str:
        return f"the {self.named(phrase, many=False)}"

    def a(self, phrase: Phrase) -> str:
        return _article(self.named(phrase, many=False, other=False), phrase.other)

    def clause(self, phrase: Phrase, many: bool) -> str:
        """What follows the noun: "that are left of the ball", "of the same size as the cube"."""
        be, have = ("are", "have") if many else ("is", "has")
        (link, start), *rest = phrase.links
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
        """A statement without its subject's article: "big cubes are left of the ball"."""
        noun = self.noun(phrase.description, many=True)
        (link, start), *rest = phrase.links
        if rest:
            return f"{noun} are {self.pick(('', 'both '))}{self.relation(link, start)} and {self.relation(*rest[0])}"
        if link.startswith("relate"):
            return f"{noun} are {self.relation(link, start)}"
        noun = f"other {noun}" if phrase.other else noun
        return f"{noun} {self.pick(('are', 'have'))} {self.alike(phrase)}"

    def alike(self, phrase: Phrase) -> str:
        """ "the same size as the cube"."""
        ((link, start),) = phrase.links
        return f"the same {link.removeprefix('same_')} as {self.the(start)}"


def _article(noun: str, other: bool) -> str:
    if other:
        return f"another {noun}"
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _start(words: _Words) -> Phrase:
    """The phrase of the object that the first phrase's relation starts from."""
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
    "as": lambda words: words.alike(words.phrases[0]),
}
