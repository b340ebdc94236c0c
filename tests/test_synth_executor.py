"""The symbolic executor beside a slow twin that knows only coordinates and Python sets."""

import os
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from iep.runtime.reading import read_json
from iep.synth.executor import IllPosedError, execute, facts_of
from iep.synth.presets import PRESETS
from iep.synth.synthesize import make_image


def naive_answer(program: list[dict], scene: dict) -> object:
    """The last result of a program, from coordinates and Python sets; None where `unique` fails."""
    objects = scene["objects"]

    def run(position: int) -> object:
        call = program[position]
        name, values = call["function"], call["value_inputs"]
        inputs = [run(i) for i in call["inputs"]]
        if any(value is None for value in inputs):
            return None
        if name == "scene":
            return set(range(len(objects)))
        if name == "unique":
            return next(iter(inputs[0])) if len(inputs[0]) == 1 else None
        if name == "relate":
            towards = scene["directions"][values[0]]
            here = objects[inputs[0]]["3d_coords"]
            return {
                i
                for i, thing in enumerate(objects)
                if i != inputs[0]
                and sum((a - b) * d for a, b, d in zip(thing["3d_coords"], here, towards, strict=True)) > 0
            }
        if name.startswith("filter_"):
            return {i for i in inputs[0] if objects[i][name[7:]] == values[0]}
        if name.startswith("query_"):
            return objects[inputs[0]][name[6:]]
        if name.startswith("same_"):
            mine = objects[inputs[0]][name[5:]]
            return {i for i, thing in enumerate(objects) if i != inputs[0] and thing[name[5:]] == mine}
        if name.startswith("equal_"):
            return inputs[0] == inputs[1]
        return {
            "union": lambda a, b: a | b,
            "intersect": lambda a, b: a & b,
            "count": len,
            "exist": lambda a: len(a) > 0,
            "less_than": lambda a, b: a < b,
            "greater_than": lambda a, b: a > b,
        }[name](*inputs)

    return run(len(program) - 1)


def spelled(result: object) -> str:
    return {True: "yes", False: "no"}[result] if isinstance(result, bool) else str(result)


def test_executor_agrees_with_a_naive_one_on_its_questions_and_on_changed_ones() -> None:
    rng, balance, ill_posed, agreed = Random(5), Counter(), 0, 0
    for index in range(40):
        _, scene, questions = make_image(PRESETS["clevr"], "val", index, balance)
        facts = facts_of(scene)
        for question in questions:
            program = [dict(call) for call in question.program]
            assert spelled(naive_answer(program, scene)) == question.answer
            # Another relation often leaves `unique` with no object or several: both must notice.
            for call in program:
                if call["function"] == "relate":
                    call["value_inputs"] = [rng.choice(["left", "right", "behind", "front"])]
                if call["function"] == "filter_size":
                    call["value_inputs"] = [rng.choice(["small", "large"])]
            expected = naive_answer(program, scene)
            if expected is None:
                ill_posed += 1
                with pytest.raises(IllPosedError, match=r"unique of \d+ objects"):
                    execute(program, facts)
            else:
                agreed += 1
                assert execute(program, facts) == spelled(expected)
                # The public generator writes `type` for `function`.
                assert execute([{"type": call.pop("function"), **call} for call in program], facts) == spelled(expected)
    assert ill_posed > 50
    assert agreed > 50


@pytest.mark.skipif("IEP_CLEVR_DIR" not in os.environ, reason="IEP_CLEVR_DIR names no CLEVR directory")
@pytest.mark.parametrize("split", ["train", "val"])
def test_every_answer_of_genuine_clevr_is_reproduced(split: str) -> None:
    root = Path(os.environ["IEP_CLEVR_DIR"])
    scenes = read_json(root / f"scenes/CLEVR_{split}_scenes.json")["scenes"]
    facts = {scene["image_index"]: facts_of(scene) for scene in scenes}
    questions = read_json(root / f"questions/CLEVR_{split}_questions.json")["questions"]
    wrong = [
        q["question_index"] for q in questions if execute(q["program"], facts[q["image_index"]]) != spelled(q["answer"])
    ]
    assert wrong == []
