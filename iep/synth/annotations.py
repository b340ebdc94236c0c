"""A scene -> the visible box and mask of each object, and a map of depths, in the formats of COCO and of 16-bit PNG.

Boxes are [x, y, width, height] in pixels. Masks are run-length encoded as pycocotools reads them: `size` is [height,
width], and `counts` the lengths of runs of 0 and 1 in turn, column by column, as a string. Both are of visible pixels;
the centre of a pixel decides what it shows. An object that no pixel shows has a box of zeros.
"""

import numpy as np

from iep.synth.renderer import things_and_depth
from iep.synth.scenes import Scene

DEPTH_UNIT = 1000  # steps of a depth map in CLEVR's unit of length


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
