"""Scenes keep CLEVR's rules, and the ray caster shows what the scene says."""

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from iep.errors import InputError
from iep.synth.lights import shadow
from iep.synth.rays import frame_of, intersect
from iep.synth.renderer import render, visible_share
from iep.synth.scenes import (
    CAMERA,
    GAP,
    MARGIN,
    Scene,
    SceneRules,
    Thing,
    camera_at,
    directions,
    relationships,
    sample_scene,
    scene_json,
)
from iep.synth.world import COLORS_OF_SHAPE, LAMPS, RADIUS, RELATIONS

WIDTH, HEIGHT = 240, 160
STANDARD = camera_at(CAMERA)


def sampled(count: int, **rules: object) -> list[Scene]:
    return [sample_scene(Random(seed), SceneRules(**rules), visible_share) for seed in range(count)]


def thing(x: float, y: float, **given: str) -> Thing:
    values = {"size": "large", "color": "red", "material": "rubber", "shape": "sphere", **given}
    return Thing(**values, center=(x, y, RADIUS[values["size"]]), rotation=20.0)


def picture(*things: Thing) -> np.ndarray:
    return render(Scene(STANDARD, things), WIDTH, HEIGHT).astype(int)


def pixel_of(what: Thing) -> tuple[int, int]:
    column, row, _ = STANDARD.project(what.center, WIDTH, HEIGHT)
    return round(row), round(column)


def test_things_keep_gap_and_margin_so_that_no_relation_is_ambiguous() -> None:
    for scene in sampled(30):
        towards = directions(scene.camera)
        for i, one in enumerate(scene.things):
            for other in scene.things[:i]:
                x, y = one.center[0] - other.center[0], one.center[1] - other.center[1]
                assert math.hypot(x, y) >= one.extent + other.extent + GAP
                for relation in RELATIONS:
                    assert abs(x * towards[relation][0] + y * towards[relation][1]) >= MARGIN - 1e-9


@pytest.mark.parametrize(
    ("places", "relation", "axis"), [(((-2, 2), (2, -2)), "behind", 0), (((-2, -2), (2, 2)), "left", 1)]
)
def test_relationships_are_the_order_of_the_picture(places: tuple, relation: str, axis: int) -> None:
    first, second = (thing(*place) for place in places)
    assert relationships(Scene(STANDARD, (first, second)))[relation] == [[], [0]]
    assert pixel_of(first)[axis] < pixel_of(second)[axis]


def test_every_thing_shows_enough_pixels_and_lies_inside_the_picture() -> None:
    for scene in sampled(20):
        entry = scene_json(scene, 0, "train", 480, 320)
        for share, what in zip(visible_share(scene, 1.5), entry["objects"], strict=True):
            assert share * 480 * 320 >= 200
            assert 0 < what["pixel_coords"][0] < 480
            assert 0 < what["pixel_coords"][1] < 320


@pytest.mark.parametrize("condition", ["A", "B"])
def test_scenes_follow_the_rules_for_the_number_of_things_and_cogents_for_colours(condition: str) -> None:
    scenes = sampled(120, cogent=condition)
    seen = {(what.shape, what.color) for scene in scenes for what in scene.things}
    allowed = COLORS_OF_SHAPE[condition]
    assert seen == {(shape, color) for shape, colors in allowed.items() for color in colors}
    assert {len(scene.things) for scene in scenes} == set(range(3, 11))
    assert {len(scene.things) for scene in sampled(20, min_objects=4, max_objects=5)} == {4, 5}


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ({"spread": 1.0}, "no room for 10 objects in a square of side 2"),
        ({"aspect": 9.0}, r"picture of 9\.00:1 .* 10 objects"),
    ],
)
def test_more_things_than_there_is_room_for_are_an_input_error(rules: dict[str, float], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        sample_scene(Random(0), SceneRules(10, 10, **rules), visible_share)


def test_a_thing_in_front_hides_one_behind() -> None:
    away = STANDARD.forward
    back, front = thing(0, 0, size="small", color="blue"), thing(-away[0] * 2.5, -away[1] * 2.5)
    alone = visible_share(Scene(STANDARD, (back,)), 1.5)[0]
    for order in ((back, front), (front, back)):
        scene = Scene(STANDARD, order)
        assert visible_share(scene, 1.5)[order.index(back)] <= alone / 2
    assert picture(back)[pixel_of(back)].argmax() == 2
    assert picture(back, front)[pixel_of(front)].argmax() == 0


@pytest.mark.parametrize("shape", ["cube", "sphere", "cylinder"])
def test_a_shadow_has_the_outline_that_rays_to_the_lamp_find(shape: str) -> None:
    rng = np.random.default_rng(0)
    lamp = replace(LAMPS[1], radius=0.0)
    what = thing(0.3, -0.4, shape=shape)
    x, y = rng.uniform(-3, 5, (2, 2000))
    beside = np.hypot(x - 0.3, y + 0.4) > 1.0
    x, y = x[beside], y[beside]
    point = np.stack([x, y, np.zeros_like(x)])
    from_point, to_lamp = point - np.array(what.center)[:, None], np.array(lamp.position)[:, None] - point
    frame = frame_of(what)
    hit = intersect(what, frame @ from_point, frame @ to_lamp) < 1
    hidden = shadow(what, lamp, *point)
    sure = (hidden == 0) | (hidden == 1)
    assert sure.mean() > 0.9
    assert ((hidden == 1) == hit)[sure].mean() > 0.98  # edges are round


def test_pixel_coords_and_sizes_are_those_of_the_picture() -> None:
    for shape in ("cube", "sphere", "cylinder"):
        what = thing(1.0, -0.5, shape=shape, color="blue")
        rows, columns = np.nonzero(picture(what)[:, :, 2] - picture(what)[:, :, 0] > 60)
        row, column = pixel_of(what)
        assert abs((rows.min() + rows.max()) / 2 - row) < 4
        assert abs((columns.min() + columns.max()) / 2 - column) < 4
        depth = STANDARD.project(what.center, WIDTH, HEIGHT)[2]
        across = 2 * RADIUS["large"] * 35 / 32 * WIDTH / depth
        assert 0.8 * across < columns.max() - columns.min() < 1.3 * across
