"""Rays of a picture -> the thing that each hits first, and its depth: spheres, cubes and upright cylinders.

Rays go through the points of a grid; each thing is intersected only inside the box of rows and columns that contains
it. The ground is not intersected: its depth is infinite. The edges of cubes and cylinders are rounded: a ray that hits
the sharp shape near an edge is followed to the round one.

Shape suffixes: H W rows and columns of the grid or of a box, P points.
"""

from dataclasses import dataclass

import numpy as np

from iep.synth.scenes import FOCAL, Camera, Scene, Thing, dot
from iep.synth.world import Vector

Grid = np.ndarray

BEVEL = {"cube": 0.18, "cylinder": 0.06, "sphere": 1.0}  # radius of the edges over the thing's extent
ROUNDING_STEPS = 4
NEAR = 0.1  # the smallest depth at which points are projected


@dataclass(frozen=True)
class Hits:
    """Nearest hits on a grid of rays: depth (inf for the ground), index of the thing (-1 for the ground).

    `u_W` and `v_H` are the rays' slopes to the right and up: a ray is forward + u right + v up. `boxes` has the rows
    and columns of the grid that contain each thing, in whole pixels, or None if it is outside the picture.
    """

    depth_HW: Grid
    thing_HW: Grid
    u_W: Grid
    v_H: Grid
    boxes: list[tuple[slice, slice] | None]


def nearest_hits(scene: Scene, width: int, height: int, samples: int) -> Hits:
    """Return the hits of a picture's rays, `samples` x `samples` for every pixel."""
    columns, rows = width * samples, height * samples
    u_W, v_H = slopes(columns, rows)
    depth_HW = np.full((rows, columns), np.inf, np.float32)
    thing_HW = np.full((rows, columns), -1, np.int8)
    boxes = [_box(thing, scene.camera, width, height, samples) for thing in scene.things]
    for index, (thing, box) in enumerate(zip(scene.things, boxes, strict=True)):
        if box is None:
            continue
        found_HW = _first_hit(thing, scene.camera, u_W[box[1]], v_H[box[0]])
        nearer_HW = found_HW < depth_HW[box]
        np.copyto(depth_HW[box], found_HW, where=nearer_HW)
        thing_HW[box][nearer_HW] = index
    return Hits(depth_HW, thing_HW, u_W, v_H, boxes)


def slopes(columns: int, rows: int) -> tuple[Grid, Grid]:
    """Return the slopes to the right (W,) and up (H,) of the rays through the centres of a grid's cells."""
    u_W = ((np.arange(columns, dtype=np.float32) + 0.5) / columns - 0.5) / FOCAL
    v_H = (0.5 * rows - np.arange(rows, dtype=np.float32) - 0.5) / (columns * FOCAL)
    return u_W, v_H


def plane(constant: float, along_W: Grid, down_H: Grid) -> Grid:
    """Return the (H, W) sums of a constant, a value for every column and a value for every row."""
    return (np.float32(constant) + down_H.astype(np.float32))[:, None] + along_W.astype(np.float32)


def box_around(points: list[Vector], camera: Camera, width: int, height: int) -> tuple[slice, slice] | None:
    """Return the rows and columns of the picture that contain points of the world, and a pixel around them, or None."""
    seen = [camera.project(point, width, height) for point in points]
    if min(depth for _, _, depth in seen) < NEAR:
        return slice(0, height), slice(0, width)
    columns, rows = [point[0] for point in seen], [point[1] for point in seen]
    box = (
        slice(max(int(min(rows)) - 1, 0), min(int(max(rows)) + 2, height)),
        slice(max(int(min(columns)) - 1, 0), min(int(max(columns)) + 2, width)),
    )
    return box if all(part.start < part.stop for part in box) else None


def _box(thing: Thing, camera: Camera, width: int, height: int, samples: int) -> tuple[slice, slice] | None:
    """Return the rows and columns of the sample grid that contain the thing, in whole pixels."""
    x, y, z = thing.center
    if thing.shape == "cube":
        angles = np.radians(thing.rotation + np.array([45, 135, 225, 315]))
        reach = thing.extent
        corners = [(x + reach * 2**0.5 * np.cos(angle), y + reach * 2**0.5 * np.sin(angle)) for angle in angles]
    else:
        # A box whose sides are along the camera's right and forward on the ground fits a round thing best.
        reach = thing.extent * (1.06 if thing.shape == "sphere" else 1.0)
        along, across = reach * camera.right[0], reach * camera.right[1]
        corners = [(x + a * along - b * across, y + a * across + b * along) for a in (-1, 1) for b in (-1, 1)]
    points = [(float(cx), float(cy), z + c * reach) for cx, cy in corners for c in (-1, 1)]
    box = box_around(points, camera, width, height)
    return box and (
        slice(box[0].start * samples, box[0].stop * samples),
        slice(box[1].start * samples, box[1].stop * samples),
    )


