"""Single examples in Python, and programs with the result of every call."""

import re

import numpy as np
import pytest

import iep.synth
from iep.errors import InputError
from iep.programs import prefix_to_json
from iep.synth.executor import execute, facts_of, trace

SCENE = {
    "objects": [
        {"size": "large", "color": "red", "material": "metal", "shape": "cube"},
        {"size": "small", "color": "red", "material": "rubber", "shape": "sphere"},
        {"size": "small", "color": "blue", "material": "rubber", "shape": "cube"},
    ],
    "relationships": {"left": [[], [0], [0, 1]], "right": [[1, 2], [2], []], "front": [[]] * 3, "behind": [[]] * 3},
}


def test_a_trace_says_what_every_call_returns():
    left = ["query_shape", "unique", "relate[right]", "unique", "filter_shape[sphere]", "scene"]
    right = ["query_shape", "unique", "filter_size[large]", "scene"]
    assert trace(prefix_to_json(["equal_shape", *left, *right]), facts_of(SCENE)) == [
        "1: scene = 3 objects: large red metal cube, small red rubber sphere, small blue rubber cube",
        "2: filter_shape[sphere] of 1 = 1 object: small red rubber sphere",
        "3: unique of 2 = small red rubber sphere",
        "4: relate[right] of 3 = 1 object: small blue rubber cube",
        "5: unique of 4 = small blue rubber cube",
        "6: query_shape of 5 = cube",
        "7: scene = 3 objects: large red metal cube, small red rubber sphere, small blue rubber cube",
        "8: filter_size[large] of 7 = 1 object: large red metal cube",
        "9: unique of 8 = large red metal cube",
        "10: query_shape of 9 = cube",
        "11: equal_shape of 6, 10 = yes",
    ]
    counted = trace(prefix_to_json(["count", "filter_color[green]", "scene"]), facts_of(SCENE))
    assert counted[1:] == ["2: filter_color[green] of 1 = 0 objects", "3: count of 2 = 0"]


def test_a_sample_is_a_whole_example_of_the_difficulty_asked_for():
    one = iep.synth.sample(3, objects=(4, 5), length=(8, 12), size=(60, 40))
    program = prefix_to_json(one.program.split())
    assert 8 <= len(program) <= 12
    assert 4 <= len(one.scene["objects"]) <= 5
    assert one.image.size == (60, 40)
    assert execute(program, facts_of(one.scene)) == one.answer
    assert len(one.trace) == len(program)
    assert one.trace[-1].endswith(f" = {one.answer}")
    again, other = (iep.synth.sample(seed, objects=(4, 5), length=(8, 12), size=(60, 40)) for seed in (3, 4))
    assert np.array_equal(again.image, one.image)
    assert again.question == one.question
    assert not np.array_equal(other.image, one.image)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"objects": (3, 11)}, "objects=(3, 11), expected a range within 1 to 10"),
        ({"objects": (5, 4)}, "expected a range"),
        ({"length": (3, 2)}, "length=(3, 2), expected the smallest"),
        ({"length": (90, 95)}, "no question of 90 to 95 functions"),
        ({"size": (60, 0)}, "size=(60, 0), expected a width"),
    ],
)
def test_arguments_without_examples_are_an_error(wrong: dict, message: str):
    with pytest.raises(InputError, match=re.escape(message)):
        iep.synth.sample(**{"seed": 0, "objects": (2, 2), "size": (60, 40)} | wrong)
