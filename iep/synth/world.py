"""The small world that CLEVR shows: its attributes, sizes, colours and relations, as constants.

Follows Johnson et al. 2017 (CLEVR: A Diagnostic Dataset), section 3.1, and its supplement; the two conditions of
CLEVR-CoGenT restrict colours by shape. Nothing here draws, samples or asks.
"""

ATTRIBUTES = ("size", "color", "material", "shape")  # also the order of a description's filters
RELATIONS = ("left", "right", "behind", "front")

VALUES = {
    "size": ("large", "small"),
    "color": ("gray", "red", "blue", "green", "brown", "purple", "cyan", "yellow"),
    "material": ("rubber", "metal"),
    "shape": ("cube", "sphere", "cylinder"),
}

RADIUS = {"large": 0.7, "small": 0.35}
CUBE_HALF_SIDE = 0.85  # of the radius, so that a cube looks about as large as a sphere of its size

RGB = {
    "gray": (87, 87, 87),
    "red": (173, 35, 35),
    "blue": (42, 75, 215),
    "green": (29, 105, 20),
    "brown": (129, 74, 25),
    "purple": (129, 38, 192),
    "cyan": (41, 208, 208),
    "yellow": (255, 238, 51),
}

_COGENT_1 = ("gray", "blue", "brown", "yellow")
_COGENT_2 = ("red", "green", "purple", "cyan")
COLORS_OF_SHAPE = {
    None: dict.fromkeys(VALUES["shape"], VALUES["color"]),
    "A": {"cube": _COGENT_1, "cylinder": _COGENT_2, "sphere": VALUES["color"]},
    "B": {"cube": _COGENT_2, "cylinder": _COGENT_1, "sphere": VALUES["color"]},
}
