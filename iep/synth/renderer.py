"""A small ray caster in numpy: a scene becomes an RGB picture, or each thing's share of visible pixels.

Casts one ray through each of 2 x 2 points of every pixel near a thing, against analytic spheres, boxes and upright
cylinders; the plain ground is shaded once per pixel. Lights are far away, so a thing's shadow on the ground is a flat
shape with a known distance function, which gives soft shadows without shadow rays (also on other things: a point is
moved along the light onto the ground). Metal mirrors a made-up surrounding, not the other things.

Shape suffixes: H W rows and columns of a box, P points.
"""

from dataclasses import dataclass

import numpy as np

from iep.synth.scenes import FOCAL, Camera, Scene, Thing
from iep.synth.world import RGB

SUPERSAMPLING = 2
COARSE_WIDTH = 120  # columns of the picture on which visibility is judged, whatever the image's size
BEVEL = 5  # edges look rounded: normals are blended by the 2 ** BEVEL-th power of the distance from the middle
HAZE = 0.14  # share of light grey in the colour of rubber
AMBIENT = 0.30

Grid = np.ndarray


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


def render(scene: Scene, width: int, height: int) -> np.ndarray:
    """The picture of a scene: (height, width, 3) uint8."""
    lights = [(light, _turned(light.towards, scene.light_turn)) for light in LIGHTS]
    hits = _nearest_hits(scene, width, height, SUPERSAMPLING)
    image_HW = _ground(scene, lights, width, height)
    image_3HW = image_HW * np.array([1.0, 0.992, 0.98], np.float32)[:, None, None]
    for index in range(len(scene.things)):
        _paint(image_3HW, index, scene, lights, hits)
    return np.clip(image_3HW * 255 + 0.5, 0, 255).astype(np.uint8).transpose(1, 2, 0)


def visible_share(scene: Scene, aspect: float) -> list[float]:
    """Each thing's share of the pixels of a coarse picture (width / height = `aspect`), 0 when it is hidden."""
    width, height = COARSE_WIDTH, max(round(COARSE_WIDTH / aspect), 1)
    hits = _nearest_hits(scene, width, height, 1)
    counts = np.bincount(hits.thing_HW.ravel() + 1, minlength=len(scene.things) + 1)
    return [count / (width * height) for count in counts[1:].tolist()]


@dataclass(frozen=True)
class Hits:
    """Nearest hits on a grid of rays: depth (inf for the ground), index of the thing (-1 for the ground).

    `u_W` and `v_H` are the rays' slopes to the right and up: a ray is forward + u right + v up. `boxes` holds each
    thing's rows and columns of the grid, whole pixels, or None when it is outside the picture.
    """

    depth_HW: Grid
    thing_HW: Grid
    u_W: Grid
    v_H: Grid
    boxes: list[tuple[slice, slice] | None]


def _nearest_hits(scene: Scene, width: int, height: int, samples: int) -> Hits:
    columns, rows = width * samples, height * samples
    u_W = ((np.arange(columns, dtype=np.float32) + 0.5) / columns - 0.5) / FOCAL
    v_H = (0.5 * rows - np.arange(rows, dtype=np.float32) - 0.5) / (columns * FOCAL)
    depth_HW = np.full((rows, columns), np.inf, np.float32)
    thing_HW = np.full((rows, columns), -1, np.int8)
    boxes = [_box(thing, scene.camera, width, height, samples) for thing in scene.things]
    for index, (thing, box) in enumerate(zip(scene.things, boxes, strict=True)):
        if box is None:
            continue
        found_HW = _intersect(thing, scene.camera, u_W[box[1]], v_H[box[0]])
        nearer_HW = found_HW < depth_HW[box]
        np.copyto(depth_HW[box], found_HW, where=nearer_HW)
        thing_HW[box][nearer_HW] = index
    return Hits(depth_HW, thing_HW, u_W, v_H, boxes)


def _box(thing: Thing, camera: Camera, width: int, height: int, samples: int) -> tuple[slice, slice] | None:
    """Rows and columns of the sample grid that hold the thing, in whole pixels."""
    reach = thing.extent * (1.06 if thing.shape == "sphere" else 1.0)
    turns = np.radians(thing.rotation + np.array([45, 135, 225, 315])) if thing.shape == "cube" else None
    x, y, z = thing.center
    if turns is None:
        # The bounding box seen from the camera: its sides along the camera's right and forward on the ground.
        corners = [
            (
                x + reach * (a * camera.right[0] - b * camera.right[1]),
                y + reach * (a * camera.right[1] + b * camera.right[0]),
            )
            for a in (-1, 1)
            for b in (-1, 1)
        ]
    else:
        corners = [(x + reach * 2**0.5 * np.cos(turn), y + reach * 2**0.5 * np.sin(turn)) for turn in turns]
    seen = [camera.project((cx, cy, z + c * reach), width, height) for cx, cy in corners for c in (-1, 1)]
    left, right = (int(f(point[0] for point in seen)) for f in (min, max))
    top, bottom = (int(f(point[1] for point in seen)) for f in (min, max))
    rows = slice(max(top - 1, 0) * samples, min(bottom + 2, height) * samples)
    columns = slice(max(left - 1, 0) * samples, min(right + 2, width) * samples)
    inside = rows.start < rows.stop and columns.start < columns.stop
    return (rows, columns) if inside else None


