"""A program and a scene -> its answer: the meaning of CLEVR's functions, with sets of objects as bits of an integer.

Follows the catalogue of functions in Johnson et al. 2017 (CLEVR), supplement. Bit i of a set is object i of the scenes
file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from iep.errors import InputError
from iep.programs import ProgramCall, read_call
from iep.synth.phrases import bits, in_words
from iep.synth.world import ATTRIBUTES, RELATIONS, VALUES
from iep.vocab import answer_token


class IllPosedError(ValueError):
    """The program has no answer on this scene: `unique` got no object or several. The message names them in words."""


SET, OBJECT, ANSWER = "a set of objects", "one object", "an answer"
_KINDS = {
    **dict.fromkeys(("scene", "filter", "union", "intersect"), (SET, SET)),
    "unique": (SET, OBJECT),
    **dict.fromkeys(("relate", "same"), (OBJECT, SET)),
    **dict.fromkeys(("count", "exist"), (SET, ANSWER)),
    "query": (OBJECT, ANSWER),
    **dict.fromkeys(("equal", "less", "greater"), (ANSWER, ANSWER)),
}
"""The kinds of value that a function reads and returns, by the part of its name before the first underscore."""


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
        InputError: a call is malformed, as for `read_call`, reads a value of the wrong kind, or the last one returns no
            answer.
        KeyError: a function is unknown.
    """
    calls = _read(program)
    if (kind := _kinds(calls[-1])[1]) != ANSWER:
        raise InputError(f"the program returns {kind}, expected {ANSWER}")
    return answer_token(_results(calls, facts)[-1])


def trace(program: Sequence[dict], facts: Facts) -> list[str]:
    """Return what every call of a JSON program returns on a scene, in words, one line for each call.

    A line has the call's number, its function with its value, the numbers of the calls that it reads, and its result,
    such as `2: filter_color[red] of 1 = 2 objects: large red metal cube, small red rubber sphere`.

    Raises:
        IllPosedError: `unique` got no object or several.
        InputError: a call is malformed, as for `read_call`, or reads a value of the wrong kind.
        KeyError: a function is unknown.
    """
    lines, calls = [], _read(program)
    for number, (call, result) in enumerate(zip(calls, _results(calls, facts), strict=True), start=1):
        _, kind = _kinds(call)
        if kind == OBJECT:
            said = " ".join(facts.objects[result])
        elif kind == SET:
            named = ", ".join(" ".join(facts.objects[index]) for index in bits(result))
            said = "1 object" if result.bit_count() == 1 else f"{result.bit_count()} objects"
            if named:
                said += f": {named}"
        else:
            said = answer_token(result)
        read = f" of {', '.join(str(source + 1) for source in call.inputs)}" if call.inputs else ""
        lines.append(f"{number}: {call.token}{read} = {said}")
    return lines


def _read(program: Sequence[dict]) -> list[ProgramCall]:
    calls = [read_call(call, position) for position, call in enumerate(program)]
    for position, call in enumerate(calls):
        expected, _ = _kinds(call)
        for source in call.inputs:
            _, found = _kinds(calls[source])
            if found != expected:
                raise InputError(f"program call {position} ({call.token}) reads {found}, expected {expected}")
    return calls


def _kinds(call: ProgramCall) -> tuple[str, str]:
    return _KINDS[call.function.partition("_")[0]]


def _results(program: Sequence[ProgramCall], facts: Facts) -> list[Any]:
    results: list = []
    for call in program:
        inputs = [results[i] for i in call.inputs]
        if call.function == "unique" and (count := inputs[0].bit_count()) != 1:
            things = in_words(program, call.inputs[0], many=count > 1)
            several = f"{count} {things} were found where one is expected"
            raise IllPosedError(several if count else f"no {things} was found")
        results.append(_call(call.function, inputs, call.value or "", facts))
    return results


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
    "unique": lambda facts, objects: objects.bit_length() - 1,
    "union": lambda facts, left, right: left | right,
    "intersect": lambda facts, left, right: left & right,
    "count": lambda facts, objects: objects.bit_count(),
    "exist": lambda facts, objects: objects != 0,
    "less_than": lambda facts, left, right: left < right,
    "greater_than": lambda facts, left, right: left > right,
}