def _first_hit(thing: Thing, camera: Camera, u_W: Grid, v_H: Grid) -> Grid:
    """Return the depth at which each ray from the camera hits the thing, inf if it misses."""
    frame = frame_of(thing)
    origin = (frame @ (np.array(camera.position) - np.array(thing.center))).astype(np.float32)
    to_forward, to_right, to_up = (frame @ np.array(axis) for axis in (camera.forward, camera.right, camera.up))
    ray = [plane(to_forward[k], to_right[k] * u_W, to_up[k] * v_H) for k in range(3)]
    depth_HW = intersect(thing, origin, ray)
    if thing.shape == "sphere":
        return depth_HW
    rows_P, columns_P = np.nonzero(depth_HW < np.inf)
    ray_3P = np.stack([axis_HW[rows_P, columns_P] for axis_HW in ray])
    depth_P = depth_HW[rows_P, columns_P]
    beyond_x_P, beyond_y_P, beyond_z_P = beyond_core(thing, origin[:, None] + depth_P * ray_3P) != 0
    upright_P = beyond_x_P & beyond_y_P if thing.shape == "cube" else False
    near_edge_P = np.nonzero(upright_P | beyond_z_P & (beyond_x_P | beyond_y_P))[0]
    depth_P, ray_3P = depth_P[near_edge_P], ray_3P[:, near_edge_P]
    radius = np.float32(BEVEL[thing.shape] * thing.extent)
    for _ in range(ROUNDING_STEPS):  # of Newton's method; the distance to the core is convex along the ray
        edge_3P = beyond_core(thing, origin[:, None] + depth_P * ray_3P)
        far_P = np.sqrt(dot(edge_3P, edge_3P))
        depth_P += (far_P - radius) / np.maximum(-dot(edge_3P, ray_3P) / far_P, 0.01)
    edge_3P = beyond_core(thing, origin[:, None] + depth_P * ray_3P)
    depth_P[dot(edge_3P, edge_3P) > np.float32(1.05) * radius * radius] = np.inf
    depth_HW[rows_P[near_edge_P], columns_P[near_edge_P]] = depth_P
    return depth_HW


def beyond_core(thing: Thing, local_3P: Grid) -> Grid:
    """Return the vectors from the thing's core to points outside it, all in the thing's own axes.

    The core is the cube or cylinder that the centres of the rounded edges enclose; a sphere's is its centre. The
    surface is at a constant distance from the core, and its normals are these vectors.
    """
    core = np.float32(thing.extent * (1 - BEVEL[thing.shape]))
    if thing.shape != "cylinder":
        return local_3P - np.clip(local_3P, -core, core)
    radius_P = np.sqrt(local_3P[0] ** 2 + local_3P[1] ** 2)
    outside_P = 1 - np.minimum(core / radius_P, 1)
    return np.stack([local_3P[0] * outside_P, local_3P[1] * outside_P, local_3P[2] - np.clip(local_3P[2], -core, core)])


def intersect(thing: Thing, origin: Grid, ray: Grid | list[Grid]) -> Grid:
    """Return the depth at which rays in the thing's own axes enter its shape with sharp edges, inf if they miss."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if thing.shape == "sphere":
            depth = _hit_quadratic(origin, ray, 3, thing.extent)
        elif thing.shape == "cylinder":
            depth = _hit_cylinder(origin, ray, np.float32(thing.extent))
        else:
            depth = _hit_box(origin, ray, np.float32(thing.extent))
    return np.where(depth > 0, depth, np.float32(np.inf))


def _hit_quadratic(origin: Grid, ray: Grid | list[Grid], axes: int, radius: float) -> Grid:
    """Return the nearest depth on a sphere (3 axes) or an infinite upright cylinder (2 axes) around the origin."""
    a = sum(ray[k] * ray[k] for k in range(axes))
    b = sum(origin[k] * ray[k] for k in range(axes))
    c = sum(origin[k] * origin[k] for k in range(axes)) - np.float32(radius**2)
    depth = -(b + np.sqrt(b * b - a * c)) / a
    return np.where(np.isnan(depth), np.float32(np.inf), depth)


def _hit_cylinder(origin: Grid, ray: Grid | list[Grid], half: np.float32) -> Grid:
    """Return the nearest depth on a cylinder as high as wide, seen from above its top."""
    side = _hit_quadratic(origin, ray, 2, float(half))
    height = origin[2] + side * ray[2]
    side = np.where(np.abs(height) <= half, side, np.float32(np.inf))
    top = (half - origin[2]) / ray[2]
    x, y = origin[0] + top * ray[0], origin[1] + top * ray[1]
    return np.where((x * x + y * y <= half * half) & (top > 0), np.minimum(top, side), side)


def _hit_box(origin: Grid, ray: Grid | list[Grid], half: np.float32) -> Grid:
    """Return the nearest depth on a cube around the origin (slab method)."""
    enter, leave = np.float32(-np.inf), np.float32(np.inf)
    for k in range(3):
        inverse = 1 / ray[k]
        middle, reach = -origin[k] * inverse, half * np.abs(inverse)
        enter = np.maximum(enter, middle - reach)
        leave = np.minimum(leave, middle + reach)
    return np.where(enter <= leave, enter, np.float32(np.inf))


def frame_of(thing: Thing) -> Grid:
    """Return the rotation from the world to the thing's own axes."""
    if thing.shape != "cube":
        return np.eye(3)
    cos, sin = np.cos(np.radians(thing.rotation)), np.sin(np.radians(thing.rotation))
    return np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]])


def turn(frame_33: Grid, vector_3P: Grid) -> Grid:
    """Return vectors in the axes that are the rows of a matrix."""
    return np.stack([dot(row_3, vector_3P) for row_3 in frame_33.astype(np.float32)])
