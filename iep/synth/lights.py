"""A lamp and points of a scene -> how much of its light arrives, and how much of it each thing hides.

A lamp is a disc that faces the origin, so its light falls with the angle and the squared distance. How much of the disc
is hidden from a point is judged by how near the line to its centre passes a thing: shadows have soft edges that widen
with the distance from the thing, without random rays. Lamps are above all things.

Points are given as x, y, z, which need only be of shapes that broadcast. Shape suffixes: P points.
"""

import math

import numpy as np

from iep.synth.rays import BEVEL, Grid, box_around
from iep.synth.scenes import Camera, Thing, dot
from iep.synth.world import Lamp

TINY = np.float32(1e-9)
SHARPEST = 0.03  # half the width of a shadow's edge where the thing touches the point


def irradiance(lamp: Lamp, x: Grid, y: Grid, z: Grid | np.float32, normal: Grid | None = None) -> Grid:
    """Return the unhidden light from a lamp of strength 1 at points with these normals (None: straight up)."""
    to_x, to_y, to_z = (np.float32(at_lamp) - at for at_lamp, at in zip(lamp.position, (x, y, z), strict=True))
    square = to_x * to_x + to_y * to_y + to_z * to_z
    facing = to_z if normal is None else np.maximum(dot(normal, (to_x, to_y, to_z)), 0)
    away = math.hypot(*lamp.position)
    axis = [np.float32(value / away) for value in lamp.position]
    return facing * np.maximum(dot(axis, (to_x, to_y, to_z)), 0) / (square * square)


def shadow(thing: Thing, lamp: Lamp, x: Grid, y: Grid, z: Grid | np.float32) -> Grid:
    """Return the share of the lamp, 0 to 1, that a thing hides from points outside the thing."""
    bevel = np.float32(thing.extent * BEVEL[thing.shape])
    core = np.float32(thing.extent) - bevel
    x, y, z = x - np.float32(thing.center[0]), y - np.float32(thing.center[1]), z - np.float32(thing.center[2])
    position = [np.float32(lamp.position[k] - thing.center[k]) for k in range(3)]
    to_x, to_y, to_z = position[0] - x, position[1] - y, position[2] - z
    if thing.shape == "sphere":
        square = to_x * to_x + to_y * to_y + to_z * to_z
        way = np.clip(-(x * to_x + y * to_y + z * to_z) / square, 0, 1)
        gap = np.sqrt((x + way * to_x) ** 2 + (y + way * to_y) ** 2 + (z + way * to_z) ** 2)
    else:
        # The part of the way to the lamp, as shares of it, that lies between the heights of the thing's core.
        low, high = np.maximum((-core - z) / to_z, 0), np.maximum((core - z) / to_z, 0)
        if thing.shape == "cylinder":
            way = np.clip(-(x * to_x + y * to_y) / (to_x * to_x + to_y * to_y), low, high)
            gap = np.sqrt((x + way * to_x) ** 2 + (y + way * to_y) ** 2) - core
        else:
            cos, sin = np.float32(np.cos(np.radians(thing.rotation))), np.float32(np.sin(np.radians(thing.rotation)))
            x, y = cos * x + sin * y, cos * y - sin * x
            to_x, to_y = cos * to_x + sin * to_y, cos * to_y - sin * to_x
            # max(|x|, |y|) is convex along the way, so it is smallest where the way crosses a diagonal.
            first, second = (y - x) / (to_x - to_y + TINY), -(x + y) / (to_x + to_y + TINY)
            ways = [np.clip(way, low, high) for way in (first, second)]
            gaps = [np.maximum(np.abs(x + way * to_x), np.abs(y + way * to_y)) - core for way in ways]
            way, gap = np.where(gaps[0] < gaps[1], *ways), np.minimum(*gaps)
        gap = np.maximum(gap, np.abs(z + way * to_z) - core)
    soft = np.float32(lamp.radius) * way + np.float32(SHARPEST)
    hidden = np.clip((soft - gap + bevel) / (2 * soft), 0, 1)
    return hidden * hidden * (3 - 2 * hidden)


def shadow_box(thing: Thing, lamp: Lamp, camera: Camera, width: int, height: int) -> tuple[slice, slice] | None:
    """Return the rows and columns of the picture that contain the thing's shadow on the ground, None if it has none."""
    top = thing.center[2] + thing.extent
    grown = lamp.position[2] / (lamp.position[2] - top)  # of the shadow of the thing's top
    corners = []
    for scale, blur in ((1.0, 0.0), (grown, lamp.radius * (grown - 1))):
        reach = scale * thing.extent * (2**0.5 if thing.shape == "cube" else 1) + blur + 2 * SHARPEST
        x, y = (lamp.position[k] + scale * (thing.center[k] - lamp.position[k]) for k in range(2))
        corners += [(x + a * reach, y + b * reach, 0.0) for a in (-1, 1) for b in (-1, 1)]
    return box_around(corners, camera, width, height)


def may_shadow(thing: Thing, lamp: Lamp, other: Thing) -> bool:
    """Return whether the shadow of a thing may fall on another: it is near the line from that to the lamp."""
    to_lamp = [at_lamp - at for at_lamp, at in zip(lamp.position, other.center, strict=True)]
    offset = [at_thing - at for at_thing, at in zip(thing.center, other.center, strict=True)]
    way = dot(offset, to_lamp) / dot(to_lamp, to_lamp)
    apart = math.dist(offset, [way * value for value in to_lamp])
    return way > 0 and apart < 1.75 * (thing.extent + other.extent) + lamp.radius * way
