"""A program and a scene -> its answer: the meaning of CLEVR's functions, with sets of objects as bits of an integer.

Follows the catalogue of functions in Johnson et al. 2017 (CLEVR), supplement. Bit i of a set is object i of the scenes
file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from iep.programs import ProgramCall, read_call
from iep.synth.world import ATTRIBUTES, RELATIONS, VALUES


class IllPosedError(ValueError):
    """The program has no answer on this scene: `unique` got no object or several."""


@dataclass(frozen=True)
class Facts:
    """The facts of a scene. Sets are integers with bit i for object i.

    `objects[i]` has the values of object i in the order of `ATTRIBUTES`; `having[attribute][value]` is the set of
    objects with that value; `related[relation][i]` the set in that relation to object i; `same[attribute][i]` the set
    of other objects with the same value.
    """

    objects: tuple[tuple[str, str, str, str], ...]
    everything: int
    having: dict[str, dict[str, int]]
    related: dict[str, tuple[int, ...]]
    same: dict[str, tuple[int, ...]]


def facts_of(scene: dict) -> Facts:
    """Return the facts in an entry of a CLEVR scenes file.

    Raises:
        KeyError: objects, relationships or an object's attribute are missing, or a value is unknown.
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
    """Return the answer of a JSON program on a scene as CLEVR spells it: `yes`, `no`, `0` to `10`, or a value.

    Raises:
        IllPosedError: `unique` got no object or several.
        InputError: a call is malformed, as for `read_call`.
        KeyError: a function is unknown.
    """
    return spelled(_results(_read(program), facts)[-1])


def trace(program: Sequence[dict], facts: Facts) -> list[str]:
    """Return what every call of a JSON program returns on a scene, in words, one line for each call.

    A line has the call's number, its function with its value, the numbers of the calls that it reads, and its result,
    such as `2: filter_color[red] of 1 = 2 objects: large red metal cube, small red rubber sphere`.

    Raises:
        IllPosedError: `unique` got no object or several.
        InputError: a call is malformed, as for `read_call`.
        KeyError: a function is unknown.
    """
    lines, calls = [], _read(program)
    for number, (call, result) in enumerate(zip(calls, _results(calls, facts), strict=True), start=1):
        kind = call.function.partition("_")[0]
        if kind == "unique":
            said = " ".join(facts.objects[result])
        elif kind in ("scene", "filter", "relate", "same", "union", "intersect"):
            named = [" ".join(each) for index, each in enumerate(facts.objects) if result >> index & 1]
            said = f"{len(named)} object{'s' * (len(named) != 1)}{': ' * bool(named)}{', '.join(named)}"
        else:
            said = spelled(result)
        read = " of " * bool(call.inputs) + ", ".join(str(each + 1) for each in call.inputs)
        lines.append(f"{number}: {call.token}{read} = {said}")
    return lines


def _read(program: Sequence[dict]) -> list[ProgramCall]:
    return [read_call(call, position) for position, call in enumerate(program)]


def _results(program: Sequence[ProgramCall], facts: Facts) -> list[Any]:
    results: list = []
    for call in program:
        results.append(_call(call.function, [results[i] for i in call.inputs], call.value or "", facts))
    return results


def only(objects: int) -> int:
    """Return the index of the one object in a set.

    Raises:
        IllPosedError: the set has no object or several.
    """
    if objects.bit_count() != 1:
        raise IllPosedError(f"unique of {objects.bit_count()} objects")
    return objects.bit_length() - 1


def _call(name: str, inputs: list, value: str, facts: Facts) -> int | bool | str:
    kind, _, attribute = name.partition("_")
    if kind == "filter":
        return inputs[0] & facts.having[attribute][value]
    if kind == "query":
        return facts.objects[inputs[0]][ATTRIBUTES.index(attribute)]
    if kind == "same":
        return facts.same[attribute][inputs[0]]
    if name == "relate":
        return facts.related[value][inputs[0]]
    if kind == "equal":
        return inputs[0] == inputs[1]
    return _PLAIN[name](facts, *inputs)


_PLAIN: dict[str, Callable[..., Any]] = {
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
    """Return an answer as CLEVR v1.0 spells it; the public question generator has true, false and integers."""
    if isinstance(result, bool):
        return "yes" if result else "no"
    return str(result)
