"""A scene -> the visible box and mask of each object, and a map of depths, in the formats of COCO and of 16-bit PNG.

Boxes are [x, y, width, height] in pixels. Masks are run-length encoded as pycocotools reads them: `size` is [height,
width], and `counts` the lengths of runs of 0 and 1 in turn, column by column, as a string. Both are of visible pixels;
the centre of a pixel decides what it shows. An object that no pixel shows has a box of zeros.

CLEVR v1.0 has no boxes; `estimated_box` computes them from an object's place and shape.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from iep.synth.renderer import things_and_depth
from iep.synth.scenes import CAMERA, FOCAL, Scene, camera_at, dot

DEPTH_UNIT = 1000  # steps of a depth map in CLEVR's unit of length
CUBE_RADIUS = 1.2  # of the cylinder for a cube of half height 1: between its half side, 1, and its half diagonal, 1.41


def annotate(scene: Scene, objects: list[dict], width: int, height: int) -> np.ndarray:
    """Add `bbox` and `mask` to the scene's objects as JSON, and return its (height, width) uint16 map of depths."""
    thing_HW, depth_HW = things_and_depth(scene, width, height)
    for index, entry in enumerate(objects):
        mask_HW = thing_HW == index
        entry["bbox"] = bounding_box(mask_HW)
        entry["mask"] = {"size": [height, width], "counts": run_lengths(mask_HW)}
    return np.clip(depth_HW * DEPTH_UNIT + 0.5, 0, 65535).astype(np.uint16)


def bounding_box(mask_HW: np.ndarray) -> list[int]:
    """Return [x, y, width, height] of the box around the pixels of a mask, zeros if it has none."""
    rows, columns = (np.flatnonzero(mask_HW.any(axis)) for axis in (1, 0))
    if len(rows) == 0:
        return [0, 0, 0, 0]
    x, y = int(columns[0]), int(rows[0])
    return [x, y, int(columns[-1]) - x + 1, int(rows[-1]) - y + 1]


def estimated_box(thing: Mapping[str, Any], behind: Sequence[float], width: int, height: int) -> list[int]:
    """Return [x, y, width, height] of the box around an object of CLEVR, as if nothing stood in front of it.

    Points on the object's surface are projected at the depth and about the centre that `pixel_coords` gives. The
    camera's direction is the scene's; its inclination is that of CLEVR's camera without jitter. A cube counts as a
    cylinder of its mean width, because the units of `rotation` differ: CLEVR v1.0 gives radians, iep-synth degrees.

    Args:
        thing: an object of a scenes file, with `shape`, `3d_coords` and `pixel_coords`.
        behind: the direction of that name of the scene.
        width: of the image in pixels.
        height: of the image in pixels.
    """
    distance = math.hypot(*CAMERA[:2])
    camera = camera_at((-distance * behind[0], -distance * behind[1], CAMERA[2]))
    x, y, depth = thing["pixel_coords"]
    angle, z = np.meshgrid(np.linspace(0, 2 * np.pi, 48, endpoint=False), np.linspace(-1, 1, 25))
    radius = np.sqrt(1 - z**2) if thing["shape"] == "sphere" else CUBE_RADIUS if thing["shape"] == "cube" else 1.0
    points = thing["3d_coords"][2] * np.array([radius * np.cos(angle), radius * np.sin(angle), z])
    depths = depth + dot(camera.forward, points)
    columns = width / 2 + ((x - width / 2) * depth + FOCAL * width * dot(camera.right, points)) / depths
    rows = height / 2 + ((y - height / 2) * depth - FOCAL * width * dot(camera.up, points)) / depths
    left, right = (int(np.clip(edge, 0, width)) for edge in (np.floor(columns.min()), np.ceil(columns.max())))
    top, bottom = (int(np.clip(edge, 0, height)) for edge in (np.floor(rows.min()), np.ceil(rows.max())))
    return [left, top, right - left, bottom - top]


def run_lengths(mask_HW: np.ndarray) -> str:
    """Return COCO's compressed run-length encoding of a mask.

    From the fourth run on, a length is written as its difference from the length two runs before. A number is written
    in groups of five bits, the lowest first, each with a sixth bit that says whether more follow, as characters from
    "0" on.
    """
    pixels = mask_HW.ravel(order="F")
    starts = np.flatnonzero(np.diff(pixels, prepend=False))  # of runs, which alternate; the first one is of zeros
    lengths = np.diff(starts, prepend=0, append=len(pixels)).tolist()
    text = ""
    for position, length in enumerate(lengths):
        number = length - lengths[position - 2] if position > 2 else length
        more = True
        while more:
            group, number = number & 31, number >> 5
            more = number != (-1 if group & 16 else 0)
            text += chr(48 + group + 32 * more)
    return text
