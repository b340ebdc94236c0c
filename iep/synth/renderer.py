"""A scene -> an RGB picture, or which thing and what depth is seen at each pixel, by a small ray caster in numpy.

Casts one ray through each of 2 x 2 points of every pixel near a thing. Things and ground are shaded separately, and are
mixed in a pixel by how many of its points show them. Rays are intersected in `rays.py`; lamps and shadows are
in `lights.py`, and materials here.

Light is counted in linear shares of white, and shown in sRGB. Rubber is matte. Metal mirrors the ground, as far as the
picture shows it, other things as if they were matte, and the lamps with a highlight that is longer across than around
the vertical axis. Above the ground is darkness, and a grey backdrop opposite the camera. All constants were fitted to
images of CLEVR v1.0 with their scenes.

Shape suffixes: H W rows and columns of a picture or of a box in it, P points.
"""

from functools import reduce

import numpy as np

from iep.synth.lights import irradiance, may_shadow, shadow, shadow_box
from iep.synth.rays import Grid, Hits, beyond_core, frame_of, intersect, nearest_hits, plane, slopes, turn
from iep.synth.scenes import FOCAL, Camera, Scene, Thing, directions, dot
from iep.synth.world import RGB

SUPERSAMPLING = 2
COARSE_WIDTH = 120  # columns of the picture on which visibility is judged, whatever the image's size
SOFTNESS = 0.08  # share of a pixel that each of its neighbours in a row or column receives
GROUND = 0.70  # share of light that the ground reflects
GROUND_AMBIENT = 0.052  # light from everywhere on the ground
AMBIENT, AMBIENT_SLOPE = 0.085, -0.111  # the same on things, and its change with the upward part of the normal
HAZE, RIM = 0.004, 0.055  # white light that rubber reflects, from everywhere and where it is seen at a grazing angle
SKY = 0.018  # light from above the horizon
BACKDROP = 0.085  # more light from above the horizon, away from the camera
MIRROR = 0.94  # share of light that a white metal mirrors
LOBES = ((0.10, 0.12, 0.20), (0.14, 0.04, 0.04))  # of metal's highlights: strength, roughness around the axis, across
HORIZON = 0.15  # half the height of the blurred horizon in mirrored directions
LEVELS = 4096


def render(scene: Scene, width: int, height: int) -> np.ndarray:
    """Return the picture of a scene, (height, width, 3) uint8."""
    hits = nearest_hits(scene, width, height, SUPERSAMPLING)
    ground_3HW = ground(scene, width, height)
    image_3HW = ground_3HW.copy()
    for index in range(len(scene.things)):
        _paint(image_3HW, index, scene, ground_3HW, hits)
    _soften(image_3HW)
    levels_3HW = (image_3HW * (LEVELS - 1) + 0.5).astype(np.int32)
    return SRGB.take(levels_3HW, mode="clip").transpose(1, 2, 0)


def visible_share(scene: Scene, aspect: float) -> list[float]:
    """Return each thing's share of the pixels of a coarse picture (width / height = `aspect`), 0 if it is hidden."""
    width, height = COARSE_WIDTH, max(round(COARSE_WIDTH / aspect), 1)
    hits = nearest_hits(scene, width, height, 1)
    counts = np.bincount(hits.thing_HW.ravel() + 1, minlength=len(scene.things) + 1)
    return [count / (width * height) for count in counts[1:].tolist()]


def things_and_depth(scene: Scene, width: int, height: int) -> tuple[Grid, Grid]:
    """Return the (H, W) index of the thing, -1 for the ground, and the (H, W) depth at the centre of each pixel."""
    hits = nearest_hits(scene, width, height, 1)
    return hits.thing_HW, np.minimum(hits.depth_HW, ground_depth(scene.camera, hits.v_H)[:, None])