def _intersect(thing: Thing, camera: Camera, u_W: Grid, v_H: Grid) -> Grid:
    """Depth at which each ray meets the thing, inf where it misses."""
    frame = _frame(thing)
    origin = frame @ (np.array(camera.position) - np.array(thing.center))
    to_forward, to_right, to_up = (frame @ np.array(axis) for axis in (camera.forward, camera.right, camera.up))
    ray = [_plane(to_forward[k], to_right[k] * u_W, to_up[k] * v_H) for k in range(3)]
    origin = origin.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if thing.shape == "sphere":
            return _hit_quadratic(origin, ray, 3, thing.extent)
        if thing.shape == "cylinder":
            return _hit_cylinder(origin, ray, np.float32(thing.extent))
        return _hit_box(origin, ray, np.float32(thing.extent))


def _plane(constant: float, along_W: Grid, down_H: Grid) -> Grid:
    return (np.float32(constant) + down_H.astype(np.float32))[:, None] + along_W.astype(np.float32)


def _hit_quadratic(origin: Grid, ray: list[Grid], axes: int, radius: float) -> Grid:
    """Nearest depth on a sphere (3 axes) or an endless upright cylinder (2 axes) around the origin."""
    a = sum(ray[k] * ray[k] for k in range(axes))
    b = sum(origin[k] * ray[k] for k in range(axes))
    c = np.float32(sum(origin[k] ** 2 for k in range(axes)) - radius**2)
    depth = -(b + np.sqrt(b * b - a * c)) / a
    return np.where(np.isnan(depth), np.float32(np.inf), depth)


def _hit_cylinder(origin: Grid, ray: list[Grid], half: Grid) -> Grid:
    """Nearest depth on a cylinder as high as wide, seen from above its top."""
    side = _hit_quadratic(origin, ray, 2, float(half))
    height = origin[2] + side * ray[2]
    side = np.where((np.abs(height) <= half), side, np.float32(np.inf))
    top = (half - origin[2]) / ray[2]
    x, y = origin[0] + top * ray[0], origin[1] + top * ray[1]
    return np.where((x * x + y * y <= half * half) & (top > 0), np.minimum(top, side), side)


def _hit_box(origin: Grid, ray: list[Grid], half: Grid) -> Grid:
    """Nearest depth on a cube around the origin (slab method)."""
    enter, leave = np.float32(-np.inf), np.float32(np.inf)
    for k in range(3):
        inverse = 1 / ray[k]
        middle, reach = -origin[k] * inverse, half * np.abs(inverse)
        enter = np.maximum(enter, middle - reach)
        leave = np.minimum(leave, middle + reach)
    return np.where(enter <= leave, enter, np.float32(np.inf))


def _frame(thing: Thing) -> Grid:
    """Rotation from the world to the thing's own axes."""
    if thing.shape != "cube":
        return np.eye(3)
    turn = np.radians(thing.rotation)
    return np.array([[np.cos(turn), np.sin(turn), 0], [-np.sin(turn), np.cos(turn), 0], [0, 0, 1]])


