"""Programs run on a scene: what CLEVR's functions mean, with sets of objects as the bits of an integer.

Follows the catalogue of functions in Johnson et al. 2017 (CLEVR), supplement. Bit i of a set stands for object i of
the scenes file. Neither draws scenes nor words questions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from iep.synth.world import ATTRIBUTES, RELATIONS, VALUES


class IllPosedError(ValueError):
    """The program has no answer on this scene: `unique` met none or several objects."""


@dataclass(frozen=True)
class Facts:
    """What is true of a scene. Sets are integers, bit i for object i.

    `objects[i]` holds object i's values in the order of `ATTRIBUTES`; `having[attribute][value]` the set of objects
    with the value; `related[relation][i]` the set that stands so to object i; `same[attribute][i]` the others like i.
    """

    objects: tuple[tuple[str, str, str, str], ...]
    everything: int
    having: dict[str, dict[str, int]]
    related: dict[str, tuple[int, ...]]
    same: dict[str, tuple[int, ...]]


def facts_of(scene: dict) -> Facts:
    """The facts in one entry of a CLEVR scenes file.

    Raises:
        KeyError: the entry lacks objects, relationships or an object's attribute, or has an unknown value.
    """
    objects = tuple(tuple(thing[attribute] for attribute in ATTRIBUTES) for thing in scene["objects"])
    having = {attribute: dict.fromkeys(VALUES[attribute], 0) for attribute in ATTRIBUTES}
    for index, values in enumerate(objects):
        for attribute, value in zip(ATTRIBUTES, values, strict=True):
            having[attribute][value] += 1 << index
    related = {
        relation: tuple(sum(1 << other for other in others) for others in scene["relationships"][relation])
        for relation in RELATIONS
    }
    same = {
        attribute: tuple(having[attribute][values[k]] & ~(1 << index) for index, values in enumerate(objects))
        for k, attribute in enumerate(ATTRIBUTES)
    }
    return Facts(objects, (1 << len(objects)) - 1, having, related, same)


def execute(program: Sequence[dict], facts: Facts) -> str:
    """The answer of a JSON program on a scene, as CLEVR spells it: `yes`, `no`, `0` to `10`, or a value.

    Accepts `type` for `function`, as the public question generator writes it.

    Raises:
        IllPosedError: `unique` met none or several objects.
        KeyError: a function is unknown.
    """
    results: list = []
    for call in program:
        name = call["function"] if "function" in call else call["type"]
        results.append(_call(name, [results[i] for i in call["inputs"]], call.get("value_inputs") or [], facts))
    return spelled(results[-1])


def only(objects: int) -> int:
    """The index of the one object of a set.

    Raises:
        IllPosedError: the set holds none or several.
    """
    if objects.bit_count() != 1:
        raise IllPosedError(f"unique of {objects.bit_count()} objects")
    return objects.bit_length() - 1


def _call(name: str, inputs: list, values: list[str], facts: Facts) -> int | bool | str:
    kind, _, attribute = name.partition("_")
    if kind == "filter":
        return inputs[0] & facts.having[attribute][values[0]]
    if kind == "query":
        return facts.objects[inputs[0]][ATTRIBUTES.index(attribute)]
    if kind == "same":
        return facts.same[attribute][inputs[0]]
    if name == "relate":
        return facts.related[values[0]][inputs[0]]
    if kind == "equal":
        return inputs[0] == inputs[1]
    return _PLAIN[name](facts, *inputs)


_PLAIN = {
    "scene": lambda facts: facts.everything,
    "unique": lambda facts, objects: only(objects),
    "union": lambda facts, left, right: left | right,
    "intersect": lambda facts, left, right: left & right,
    "count": lambda facts, objects: objects.bit_count(),
    "exist": lambda facts, objects: objects != 0,
    "less_than": lambda facts, left, right: left < right,
    "greater_than": lambda facts, left, right: left > right,
}


def spelled(result: int | bool | str) -> str:
    """An answer as CLEVR v1.0 spells it; the public question generator has true, false and integers."""
    if isinstance(result, bool):
        return "yes" if result else "no"
    return str(result)