def ground(scene: Scene, width: int, height: int) -> Grid:
    """Return the (3, H, W) light of the ground with shadows, as if no thing hid it."""
    camera = scene.camera
    u_W, v_H = slopes(width, height)
    depth_H1 = ground_depth(camera, v_H)[:, None]
    x_HW, y_HW = (
        camera.position[k] + depth_H1 * plane(camera.forward[k], camera.right[k] * u_W, camera.up[k] * v_H)
        for k in range(2)
    )
    light_3HW = np.full((3, height, width), GROUND_AMBIENT, np.float32)
    for lamp in scene.lamps:
        light_HW = irradiance(lamp, x_HW, y_HW, np.float32(0))
        for thing in scene.things:
            box = shadow_box(thing, lamp, camera, width, height)
            if box is not None:
                light_HW[box] *= 1 - shadow(thing, lamp, x_HW[box], y_HW[box], np.float32(0))
        for channel in range(3):
            light_3HW[channel] += lamp.strength[channel] * light_HW
    return light_3HW * GROUND


def ground_depth(camera: Camera, v_H: Grid) -> Grid:
    """Return the depth of the ground in each row of a picture; above the horizon, it is far away."""
    return (camera.position[2] / np.maximum(-camera.forward[2] - v_H * camera.up[2], 1e-3)).astype(np.float32)


