"""What a point of a thing looks like: matte rubber, or metal that mirrors lamps and a made-up surrounding.

Edges of cubes and cylinders look rounded, by bending their normals. Metal does not mirror the other things. Shape
suffix: P points.
"""

import numpy as np

from iep.synth.lights import Light, shadow_on
from iep.synth.rays import Grid, frame_of
from iep.synth.scenes import Scene, Thing
from iep.synth.world import RGB

BEVEL = 5  # normals are blended by the 2 ** BEVEL-th power of the distance from the middle; metal's by one less
HAZE = 0.14  # share of light grey in the colour of rubber
AMBIENT = 0.30


def shade(index: int, scene: Scene, lights: list[tuple[Light, Grid]], u_P: Grid, v_P: Grid, depth_P: Grid) -> Grid:
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
    """(3, P) unit normals at points relative to the thing's middle, edges rounded."""
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


def _steep(value: Grid, doublings: int = 5) -> Grid:
    """The power 2 ** doublings."""
    for _ in range(doublings):
        value = value * value
    return value


def _dot(a_3: Grid, b_3P: Grid) -> Grid:
    """Written out, not `@`: the same bits whatever the linear algebra library and its threads."""
    return a_3[0] * b_3P[0] + a_3[1] * b_3P[1] + a_3[2] * b_3P[2]


def _turn(frame_33: Grid, vector_3P: Grid) -> Grid:
    return np.stack([_dot(row_3, vector_3P) for row_3 in frame_33])
