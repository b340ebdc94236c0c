"""A small ray caster in numpy: a scene becomes an RGB picture, or each thing's share of visible pixels.

Casts one ray through each of 2 x 2 points of every pixel near a thing and averages them; the plain ground is shaded
once per pixel. What the rays meet is `rays.py`, light and shadow `lights.py`, rubber and metal `materials.py`.

Shape suffixes: H W rows and columns of a picture or of a box in it, P points.
"""

import numpy as np

from iep.synth.lights import LIGHTS, Light, ground, turned
from iep.synth.materials import shade
from iep.synth.rays import Grid, Hits, nearest_hits
from iep.synth.scenes import Scene

SUPERSAMPLING = 2
COARSE_WIDTH = 120  # columns of the picture on which visibility is judged, whatever the image's size


def render(scene: Scene, width: int, height: int) -> np.ndarray:
    """The picture of a scene: (height, width, 3) uint8."""
    lights = [(light, turned(light.towards, scene.light_turn)) for light in LIGHTS]
    hits = nearest_hits(scene, width, height, SUPERSAMPLING)
    image_HW = ground(scene, lights, width, height)
    image_3HW = image_HW * np.array([1.0, 0.992, 0.98], np.float32)[:, None, None]
    for index in range(len(scene.things)):
        _paint(image_3HW, index, scene, lights, hits)
    return np.clip(image_3HW * 255 + 0.5, 0, 255).astype(np.uint8).transpose(1, 2, 0)


def visible_share(scene: Scene, aspect: float) -> list[float]:
    """Each thing's share of the pixels of a coarse picture (width / height = `aspect`), 0 when it is hidden."""
    width, height = COARSE_WIDTH, max(round(COARSE_WIDTH / aspect), 1)
    hits = nearest_hits(scene, width, height, 1)
    counts = np.bincount(hits.thing_HW.ravel() + 1, minlength=len(scene.things) + 1)
    return [count / (width * height) for count in counts[1:].tolist()]


def _paint(image_3HW: Grid, index: int, scene: Scene, lights: list[tuple[Light, Grid]], hits: Hits) -> None:
    """Put the visible samples of one thing over the ground, averaged per pixel."""
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
