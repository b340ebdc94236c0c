"""A scene -> an RGB picture, or each thing's share of visible pixels, by a small ray caster in numpy.

Casts one ray through each of 2 x 2 points of every pixel near a thing and averages them; the ground is shaded once per
pixel. Intersecting rays is `rays.py`; light and shadow, rubber and metal are here.

Lamps are far away, so a thing's shadow on the ground is a flat shape with a known distance function: an ellipse, a
capsule or a hexagon. This gives soft shadows without shadow rays. A point of another thing is projected along the light
onto the ground and looked up there. Rubber is matte; metal mirrors lamps and an artificial environment, but not the
other things. Edges of cubes and cylinders look rounded because their normals are bent.

Shape suffixes: H W rows and columns of a picture or of a box in it, P points.
"""

from dataclasses import dataclass

import numpy as np

from iep.synth.rays import Grid, Hits, box_around, frame_of, nearest_hits, plane, slopes
from iep.synth.scenes import Camera, Scene, Thing
from iep.synth.world import RGB

SUPERSAMPLING = 2
COARSE_WIDTH = 120  # columns of the picture on which visibility is judged, whatever the image's size
BEVEL = 5  # normals are blended by the 2 ** BEVEL-th power of the distance from the middle; metal's by one less
HAZE = 0.14  # share of light grey in the colour of rubber
AMBIENT = 0.30


@dataclass(frozen=True)
class Light:
    """A distant light: direction towards it (before the scene's turn), strength, half the width of a shadow's edge."""

    towards: tuple[float, float, float]
    strength: float
    softness: float
    shadows: bool


LIGHTS = (
    Light((-0.13, -0.68, 1.0), 0.55, 0.10, True),
    Light((0.97, 0.35, 0.9), 0.22, 0.22, True),
    Light((-0.73, 0.37, 0.8), 0.12, 0.0, False),
)


def render(scene: Scene, width: int, height: int) -> np.ndarray:
    """Return the picture of a scene, (height, width, 3) uint8."""
    lights = [(light, turned(light.towards, scene.light_turn)) for light in LIGHTS]
    hits = nearest_hits(scene, width, height, SUPERSAMPLING)
    image_HW = ground(scene, lights, width, height)
    image_3HW = image_HW * np.array([1.0, 0.992, 0.98], np.float32)[:, None, None]
    for index in range(len(scene.things)):
        _paint(image_3HW, index, scene, lights, hits)
    return np.clip(image_3HW * 255 + 0.5, 0, 255).astype(np.uint8).transpose(1, 2, 0)


def visible_share(scene: Scene, aspect: float) -> list[float]:
    """Return each thing's share of the pixels of a coarse picture (width / height = `aspect`), 0 if it is hidden."""
    width, height = COARSE_WIDTH, max(round(COARSE_WIDTH / aspect), 1)
    hits = nearest_hits(scene, width, height, 1)
    counts = np.bincount(hits.thing_HW.ravel() + 1, minlength=len(scene.things) + 1)
    return [count / (width * height) for count in counts[1:].tolist()]


