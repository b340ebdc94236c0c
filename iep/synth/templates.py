"""The families of questions as data: what each asks for, the structure of its phrases, and its sentences.

There are ninety families in nine groups, numbered as CLEVR's (Johnson et al. 2017, CLEVR, supplement B), with our own
sentences in CLEVR's words. They are followed by the families of the seven groups of CLOSURE (Bahdanau et al. 2019,
section 3), which combine the phrases of CLEVR's families in new ways. A *phrase* names a set of objects ("big red cubes
left of the ball"). Finding phrases on a scene is `question_generator.py`, putting them into words `phrases.py`.

In a sentence `{a}`, `{b}` are the phrases in the plural, `{the_a}`, `{the_b}` in the singular after "the", `{an_a}`
after an article; `{are_a}` is a statement ("cubes are left of the ball"); `{an_o}` the object that the last relation
starts from, `{own}`, `{an_own}` the phrase without that relation and `{it}` the relation to "it"; `{thing}`,
`{things}` a bare noun (with the union's extra value); `{same}`, `{same_many}`, `{as}` what the things have in common.
"""

from dataclasses import dataclass

from iep.programs import CLOSURE_GROUPS
from iep.synth.world import ATTRIBUTES

GROUPS = (
    "compare_integer",
    "comparison",
    "three_hop",
    "single_and",
    "same_relate",
    "single_or",
    "one_hop",
    "two_hop",
    "zero_hop",
)
Link = int | str | tuple[int | str, int | str]
"""The relations of a phrase: a number of `relate` hops; "same_<attribute>"; "and" for two hops that both hold; or a
pair, of "and" and another relation that holds beside a hop, or of a relation and those of the phrase that it starts
from."""


@dataclass(frozen=True)
class Family:
    """One family of questions.

    `head` is the program's root without its value. `links` has the relations of each phrase. `silent` are attributes
    that the phrases do not mention; `extra` is the attribute that filters a union; `bare` means that the phrase has no
    filters of its own.
    """

    index: int
    group: str
    head: str
    links: tuple[Link, ...]
    sentences: tuple[str, ...]
    silent: tuple[str, ...] = ()
    extra: str | None = None
    bare: bool = False


_QUERY = {
    "size": (
        "What size is {the_a}?",
        "What is the size of {the_a}?",
        "How big is {the_a}?",
        "{The_a} is what size?",
        "{The_a} has what size?",
        "There is {an_a}; what size is it?",
        "There is {an_a}; how big is it?",
        "There is {an_a}; what is its size?",
    ),
    "color": (
        "What color is {the_a}?",
        "What is the color of {the_a}?",
        "{The_a} is what color?",
        "{The_a} has what color?",
        "There is {an_a}; what color is it?",
        "There is {an_a}; what is its color?",
    ),
    "material": (
        "What material is {the_a}?",
        "What is the material of {the_a}?",
        "What is {the_a} made of?",
        "{The_a} is made of what material?",
        "{The_a} has what material?",
        "There is {an_a}; what material is it made of?",
        "There is {an_a}; what is it made of?",
        "There is {an_a}; what is its material?",
    ),
    "shape": (
        "What shape is {the_a}?",
        "What is the shape of {the_a}?",
        "{The_a} is what shape?",
        "{The_a} has what shape?",
        "There is {an_a}; what shape is it?",
        "There is {an_a}; what is its shape?",
    ),
}
_COUNT = ("How many {a} are there?", "What number of {a} are there?")
_COUNT_LINKED = ("How many {are_a}?", "What number of {are_a}?")
_COUNT_IT = ("There is {an_o}; how many {own} are {it}?", "There is {an_o}; what number of {own} are {it}?")
_EXIST = ("Are there any {a}?", "Is there {an_a}?", "Are any {a} visible?")
_EXIST_LINKED = ("Are there any {a}?", "Is there {an_a}?")
_EXIST_IT = ("There is {an_o}; are there any {own} {it}?", "There is {an_o}; is there {an_own} {it}?")
_EITHER = (
    "How many {things} are either {a} or {b}?",
    "How many {things} are {a} or {b}?",
    "What number of {things} are either {a} or {b}?",
    "What number of {things} are {a} or {b}?",
)
_INTEGERS = {
    "equal_integer": (
        "Are there the same number of {a} and {b}?",
        "Are there an equal number of {a} and {b}?",
        "Is the number of {a} the same as the number of {b}?",
    ),
    "less_than": ("Are there fewer {a} than {b}?", "Is the number of {a} less than the number of {b}?"),
    "greater_than": ("Are there more {a} than {b}?", "Is the number of {a} greater than the number of {b}?"),
}
_EQUAL = {
    attribute: (
        f"Do {{the_a}} and {{the_b}} have the same {attribute}?",
        f"Does {{the_a}} have the same {attribute} as {{the_b}}?",
        f"Is the {attribute} of {{the_a}} the same as {{the_b}}?",
        f"There is {{an_a}}; does it have the same {attribute} as {{the_b}}?",
        f"There is {{an_a}}; is its {attribute} the same as {{the_b}}?",
        *more,
    )
    for attribute, more in {
        "size": ("Is {the_a} the same size as {the_b}?", "There is {an_a}; is it the same size as {the_b}?"),
        "color": ("Is {the_a} the same color as {the_b}?", "There is {an_a}; is it the same color as {the_b}?"),
        "material": (
            "Is {the_a} made of the same material as {the_b}?",
            "There is {an_a}; is it made of the same material as {the_b}?",
            "Are {the_a} and {the_b} made of the same material?",
        ),
        "shape": ("Is {the_a} the same shape as {the_b}?", "There is {an_a}; is it the same shape as {the_b}?"),
    }.items()
}
_SAME_EXIST: tuple[str, ...] = (
    "Are there any other {things} {same_many}?",
    "Is there any other {thing} {same}?",
    "Is there another {thing} {same}?",
    "Is there anything else {same}?",
)
_SAME_COUNT: tuple[str, ...] = (
    "How many other {things} are {as}?",
    "What number of other {things} are {as}?",
    "How many other {things} are there {same_many}?",
    "What number of other {things} are there {same_many}?",
)


