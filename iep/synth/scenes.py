"""A seed -> a random scene: objects on a plane, and the camera that sees them.

Follows the public description of CLEVR (Johnson et al. 2017, section 3.1 and supplement A): positions are uniform in a
square; objects keep a gap, and a margin along the direction of every relation, so that none is ambiguous; every object
has a minimum of visible pixels; the positions of camera and lamps are jittered. Drawing the picture is `renderer.py`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np

from iep.errors import InputError
from iep.synth.world import COLORS_OF_SHAPE, LAMPS, RADIUS, RELATIONS, VALUES, Lamp, Vector

FOCAL = 35 / 32  # focal length over the image's width: Blender's standard camera
CAMERA = (7.48, -6.51, 5.34)  # looks at the origin
CAMERA_JITTER = 0.5  # in every coordinate
LAMP_JITTER = 1.0
GAP = 0.25
MARGIN = 0.4
PLACE_TRIES = 50
PLACE_ROUNDS = 2000
SCENE_TRIES = 100
DIGITS = 6  # of every number in the scenes file


@dataclass(frozen=True)
class SceneRules:
    """Parameters of random scenes.

    `spread` is half the side of the square of positions; `min_visible` is a share of the image's pixels (CLEVR: 200 of
    480 x 320); `aspect` is the image's width over its height.
    """

    min_objects: int = 3
    max_objects: int = 10
    spread: float = 3.0
    min_visible: float = 200 / (480 * 320)
    aspect: float = 1.5
    cogent: str | None = None


@dataclass(frozen=True)
class Camera:
    """A pinhole camera: its position, and unit vectors to the right, up and forwards (into the picture)."""

    position: Vector
    right: Vector
    up: Vector
    forward: Vector

    def project(self, point: Vector, width: float, height: float) -> Vector:
        """Return the pixel column, pixel row and depth along the viewing direction of a point of the world."""
        offset = _minus(point, self.position)
        depth = dot(offset, self.forward)
        scale = FOCAL * width / depth
        return (
            width / 2 + scale * dot(offset, self.right),
            height / 2 - scale * dot(offset, self.up),
            depth,
        )

    def locate(self, column: float, row: float, width: float, height: float, z: float) -> Vector:
        """Return the point of the world at height `z` that `project` maps to a pixel below the horizon."""
        across, down = ((column - width / 2) / (FOCAL * width), (row - height / 2) / (FOCAL * width))
        ray = [f + across * r - down * u for f, r, u in zip(self.forward, self.right, self.up, strict=True)]
        distance = (z - self.position[2]) / ray[2]
        x, y, z = (p + distance * each for p, each in zip(self.position, ray, strict=True))
        return x, y, z


@dataclass(frozen=True)
class Thing:
    """One object. `center` is its middle; `rotation` is in degrees about the vertical axis."""

    size: str
    color: str
    material: str
    shape: str
    center: Vector
    rotation: float

    @property
    def extent(self) -> float:
        """Half the object's height: a sphere's or cylinder's radius, half a cube's side."""
        return RADIUS[self.size]


@dataclass(frozen=True)
class Scene:
    """A camera, the things in front of it, and the lamps that light them."""

    camera: Camera
    things: tuple[Thing, ...]
    lamps: tuple[Lamp, ...] = LAMPS


def dot(a: Sequence | np.ndarray, b: Sequence | np.ndarray) -> Any:
    """Return the dot product of two vectors of numbers or of arrays, written out so that its bits do not depend on the
    linear algebra library and its threads."""
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def sample_scene(rng: Random, rules: SceneRules, visible_share: Callable[[Scene, float], list[float]]) -> Scene:
    """Draw scenes until every thing lies in the picture and is visible enough, and return that scene.

    `visible_share` returns, for a scene and an aspect, each thing's share of the image's pixels.

    Raises:
        InputError: no such scene was found: there are too many objects, or the picture is too wide or too high.
    """
    count = rng.randint(rules.min_objects, rules.max_objects)
    for _ in range(SCENE_TRIES):
        camera = camera_at(_jittered(rng, CAMERA, CAMERA_JITTER))
        lamps = tuple(replace(lamp, position=_jittered(rng, lamp.position, LAMP_JITTER)) for lamp in LAMPS)
        scene = Scene(camera, _place_things(rng, rules, camera, count), lamps)
        if _in_picture(scene, rules.aspect) and min(visible_share(scene, rules.aspect)) >= rules.min_visible:
            return scene
    raise InputError(
        f"no picture of {rules.aspect:.2f}:1 found that shows {count} objects; use fewer objects or another image size"
    )


def camera_at(position: Vector) -> Camera:
    """Return a camera at a position that looks at the origin."""
    x, y, z = position
    length = math.sqrt(x * x + y * y + z * z)
    forward = (-x / length, -y / length, -z / length)
    flat = math.hypot(forward[0], forward[1])
    right = (forward[1] / flat, -forward[0] / flat, 0.0)
    return Camera(position, right, _cross(right, forward), forward)


def directions(camera: Camera) -> dict[str, Vector]:
    """Return CLEVR's six directions as seen by this camera, as unit vectors."""
    right = camera.right  # which is level
    behind = (-right[1], right[0], 0.0)
    return {
        "right": right,
        "behind": behind,
        "above": (0.0, 0.0, 1.0),
        "below": (0.0, 0.0, -1.0),
        "left": (-right[0], -right[1], 0.0),
        "front": (-behind[0], -behind[1], 0.0),
    }


