"""Everything that the bytes of a synthetic data set depend on, and the two presets."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from iep.synth.scenes import SceneRules

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Options:
    """Everything that the bytes of a data set depend on. `train`, `val` and `test` are numbers of images."""

    preset: str
    train: int
    val: int
    test: int
    questions_per_image: int
    width: int
    height: int
    rules: SceneRules
    families: str = "clevr"
    """The benchmark whose families of questions are asked, a key of `FAMILIES_OF`."""
    emphasis: Mapping[str, float] = field(default_factory=dict)
    """How many times more likely the families of a group are than others; see `question_generator.ask`."""
    seed: int = 0
    annotations: bool = False


PRESETS = {
    "clevr": Options("clevr", 70_000, 15_000, 15_000, 10, 480, 320, SceneRules()),
    # A world that a small network learns in minutes: few objects, small pictures, and more short questions.
    "mini": Options(
        "mini",
        train=10_000,
        val=500,
        test=0,
        questions_per_image=20,
        width=240,
        height=160,
        rules=SceneRules(2, 3),
        emphasis={"zero_hop": 8.0, "one_hop": 3.0, "same_relate": 2.0, "single_or": 2.0},
    ),
}


CLOSURE_EMPHASIS = dict.fromkeys(("embed_mat_spa", "embed_spa_mat", "or_mat", "or_mat_spa"), 3.0)
"""These groups of CLOSURE have a third of the families of the others."""


def resolve(preset: str, scene: dict, **given: Any) -> Options:
    """Return a preset's options, replaced by those that are given (not None); `scene` holds those of the rules."""
    base = PRESETS[preset]
    if given.get("families") == "closure":
        given["emphasis"] = CLOSURE_EMPHASIS
    options = replace(base, **{name: value for name, value in given.items() if value is not None})
    rules = {name: value for name, value in scene.items() if value is not None}
    return replace(options, rules=replace(base.rules, aspect=options.width / options.height, **rules))