def _families() -> list[Family]:
    families: list[Family] = []

    def add(group: str, head: str, links: tuple[Link, ...], sentences: tuple[str, ...], **rest) -> None:
        families.append(Family(len(families), group, head, links, sentences, **rest))

    for links in ((0, 0), (1, 0), (1, 1)):
        for head, sentences in _INTEGERS.items():
            add("compare_integer", head, links, sentences)
    for attribute in ATTRIBUTES:
        add("comparison", f"equal_{attribute}", (0, 0), _EQUAL[attribute], silent=(attribute,))
    for attribute in ATTRIBUTES:
        for links in ((1, 0), (0, 1), (1, 1)):
            add("comparison", f"equal_{attribute}", links, _EQUAL[attribute], silent=(attribute,))
    _add_hops(add, "three_hop", 3, ("size", "shape", "color", "material"))
    add("single_and", "count", ("and",), _COUNT_LINKED)
    for attribute in ATTRIBUTES:
        add("single_and", f"query_{attribute}", ("and",), _QUERY[attribute], silent=(attribute,))
    _add_same(add)
    for links, extra in (
        ((0, 0), None),
        ((0, 0), "size"),
        ((0, 0), "color"),
        ((1, 1), None),
        ((0, 0), "material"),
        ((0, 0), "shape"),
        ((1, 0), None),
        ((0, 1), None),
    ):
        add("single_or", "count", links, _EITHER, extra=extra)
    _add_hops(add, "one_hop", 1, ATTRIBUTES)
    _add_hops(add, "two_hop", 2, ATTRIBUTES)
    add("zero_hop", "count", (0,), _COUNT)
    add("zero_hop", "exist", (0,), _EXIST)
    for attribute in ("shape", "material", "color", "size"):
        add("zero_hop", f"query_{attribute}", (0,), _QUERY[attribute], silent=(attribute,))
    _add_closure(add)
    return families


def _add_hops(add, group: str, hops: int, attributes: tuple[str, ...]) -> None:
    add(group, "count", (hops,), _COUNT_LINKED + _COUNT_IT)
    add(group, "exist", (hops,), _EXIST_LINKED + _EXIST_IT)
    for attribute in attributes:
        add(group, f"query_{attribute}", (hops,), _QUERY[attribute], silent=(attribute,))


def _add_same(add) -> None:
    for head, sentences in (("exist", _SAME_EXIST), ("count", _SAME_COUNT)):
        for attribute in ATTRIBUTES:
            add("same_relate", head, (f"same_{attribute}",), sentences, bare=True)
    for head, sentences in (("exist", _EXIST_LINKED), ("count", _COUNT_LINKED)):
        for attribute in ATTRIBUTES:
            add("same_relate", head, (f"same_{attribute}",), sentences, silent=(attribute,))
    for attribute in ATTRIBUTES:
        for asked in ATTRIBUTES:
            if asked != attribute:
                link = (f"same_{attribute}",)
                add("same_relate", f"query_{asked}", link, _QUERY[asked], silent=(attribute, asked))


def _add_closure(add) -> None:
    """Add the families of CLOSURE: its templates for every attribute to match, and every other one to ask for."""
    for match in ATTRIBUTES:
        same, silent = f"same_{match}", (match,)
        for asked in ATTRIBUTES:
            if asked != match:
                both = (asked, match)
                statement = tuple(text for text in _EQUAL[asked] if text.startswith("There is"))
                add("and_mat_spa", f"query_{asked}", (("and", same),), _QUERY[asked], silent=both)
                add("compare_mat", f"equal_{asked}", (same, 0), statement, silent=both)
                add("compare_mat_spa", f"equal_{asked}", (same, 1), statement, silent=both)
        add("embed_mat_spa", "exist", ((1, same),), _EXIST_LINKED, silent=silent)
        add("embed_spa_mat", "exist", ((same, 1),), _EXIST_LINKED, silent=silent)
        add("or_mat", "count", (0, same), _EITHER, silent=silent)
        add("or_mat_spa", "count", (1, same), _EITHER, silent=silent)


FAMILIES = tuple(_families())
FAMILIES_OF = {
    "clevr": tuple(family for family in FAMILIES if family.group in GROUPS),
    "closure": tuple(family for family in FAMILIES if family.group in CLOSURE_GROUPS),
}
"""The families of each benchmark."""