def _paint(image_3HW: Grid, index: int, scene: Scene, ground_3HW: Grid, hits: Hits) -> None:
    """Paint what is visible of one thing over the ground."""
    box = hits.boxes[index]
    if box is None:
        return
    # Edges of metal have narrow highlights, and are shaded at every point; other things are shaded once per pixel.
    thing = scene.things[index]
    step = 1 if thing.material == "metal" and thing.shape != "sphere" else SUPERSAMPLING
    shows = hits.thing_HW[box] == index
    count_HW = _sum_blocks(shows.astype(np.float32), step)
    rows_P, columns_P = np.nonzero(count_HW)
    if len(rows_P) == 0:
        return
    count_P = count_HW[rows_P, columns_P]
    depth_P = _sum_blocks(np.where(shows, hits.depth_HW[box], 0), step)[rows_P, columns_P] / count_P
    u_W, v_H = slopes(len(hits.u_W) // step, len(hits.v_H) // step)
    u_P, v_P = u_W[columns_P + box[1].start // step], v_H[rows_P + box[0].start // step]
    light_3HW = np.zeros((3, *count_HW.shape), np.float32)
    light_3HW[:, rows_P, columns_P] = np.minimum(shade(thing, scene, ground_3HW, u_P, v_P, depth_P), 1) * count_P
    target = tuple(slice(part.start // SUPERSAMPLING, part.stop // SUPERSAMPLING) for part in box)
    cover_HW = _sum_blocks(count_HW, SUPERSAMPLING // step)
    for channel in range(3):
        under_HW = ground_3HW[channel][target]
        light_HW = _sum_blocks(light_3HW[channel], SUPERSAMPLING // step)
        image_3HW[channel][target] += (light_HW - cover_HW * under_HW) / SUPERSAMPLING**2


def _sum_blocks(grid_HW: Grid, size: int) -> Grid:
    """Return the sums of blocks of `size` rows and columns."""
    rows_HW = reduce(np.add, [grid_HW[part::size] for part in range(size)])
    return reduce(np.add, [rows_HW[:, part::size] for part in range(size)])


def shade(thing: Thing, scene: Scene, ground_3HW: Grid, u_P: Grid, v_P: Grid, depth_P: Grid) -> Grid:
    """Return the (3, P) light of points of one thing; white is 1, and highlights are brighter."""
    camera = scene.camera
    forward, right, up = (np.array(axis, np.float32)[:, None] for axis in (camera.forward, camera.right, camera.up))
    ray_3P = forward + right * u_P + up * v_P
    point_3P = np.array(camera.position, np.float32)[:, None] + depth_P * ray_3P
    normal_3P = normals(thing, point_3P)
    ray_3P /= np.sqrt(dot(ray_3P, ray_3P))
    facing_P = np.clip(-dot(ray_3P, normal_3P), 0, 1)
    if thing.material == "rubber":
        light_3P = _matte(thing, scene, point_3P, normal_3P, [other for other in scene.things if other is not thing])
        return light_3P + HAZE + RIM * (1 - facing_P) ** 5
    mirror_3P = ray_3P + 2 * facing_P * normal_3P
    light_3P = _mirrored_ground(scene, ground_3HW, point_3P, mirror_3P)
    light_3P += _highlights(thing, scene, point_3P, ray_3P, normal_3P, facing_P)
    _mirror_things(thing, scene, light_3P, point_3P, mirror_3P)
    return _color(thing) * light_3P * MIRROR


def normals(thing: Thing, point_3P: Grid) -> Grid:
    """Return the (3, P) unit normals of a thing at points of its surface."""
    frame = frame_of(thing)
    center = np.array(thing.center, np.float32)[:, None]
    out_3P = beyond_core(thing, turn(frame, point_3P - center))
    # A coarse pixel's mean depth may lie deep inside the thing, where there is no normal.
    return turn(frame.T, out_3P / np.maximum(np.sqrt(dot(out_3P, out_3P)), 1e-6))


def _color(thing: Thing) -> Grid:
    return np.array(RGB[thing.color], np.float32)[:, None] / 255


def _matte(thing: Thing, scene: Scene, point_3P: Grid, normal_3P: Grid, shadowing: list[Thing]) -> Grid:
    """Return the (3, P) light of points of a thing as rubber, with the shadows of some things."""
    light_3P = np.tile(AMBIENT + AMBIENT_SLOPE * normal_3P[2], (3, 1))
    for lamp in scene.lamps:
        light_P = irradiance(lamp, point_3P[0], point_3P[1], point_3P[2], normal_3P)
        for other in shadowing:
            if may_shadow(other, lamp, thing):
                light_P *= 1 - shadow(other, lamp, *point_3P)
        light_3P += np.array(lamp.strength, np.float32)[:, None] * light_P
    return _color(thing) * light_3P


def _mirrored_ground(scene: Scene, ground_3HW: Grid, point_3P: Grid, mirror_3P: Grid) -> Grid:
    """Return the (3, P) light that arrives along mirrored rays from the ground, or from the dark above it.

    What the picture does not show of the ground is as bright as at the picture's nearest edge.
    """
    camera, (height, width) = scene.camera, ground_3HW.shape[1:]
    offset_3P = point_3P + point_3P[2] / np.maximum(-mirror_3P[2], 0.02) * mirror_3P
    offset_3P -= np.array(camera.position, np.float32)[:, None]
    axes = np.array((camera.right, camera.up, camera.forward), np.float32)
    right_P, up_P, depth_P = (dot(axis, offset_3P) for axis in axes)
    scale_P = FOCAL * width / np.maximum(depth_P, 0.1)
    column_P = np.clip(width / 2 + scale_P * right_P, 0, width - 1).astype(np.int32)
    row_P = np.clip(height / 2 - scale_P * up_P, 0, height - 1).astype(np.int32)
    ground_3P = ground_3HW[:, row_P, column_P]
    behind_P = dot(np.array(directions(camera)["behind"], np.float32), mirror_3P)
    sky_P = SKY + BACKDROP * np.clip(behind_P * 3 - 1.4, 0, 1)
    down_P = np.clip(0.5 - mirror_3P[2] / (2 * HORIZON), 0, 1)
    return sky_P + down_P * down_P * (3 - 2 * down_P) * (ground_3P - sky_P)


def _highlights(thing: Thing, scene: Scene, point_3P: Grid, ray_3P: Grid, normal_3P: Grid, facing_P: Grid) -> Grid:
    """Return the (3, P) highlights of the lamps on metal: the anisotropic distribution of Trowbridge and Reitz."""
    x_P, y_P = point_3P[0] - thing.center[0], point_3P[1] - thing.center[1]
    away_P = np.sqrt(x_P * x_P + y_P * y_P) + 1e-6
    around_3P = np.stack([-y_P / away_P, x_P / away_P, np.zeros_like(x_P)])
    # On the sides of a cube the direction around its axis is not in the surface.
    around_3P -= dot(around_3P, normal_3P) * normal_3P
    around_3P /= np.sqrt(dot(around_3P, around_3P)) + 1e-6
    light_3P = np.zeros_like(point_3P)
    for lamp in scene.lamps:
        to_lamp_3P = np.array(lamp.position, np.float32)[:, None] - point_3P
        square_P = dot(to_lamp_3P, to_lamp_3P)
        to_lamp_3P /= np.sqrt(square_P)
        half_3P = to_lamp_3P - ray_3P
        half_3P /= np.sqrt(dot(half_3P, half_3P))
        along_P, up_P = dot(around_3P, half_3P), dot(normal_3P, half_3P)
        rest_P = np.maximum(1 - along_P * along_P - up_P * up_P, 0)
        direction = np.array(lamp.position, np.float32) / np.float32(np.linalg.norm(lamp.position))
        falling_P = np.maximum(dot(direction, to_lamp_3P), 0) / square_P
        falling_P *= np.clip(dot(normal_3P, to_lamp_3P) * 10, 0, 1)
        falling_P /= np.maximum(facing_P, 0.1)
        for strength, around, across in LOBES:
            spread_P = along_P**2 / around**2 + rest_P / across**2 + up_P**2
            light_P = strength / (around * across) * falling_P / (spread_P * spread_P)
            light_3P += np.array(lamp.strength, np.float32)[:, None] * light_P
    return light_3P


def _mirror_things(thing: Thing, scene: Scene, light_3P: Grid, point_3P: Grid, mirror_3P: Grid) -> None:
    """Replace the light along mirrored rays by that of the first other thing that they hit."""
    far_P = np.full(point_3P.shape[1], np.inf, np.float32)
    for other in scene.things:
        if other is thing:
            continue
        offset_3P = np.array(other.center, np.float32)[:, None] - point_3P
        way_P = dot(mirror_3P, offset_3P)
        apart_P = dot(offset_3P, offset_3P) - way_P * way_P
        reach = other.extent * (3**0.5 if other.shape == "cube" else 2**0.5)
        near_P = np.nonzero((way_P > 0) & (apart_P < reach**2))[0]
        if len(near_P) == 0:
            continue
        frame = frame_of(other)
        depth_P = intersect(other, turn(frame, -offset_3P[:, near_P]), turn(frame, mirror_3P[:, near_P]))
        hit_P = depth_P < far_P[near_P]
        near_P, depth_P = near_P[hit_P], depth_P[hit_P]
        far_P[near_P] = depth_P
        there_3P = point_3P[:, near_P] + depth_P * mirror_3P[:, near_P]
        light_3P[:, near_P] = _matte(other, scene, there_3P, normals(other, there_3P), [])


def _soften(image_3HW: Grid) -> None:
    """Let every pixel exchange a share of its light with each of its neighbours."""
    for axis in (1, 2):
        first, last = ((slice(None),) * axis + (part,) for part in (slice(None, -1), slice(1, None)))
        flow = SOFTNESS * (image_3HW[last] - image_3HW[first])
        image_3HW[first] += flow
        image_3HW[last] -= flow


def _srgb_levels() -> np.ndarray:
    """Return the sRGB value, 0 to 255, of each of LEVELS levels of linear light."""
    linear = np.arange(LEVELS) / (LEVELS - 1)
    encoded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return np.round(encoded * 255).astype(np.uint8)


SRGB = _srgb_levels()
