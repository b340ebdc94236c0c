"""The small world that CLEVR shows: its attributes, sizes, colours, relations and lamps, as constants.

Follows Johnson et al. 2017 (CLEVR: A Diagnostic Dataset), section 3.1, and its supplement; the two conditions of
CLEVR-CoGenT restrict colours by shape. The strengths of the lamps were measured in images of CLEVR v1.0. Nothing here
draws, samples or asks.
"""

from dataclasses import dataclass

Vector = tuple[float, float, float]

ATTRIBUTES = ("size", "color", "material", "shape")  # also the order of filters in descriptions and of scores
RELATIONS = ("left", "right", "behind", "front")

VALUES = {
    "size": ("large", "small"),
    "color": ("gray", "red", "blue", "green", "brown", "purple", "cyan", "yellow"),
    "material": ("rubber", "metal"),
    "shape": ("cube", "sphere", "cylinder"),
}

RADIUS = {"large": 0.7, "small": 0.35}  # half the height; a cube of CLEVR v1.0 is as wide and high as a sphere

RGB = {  # linear shares of reflected light, times 255; shown in sRGB, they look paler
    "gray": (87, 87, 87),
    "red": (173, 35, 35),
    "blue": (42, 75, 215),
    "green": (29, 105, 20),
    "brown": (129, 74, 25),
    "purple": (129, 38, 192),
    "cyan": (41, 208, 208),
    "yellow": (255, 238, 51),
}


@dataclass(frozen=True)
class Lamp:
    """A round lamp that faces the origin: its position, its strength in red, green and blue, and its radius.

    A white surface that faces the lamp at distance 1 reflects its strength.
    """

    position: Vector
    strength: Vector
    radius: float


LAMPS = (
    Lamp((6.45, -2.91, 4.26), (7.18, 6.65, 5.74), 0.3),  # key
    Lamp((-4.67, -4.01, 3.01), (1.62, 1.76, 2.23), 0.3),  # fill
    Lamp((-1.17, 2.65, 5.82), (3.22, 3.20, 3.18), 0.3),  # back
    Lamp((116.6, -66.3, 258.2), (13_300, 13_300, 13_300), 20.0),  # a sun, which is so far away that it barely moves
)

_COGENT_1 = ("gray", "blue", "brown", "yellow")
_COGENT_2 = ("red", "green", "purple", "cyan")
COLORS_OF_SHAPE = {
    None: dict.fromkeys(VALUES["shape"], VALUES["color"]),
    "A": {"cube": _COGENT_1, "cylinder": _COGENT_2, "sphere": VALUES["color"]},
    "B": {"cube": _COGENT_2, "cylinder": _COGENT_1, "sphere": VALUES["color"]},
}
