"""Everything that the bytes of a synthetic data set depend on, and the two presets."""

from dataclasses import dataclass, replace

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
    seed: int = 0


PRESETS = {
    "clevr": Options("clevr", 70_000, 15_000, 15_000, 10, 480, 320, SceneRules()),
    "mini": Options("mini", 10_000, 500, 0, 20, 192, 128, SceneRules(3, 6, spread=2.2, distance=0.8)),
}


def resolve(preset: str, scene: dict, **given: int | None) -> Options:
    """A preset's options with those that were given (not None) in their place; `scene` holds those of the rules."""
    base = PRESETS[preset]
    options = replace(base, **{name: value for name, value in given.items() if value is not None})
    rules = {name: value for name, value in scene.items() if value is not None}
    return replace(options, rules=replace(base.rules, aspect=options.width / options.height, **rules))