def _paint(image_3HW: Grid, index: int, scene: Scene, lights: list[tuple[Light, Grid]], hits: Hits) -> None:
    """Paint the visible samples of one thing over the ground, averaged per pixel."""
    box = hits.boxes[index]
    if box is None:
        return
    rows_P, columns_P = np.nonzero(hits.thing_HW[box] == index)
    if len(rows_P) == 0:
        return
    depth_P = hits.depth_HW[box][rows_P, columns_P]
    color_3P = shade(index, scene, lights, hits.u_W[box[1]][columns_P], hits.v_H[box[0]][rows_P], depth_P)
    height = (box[0].stop - box[0].start) // SUPERSAMPLING
    width = (box[1].stop - box[1].start) // SUPERSAMPLING
    pixel_P = (rows_P // SUPERSAMPLING) * width + columns_P // SUPERSAMPLING
    share = np.float32(1 / SUPERSAMPLING**2)
    cover_HW = np.bincount(pixel_P, minlength=height * width).reshape(height, width).astype(np.float32) * share
    target = tuple(slice(part.start // SUPERSAMPLING, part.stop // SUPERSAMPLING) for part in box)
    ground_3HW = image_3HW[(slice(None), *target)]
    for channel in range(3):
        sum_HW = np.bincount(pixel_P, color_3P[channel], height * width).reshape(height, width).astype(np.float32)
        ground_3HW[channel] += sum_HW * share - cover_HW * ground_3HW[channel]


def turned(towards: tuple[float, float, float], turn: float) -> Grid:
    """Return the (3,) unit vector of a direction that is turned about the vertical axis by an angle in radians."""
    x, y, z = towards
    vector = np.array([x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn), z])
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def ground(scene: Scene, lights: list[tuple[Light, Grid]], width: int, height: int) -> Grid:
    """Return the (H, W) brightness of the ground with shadows, 0 to 1; `lights` come with their turned directions."""
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
    """Return the rows and columns of the picture that contain the thing's shadow on the ground."""
    reach = thing.extent * (1.45 if thing.shape == "cube" else 1.05) + softness
    shift = -2 * thing.extent / float(towards[2])
    far = (shift * float(towards[0]), shift * float(towards[1]))
    xs = [thing.center[0] + min(0, far[0]) - reach, thing.center[0] + max(0, far[0]) + reach]
    ys = [thing.center[1] + min(0, far[1]) - reach, thing.center[1] + max(0, far[1]) + reach]
    return box_around([(x, y, 0.0) for x in xs for y in ys], camera, width, height)


def shadow(thing: Thing, towards: Grid, softness: float, x: Grid, y: Grid) -> Grid:
    """Return how dark the thing's shadow is at points of the ground: 0 outside, 1 inside, smooth between."""
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
    """Return the distance to a cube's shadow, a hexagon: its square base, swept along the shadow."""
    half, turn = np.float32(thing.extent), np.float32(np.radians(thing.rotation))
    cos, sin = np.cos(turn), np.sin(turn)
    length = np.hypot(*slant)
    width = half * (np.abs(cos * slant[1] - sin * slant[0]) + np.abs(sin * slant[1] + cos * slant[0])) / length
    first = np.abs(x * cos + y * sin) - half * (1 + np.abs(slant[0] * cos + slant[1] * sin))
    second = np.abs(y * cos - x * sin) - half * (1 + np.abs(slant[1] * cos - slant[0] * sin))
    return np.maximum(np.maximum(first, second), across - width)


def shadow_on(index: int, scene: Scene, light: Light, towards: Grid, local_3P: Grid) -> Grid | np.float32:
    """Return how dark the shadows of the other things are at points of one thing."""
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
    """Return whether the shadow of `other` may fall on `thing`: it is towards the light, and near that line."""
    x, y, z = (other.center[k] - thing.center[k] for k in range(3))
    along = x * float(towards[0]) + y * float(towards[1]) + z * float(towards[2])
    if along <= 0:
        return False
    apart = (x * x + y * y + z * z - along * along) ** 0.5
    return apart < 1.75 * (thing.extent + other.extent) + softness


def shade(index: int, scene: Scene, lights: list[tuple[Light, Grid]], u_P: Grid, v_P: Grid, depth_P: Grid) -> Grid:
    """Return the (3, P) colours of points of one thing, 0 to 1, and above for highlights."""
    thing, camera = scene.things[index], scene.camera
    forward, right, up = (np.array(axis, np.float32)[:, None] for axis in (camera.forward, camera.right, camera.up))
    ray_3P = forward + right * u_P + up * v_P
    offset = np.array(camera.position, np.float32) - np.array(thing.center, np.float32)
    local_3P = offset[:, None] + depth_P * ray_3P  # from the thing's middle
    normal_3P = _normals(thing, local_3P)
    ray_3P /= np.sqrt(_dot(ray_3P, ray_3P))
    facing_P = -_dot(ray_3P, normal_3P)
    mirror_3P = ray_3P + 2 * facing_P * normal_3P
    shiny = thing.material == "metal"
    diffuse_P = np.full(len(depth_P), np.float32(AMBIENT))
    diffuse_P += np.float32(0.10) * normal_3P[2]
    gloss_P = np.zeros_like(diffuse_P)
    for light, towards in lights:
        lit_P = np.maximum(_dot(towards, normal_3P), 0)
        if light.shadows:
            lit_P *= 1 - shadow_on(index, scene, light, towards, local_3P)
        diffuse_P += np.float32(light.strength * 1.25) * lit_P
        towards_mirror_P = np.maximum(_dot(towards, mirror_3P), 0)
        gloss_P += light.strength * (_lamp(towards_mirror_P) if shiny else np.float32(0.1) * towards_mirror_P**8)
    color_31 = np.array(RGB[thing.color], np.float32)[:, None] / 255
    if not shiny:
        return (color_31 * np.float32(1 - HAZE) + np.float32(HAZE / 2)) * diffuse_P + gloss_P
    surround_P = _surround(mirror_3P, local_3P[2] + np.float32(thing.center[2]), lights)
    rim_P = np.float32(0.3) * (1 - np.clip(facing_P, 0, 1)) ** 4 * surround_P
    return color_31 * (np.float32(0.25) * diffuse_P + np.float32(1.5) * surround_P) + np.float32(1.3) * gloss_P + rim_P


def _normals(thing: Thing, local_3P: Grid) -> Grid:
    """Return the (3, P) unit normals at points relative to the thing's centre, with rounded edges."""
    half = np.float32(thing.extent)
    if thing.shape == "sphere":
        return local_3P / half
    sharpness = BEVEL - 1 if thing.material == "metal" else BEVEL
    frame = frame_of(thing).astype(np.float32)
    scaled_3P = _turn(frame, local_3P) / half
    if thing.shape == "cylinder":
        radius_P = np.sqrt(scaled_3P[0] ** 2 + scaled_3P[1] ** 2)
        side_P, top_P = _steep(radius_P, sharpness), _steep(scaled_3P[2], sharpness)
        normal_3P = np.stack([scaled_3P[0] / radius_P * side_P, scaled_3P[1] / radius_P * side_P, top_P])
    else:
        normal_3P = _turn(frame.T, np.sign(scaled_3P) * _steep(scaled_3P, sharpness))
    return normal_3P / np.sqrt(_dot(normal_3P, normal_3P))


def _lamp(towards_mirror: Grid) -> Grid:
    """Return a lamp's bright reflection: a small disc with a soft edge and a faint glow."""
    core = np.clip((towards_mirror - np.float32(0.955)) * np.float32(30), 0, 1)
    return core * core * (3 - 2 * core) * np.float32(1.2) + np.float32(0.25) * _steep(towards_mirror)


def _surround(mirror_3P: Grid, height_P: Grid, lights: list[tuple[Light, Grid]]) -> Grid:
    """Return the brightness of the artificial environment that a metal thing mirrors.

    It has a dark sky, brighter at the zenith; a floor that is dark near the thing; and an upright bright strip below
    each lamp. `mirror_3P` are the mirrored directions, `height_P` the heights above the ground where they start.
    """
    up_P = mirror_3P[2]
    rising_P = np.clip(up_P, 0, 1)
    sky_P = np.float32(0.14) + np.float32(0.22) * (1 - rising_P) ** 3 + np.float32(0.45) * rising_P**3
    reach_P = height_P / np.maximum(-up_P, np.float32(0.05))  # of the mirrored ray to the floor
    floor_P = np.float32(0.10) + np.float32(0.40) * np.clip(reach_P * np.float32(0.7), 0, 1)
    edge_P = np.clip(up_P * np.float32(12) + np.float32(0.5), 0, 1)
    surround_P = floor_P + (sky_P - floor_P) * edge_P
    level_P = np.sqrt(mirror_3P[0] ** 2 + mirror_3P[1] ** 2) + np.float32(1e-3)
    for light, towards in lights:
        below_P = (mirror_3P[0] * towards[0] + mirror_3P[1] * towards[1]) / (level_P * np.hypot(towards[0], towards[1]))
        surround_P += np.float32(0.25 + light.strength) * _steep(np.maximum(below_P, 0)) * level_P**2
    return surround_P


def _steep(value: Grid, doublings: int = 5) -> Grid:
    """Return the power 2 ** doublings of a value."""
    for _ in range(doublings):
        value = value * value
    return value


def _dot(a_3: Grid, b_3P: Grid) -> Grid:
    """Return dot products, written out so that the bits do not depend on the linear algebra library and its threads."""
    return a_3[0] * b_3P[0] + a_3[1] * b_3P[1] + a_3[2] * b_3P[2]


def _turn(frame_33: Grid, vector_3P: Grid) -> Grid:
    return np.stack([_dot(row_3, vector_3P) for row_3 in frame_33])
