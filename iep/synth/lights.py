"""The lamps, the ground that they light, and the shadows that things throw on it and on each other.

Lamps are far away, so a thing's shadow on the ground is a flat shape with a known distance function: an ellipse, a
capsule or a hexagon. That gives soft shadows without shadow rays. A point of another thing is moved along the light
onto the ground and looked up there. Shape suffixes: H W rows and columns of a box, P points.
"""

from dataclasses import dataclass

import numpy as np

from iep.synth.rays import Grid, box_around, plane, slopes
from iep.synth.scenes import Camera, Scene, Thing


@dataclass(frozen=True)
class Light:
    """A far light: direction towards it (before the scene's turn), strength, and half the width of a shadow's edge."""

    towards: tuple[float, float, float]
    strength: float
    softness: float
    shadows: bool


LIGHTS = (
    Light((-0.13, -0.68, 1.0), 0.55, 0.10, True),
    Light((0.97, 0.35, 0.9), 0.22, 0.22, True),
    Light((-0.73, 0.37, 0.8), 0.12, 0.0, False),
)


def turned(towards: tuple[float, float, float], turn: float) -> Grid:
    """(3,) unit vector: a direction, turned about the vertical axis by an angle in radians."""
    x, y, z = towards
    vector = np.array([x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn), z])
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def ground(scene: Scene, lights: list[tuple[Light, Grid]], width: int, height: int) -> Grid:
    """(H, W) brightness of the shadowed ground for every pixel, 0 to 1. `lights` come with their turned directions."""
    camera = scene.camera
    u_W, v_H = slopes(width, height)
    depth_H1 = (-camera.position[2] / (camera.forward[2] + v_H * camera.up[2]))[:, None].astype(np.float32)
    x_HW = np.float32(camera.position[0]) + depth_H1 * plane(
        camera.forward[0], camera.right[0] * u_W, camera.up[0] * v_H
    )
    y_HW = np.float32(camera.position[1]) + depth_H1 * plane(
        camera.forward[1], camera.right[1] * u_W, camera.up[1] * v_H
    )
    far_HW = (x_HW - 2) ** 2 + (y_HW + 2) ** 2
    light_HW = np.float32(0.30) + np.float32(0.33) / (1 + far_HW * np.float32(1 / 60))
    shade_HW = np.ones_like(light_HW)
    for light, towards in lights:
        if not light.shadows:
            continue
        share = np.float32(1.1 * light.strength * towards[2])
        for thing in scene.things:
            box = _shadow_box(thing, towards, light.softness, camera, width, height)
            if box is not None:
                dark = shadow(thing, towards, light.softness, x_HW[box], y_HW[box])
                shade_HW[box] *= 1 - share * dark
    return light_HW * shade_HW


def _shadow_box(
    thing: Thing, towards: Grid, softness: float, camera: Camera, width: int, height: int
) -> tuple[slice, slice] | None:
    """Rows and columns of the picture that hold the thing's shadow on the ground."""
    reach = thing.extent * (1.45 if thing.shape == "cube" else 1.05) + softness
    shift = -2 * thing.extent / float(towards[2])
    far = (shift * float(towards[0]), shift * float(towards[1]))
    xs = [thing.center[0] + min(0, far[0]) - reach, thing.center[0] + max(0, far[0]) + reach]
    ys = [thing.center[1] + min(0, far[1]) - reach, thing.center[1] + max(0, far[1]) + reach]
    return box_around([(x, y, 0.0) for x in xs for y in ys], camera, width, height)


def shadow(thing: Thing, towards: Grid, softness: float, x: Grid, y: Grid) -> Grid:
    """How dark the thing's shadow is at points of the ground: 0 outside, 1 inside, smooth between."""
    half = np.float32(thing.extent)
    slant_x, slant_y = -towards[0] / towards[2], -towards[1] / towards[2]  # of the shadow, per unit of height
    x = x - (np.float32(thing.center[0]) + half * slant_x)
    y = y - (np.float32(thing.center[1]) + half * slant_y)
    length = np.hypot(slant_x, slant_y)
    along = (x * slant_x + y * slant_y) / length
    across = (y * slant_x - x * slant_y) / length
    if thing.shape == "sphere":
        along *= towards[2]
        distance = np.sqrt(along * along + across * across) - half
    elif thing.shape == "cylinder":
        along = np.maximum(np.abs(along) - half * length, 0)
        distance = np.sqrt(along * along + across * across) - half
    else:
        distance = _swept_square(thing, (slant_x, slant_y), x, y, np.abs(across))
    soft = np.float32(softness)
    inside = np.clip((soft - distance) / (2 * soft), 0, 1)
    return inside * inside * (3 - 2 * inside)


def _swept_square(thing: Thing, slant: tuple[Grid, Grid], x: Grid, y: Grid, across: Grid) -> Grid:
    """Distance to the hexagon that a cube's shadow is: its square base, pushed along the shadow."""
    half, turn = np.float32(thing.extent), np.float32(np.radians(thing.rotation))
    cos, sin = np.cos(turn), np.sin(turn)
    length = np.hypot(*slant)
    width = half * (np.abs(cos * slant[1] - sin * slant[0]) + np.abs(sin * slant[1] + cos * slant[0])) / length
    first = np.abs(x * cos + y * sin) - half * (1 + np.abs(slant[0] * cos + slant[1] * sin))
    second = np.abs(y * cos - x * sin) - half * (1 + np.abs(slant[1] * cos - slant[0] * sin))
    return np.maximum(np.maximum(first, second), across - width)


def shadow_on(index: int, scene: Scene, light: Light, towards: Grid, local_3P: Grid) -> Grid | np.float32:
    """How dark the shadows of the other things are at points of one thing."""
    thing = scene.things[index]
    dark = np.float32(0)
    x_P = y_P = None
    for other_index, other in enumerate(scene.things):
        if other_index == index or not _may_shadow(other, thing, towards, light.softness):
            continue
        if x_P is None:
            height_P = (local_3P[2] + np.float32(thing.center[2])) / towards[2]
            x_P = local_3P[0] + np.float32(thing.center[0]) - height_P * towards[0]
            y_P = local_3P[1] + np.float32(thing.center[1]) - height_P * towards[1]
        dark = np.maximum(dark, shadow(other, towards, light.softness, x_P, y_P))
    return dark


def _may_shadow(other: Thing, thing: Thing, towards: Grid, softness: float) -> bool:
    """Whether `other` stands towards the light from `thing`, near enough to the line for its shadow to fall there."""
    x, y, z = (other.center[k] - thing.center[k] for k in range(3))
    along = x * float(towards[0]) + y * float(towards[1]) + z * float(towards[2])
    if along <= 0:
        return False
    apart = (x * x + y * y + z * z - along * along) ** 0.5
    return apart < 1.75 * (thing.extent + other.extent) + softness