def relationships(scene: Scene) -> dict[str, list[list[int]]]:
    """Return for each relation and each thing the indices of the things in that relation: `left[i]` are left of i."""
    towards = directions(scene.camera)
    centers = [thing.center for thing in scene.things]
    return {
        relation: [
            [j for j, other in enumerate(centers) if j != i and dot(_minus(other, center), towards[relation]) > 0]
            for i, center in enumerate(centers)
        ]
        for relation in RELATIONS
    }


def scene_json(scene: Scene, index: int, split: str, width: int, height: int) -> dict:
    """Return the scene as an entry of CLEVR's scenes file."""
    return {
        "image_index": index,
        "objects": [_thing_json(thing, scene.camera, width, height) for thing in scene.things],
        "relationships": relationships(scene),
        "image_filename": image_filename(split, index),
        "split": split,
        "directions": {name: _rounded(vector) for name, vector in directions(scene.camera).items()},
    }


def image_filename(split: str, index: int) -> str:
    """Return CLEVR's file name of an image."""
    return f"CLEVR_{split}_{index:06d}.png"


def _thing_json(thing: Thing, camera: Camera, width: int, height: int) -> dict:
    column, row, depth = camera.project(thing.center, width, height)
    return {
        "color": thing.color,
        "size": thing.size,
        "rotation": round(thing.rotation, DIGITS),
        "shape": thing.shape,
        "3d_coords": _rounded(thing.center),
        "material": thing.material,
        "pixel_coords": [round(column), round(row), round(depth, DIGITS)],
    }


def _jittered(rng: Random, position: Vector, jitter: float) -> Vector:
    x, y, z = position
    return x + rng.uniform(-jitter, jitter), y + rng.uniform(-jitter, jitter), z + rng.uniform(-jitter, jitter)


def _place_things(rng: Random, rules: SceneRules, camera: Camera, count: int) -> tuple[Thing, ...]:
    """Place `count` things on the square, starting over if one does not fit.

    Raises:
        InputError: they do not all fit.
    """
    towards = directions(camera)
    for _ in range(PLACE_ROUNDS):
        things: list[Thing] = []
        for _ in range(count):
            thing = _place_one(rng, rules, things, (towards["right"], towards["behind"]))
            if thing is None:
                break
            things.append(thing)
        if len(things) == count:
            return tuple(things)
    raise InputError(f"no room for {count} objects in a square of side {2 * rules.spread:g}; use fewer objects")


def _place_one(rng: Random, rules: SceneRules, things: list[Thing], axes: tuple[Vector, Vector]) -> Thing | None:
    """Return a thing that keeps gap and margin to the `things` before it, or None if it does not fit."""
    size = rng.choice(VALUES["size"])
    shape = rng.choice(VALUES["shape"])
    color = rng.choice(COLORS_OF_SHAPE[rules.cogent][shape])
    material = rng.choice(VALUES["material"])
    rotation = 360.0 * rng.random()
    for _ in range(PLACE_TRIES):
        x, y = rng.uniform(-rules.spread, rules.spread), rng.uniform(-rules.spread, rules.spread)
        thing = Thing(size, color, material, shape, (x, y, RADIUS[size]), rotation)
        if all(_clear_of(thing, other, axes) for other in things):
            return thing
    return None


def _clear_of(thing: Thing, other: Thing, axes: tuple[Vector, Vector]) -> bool:
    """Return whether two things are `GAP` apart and differ by `MARGIN` along both axes of the relations."""
    x, y = thing.center[0] - other.center[0], thing.center[1] - other.center[1]
    if math.hypot(x, y) < RADIUS[thing.size] + RADIUS[other.size] + GAP:
        return False
    return all(abs(x * axis[0] + y * axis[1]) >= MARGIN for axis in axes)


def _in_picture(scene: Scene, aspect: float) -> bool:
    """Return whether every thing's centre lies inside a picture of this width / height."""
    for thing in scene.things:
        column, row, _ = scene.camera.project(thing.center, aspect, 1)
        if not (0 < column < aspect and 0 < row < 1):
            return False
    return True


def _rounded(vector: Vector) -> list[float]:
    return [round(value, DIGITS) + 0.0 for value in vector]


def _minus(a: Vector, b: Vector) -> Vector:
    return (a[0] - b[0], a[1] - b[1], a[2] - b[2])


def _cross(a: Vector, b: Vector) -> Vector:
    return (a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0])
