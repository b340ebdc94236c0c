"""One question about one generated image: an environment for training and testing models, without files."""

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

from PIL import Image

from iep.errors import InputError
from iep.programs import json_to_prefix
from iep.synth.executor import facts_of, trace
from iep.synth.question_generator import ask
from iep.synth.renderer import render, visible_share
from iep.synth.scenes import SceneRules, sample_scene, scene_json

MANY = 40
"""The number of questions of a scene among which one of the requested length is sought."""
SCENES = 100
"""The number of scenes that are tried."""


@dataclass(frozen=True)
class Example:
    """A question with everything that is known about it.

    Attributes:
        program: the tokens in prefix order, as `iep-ask` and `iep.load().ask(program=...)` read them.
        trace: a line for each call of the program with its result in words, in the order of execution.
        scene: the entry of CLEVR's scenes file, with objects and relationships.
    """

    image: Image.Image
    question: str
    answer: str
    program: str
    trace: list[str]
    scene: dict[str, Any]


def sample(
    seed: int,
    objects: tuple[int, int] = (3, 10),
    length: tuple[int, int] = (1, 40),
    size: tuple[int, int] = (480, 320),
) -> Example:
    """Return a generated question, which is the same for the same arguments.

    Difficulty grows with the number of objects and with the length of the program.

    Args:
        objects: the smallest and largest number of objects of the scene, from 1 to 10.
        length: the smallest and largest number of functions of the program, `scene` included.
        size: width and height of the image in pixels.

    Raises:
        InputError: a range is empty or out of bounds, or no question of that length was found.
    """
    (fewest, most), (shortest, longest), (width, height) = objects, length, size
    if not 1 <= fewest <= most <= 10:
        raise InputError(f"objects={objects}, expected a range within 1 to 10")
    if not 1 <= shortest <= longest >= 2:
        raise InputError(f"length={length}, expected the smallest and the largest number of functions, at least 2")
    if min(size) < 1:
        raise InputError(f"size={size}, expected a width and a height in pixels")
    rng = Random(f"{seed}/{fewest}-{most}/{shortest}-{longest}")
    rules = SceneRules(fewest, most, aspect=width / height)
    for _ in range(SCENES):
        scene = sample_scene(rng, rules, visible_share)
        entry = scene_json(scene, 0, "train", width, height)
        facts = facts_of(entry)
        for question in ask(facts, MANY, rng, tally=Counter()):
            if shortest <= len(question.program) <= longest:
                image = Image.fromarray(render(scene, width, height))
                program = " ".join(json_to_prefix([*question.program]))
                return Example(image, question.text, question.answer, program, trace(question.program, facts), entry)
    raise InputError(f"no question of {shortest} to {longest} functions about {fewest} to {most} objects was found")