def _turned(towards: tuple[float, float, float], turn: float) -> Grid:
    x, y, z = towards
    vector = np.array([x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn), z])
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def _ground(scene: Scene, lights: list[tuple[Light, Grid]], width: int, height: int) -> Grid:
    """Brightness of the shadowed ground for every pixel."""
    camera = scene.camera
    u_W = ((np.arange(width, dtype=np.float32) + 0.5) / width - 0.5) / FOCAL
    v_H = (0.5 * height - np.arange(height, dtype=np.float32) - 0.5) / (width * FOCAL)
    depth_H1 = (-camera.position[2] / (camera.forward[2] + v_H * camera.up[2]))[:, None].astype(np.float32)
    x_HW = np.float32(camera.position[0]) + depth_H1 * _plane(
        camera.forward[0], camera.right[0] * u_W, camera.up[0] * v_H
    )
    y_HW = np.float32(camera.position[1]) + depth_H1 * _plane(
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
                dark = _shadow(thing, towards, light.softness, x_HW[box], y_HW[box])
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
    seen = [camera.project((x, y, 0.0), width, height) for x in xs for y in ys]
    left, right = (int(f(point[0] for point in seen)) for f in (min, max))
    top, bottom = (int(f(point[1] for point in seen)) for f in (min, max))
    rows, columns = slice(max(top, 0), min(bottom + 1, height)), slice(max(left, 0), min(right + 1, width))
    return (rows, columns) if rows.start < rows.stop and columns.start < columns.stop else None


def _shadow(thing: Thing, towards: Grid, softness: float, x: Grid, y: Grid) -> Grid:
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


def _paint(image_3HW: Grid, index: int, scene: Scene, lights: list[tuple[Light, Grid]], hits: Hits) -> None:
    """Put the visible samples of one thing over the ground, averaged per pixel."""
    box = hits.boxes[index]
    if box is None:
        return
    rows_P, columns_P = np.nonzero(hits.thing_HW[box] == index)
    if len(rows_P) == 0:
        return
    depth_P = hits.depth_HW[box][rows_P, columns_P]
    color_3P = _shade(index, scene, lights, hits.u_W[box[1]][columns_P], hits.v_H[box[0]][rows_P], depth_P)
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


def _shade(index: int, scene: Scene, lights: list[tuple[Light, Grid]], u_P: Grid, v_P: Grid, depth_P: Grid) -> Grid:
    """(3, P) colours of points of one thing, 0 to 1 and above where it shines."""
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
            lit_P *= 1 - _shadow_on(index, scene, light, towards, local_3P)
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
    """(3, P) unit normals at points relative to the thing's middle, edges rounded."""
    half = np.float32(thing.extent)
    if thing.shape == "sphere":
        return local_3P / half
    sharpness = BEVEL - 1 if thing.material == "metal" else BEVEL
    frame = _frame(thing).astype(np.float32)
    scaled_3P = _turn(frame, local_3P) / half
    if thing.shape == "cylinder":
        radius_P = np.sqrt(scaled_3P[0] ** 2 + scaled_3P[1] ** 2)
        side_P, top_P = _steep(radius_P, sharpness), _steep(scaled_3P[2], sharpness)
        normal_3P = np.stack([scaled_3P[0] / radius_P * side_P, scaled_3P[1] / radius_P * side_P, top_P])
    else:
        normal_3P = _turn(frame.T, np.sign(scaled_3P) * _steep(scaled_3P, sharpness))
    return normal_3P / np.sqrt(_dot(normal_3P, normal_3P))


def _dot(a_3: Grid, b_3P: Grid) -> Grid:
    """Written out, not `@`: the same bits whatever the linear algebra library and its threads."""
    return a_3[0] * b_3P[0] + a_3[1] * b_3P[1] + a_3[2] * b_3P[2]


def _turn(frame_33: Grid, vector_3P: Grid) -> Grid:
    return np.stack([_dot(row_3, vector_3P) for row_3 in frame_33])


def _steep(value: Grid, doublings: int = 5) -> Grid:
    """The power 2 ** doublings."""
    for _ in range(doublings):
        value = value * value
    return value


def _lamp(towards_mirror: Grid) -> Grid:
    """A lamp's bright reflection: a small disc with a soft edge and a faint glow."""
    core = np.clip((towards_mirror - np.float32(0.955)) * np.float32(30), 0, 1)
    return core * core * (3 - 2 * core) * np.float32(1.2) + np.float32(0.25) * _steep(towards_mirror)


def _surround(mirror_3P: Grid, height_P: Grid, lights: list[tuple[Light, Grid]]) -> Grid:
    """Brightness of the made-up surrounding that a metal thing mirrors.

    A dark sky, brighter straight above; a floor that is dark near the thing; and an upright bright strip below each
    lamp. `mirror_3P` are the mirrored directions, `height_P` the heights over the ground where they start.
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


def _shadow_on(index: int, scene: Scene, light: Light, towards: Grid, local_3P: Grid) -> Grid | np.float32:
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
        dark = np.maximum(dark, _shadow(other, towards, light.softness, x_P, y_P))
    return dark


def _may_shadow(other: Thing, thing: Thing, towards: Grid, softness: float) -> bool:
    """Whether `other` stands towards the light from `thing`, near enough to the line for its shadow to fall there."""
    x, y, z = (other.center[k] - thing.center[k] for k in range(3))
    along = x * float(towards[0]) + y * float(towards[1]) + z * float(towards[2])
    if along <= 0:
        return False
    apart = (x * x + y * y + z * z - along * along) ** 0.5
    return apart < 1.75 * (thing.extent + other.extent) + softness
