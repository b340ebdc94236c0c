"""An answer and the saliency of its functions -> one picture, like figure 3 of Johnson et al. 2017.

The left column holds the question, the image, the likeliest answers and notes. On the right is the program's tree with
its root at the top: each function is a copy of the image with the function's saliency or attention map over it, and its
name beside it. The picture is as large as the tree needs. Positions are in inches, and y grows downwards.

Shapes: C H W maps; H W pixels of an image or cells of a map.
"""

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from torch import Tensor
from torch.nn import functional

from iep.errors import InputError
from iep.programs import NOT_USED, Node, ProgramTree
from iep.runtime.pictures import DPI, HEAT, save

PIXELS = 2**25
"""The most pixels of a picture; a larger one is drawn at a lower resolution."""
QUESTION, ANSWER, LABEL, NOTE = 10.5, 9.5, 8.0, 7.5
"""Sizes of text, in points."""
TITLE = "Where each function looked"
GREY, DARK, WARNING = "0.45", "0.15", "#b03a2e"
LEFT, GAP = 3.6, 0.45
"""The width of the left column, and the gap between it and the tree."""
QUESTION_LETTERS, NOTE_LETTERS = 40, 66
"""The most letters in a line of the left column."""
LINE, PARAGRAPH = 0.2, 0.14
"""The height of a line of text, and the gap between the parts of the left column."""
AREA, BETWEEN = 1.8, 0.2
"""The area of a node's picture in square inches, and the gap between rows of nodes."""
LETTER, NAME_GAP = 0.075, 0.07
"""The width of a letter of a node's name, and the gap beside the name."""
PROPORTIONS = 0.5, 2.0
"""The least and the greatest ratio of an image's width to its height; an image beyond them is squeezed."""


def tree_columns(arguments: Sequence[Sequence[int]]) -> list[float]:
    """Return the column of each node: leaves stand side by side in order, a node above the middle of its arguments.

    Args:
        arguments: the arguments of each node, in order; a node comes before its arguments, the root first.
    """
    columns = [0.0] * len(arguments)  # counted from the right
    leaves = 0
    for node in reversed(range(len(arguments))):
        if arguments[node]:
            columns[node] = (columns[arguments[node][0]] + columns[arguments[node][-1]]) / 2
        else:
            columns[node] = leaves
            leaves += 1
    return [leaves - 1 - column for column in columns]


def draw_answer(
    path: Path | str | None,
    question: str,
    image: Image.Image,
    likeliest: Sequence[tuple[str, float]],
    tree: ProgramTree,
    maps: Sequence[Tensor],
    warned: Sequence[str],
    colours: str,
) -> Figure:
    """Return the picture as a figure.

    Args:
        path: a file to write, completely or not at all, in the format of its ending; None to write none.
        question: the question; empty if only a program was given.
        image: the image, RGB.
        likeliest: the likeliest answers with their probabilities.
        tree: the program.
        maps: a map (H, W) from 0 to 1 for each node of the tree.
        warned: warnings, each of which is a paragraph of the notes.
        colours: the meaning of the maps, the last paragraph of the notes.

    Raises:
        InputError: the ending of `path` is not that of a format.
        OSError: the file cannot be written.
    """
    figure = Figure()
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set_axis_off()
    proportion = float(np.clip(image.width / image.height, *PROPORTIONS))

    y = _write(axis, 0, 0, wrap(question, QUESTION_LETTERS), fontsize=QUESTION, weight="bold") + PARAGRAPH
    height = LEFT / max(proportion, 1.0)
    _show(axis, (LEFT - height * proportion) / 2, y, height * proportion, height, np.asarray(_no_larger(image, 1000)))
    y = _draw_answers(axis, y + height + PARAGRAPH, likeliest) + PARAGRAPH
    for text in warned:
        y = _write(axis, 0, y, wrap(text, NOTE_LETTERS), fontsize=NOTE, color=WARNING)
    y = _write(axis, 0, y, wrap(colours, NOTE_LETTERS), fontsize=NOTE, color=GREY) + PARAGRAPH
    _show(axis, 0.15, y, LEFT / 2, LINE / 2, HEAT(np.linspace(0, 1, 256))[None, :, :3])
    for text, x in (("0", 0), ("1", LEFT / 2 + 0.2)):
        _write(axis, x, y - LINE / 4, [text], fontsize=NOTE, color=GREY)

    _write(axis, LEFT + GAP, 0, [TITLE], fontsize=QUESTION, weight="bold")
    right, bottom = _draw_tree(axis, LINE + PARAGRAPH, proportion, tree, _no_larger(image, 480), maps)
    width, height = right, max(y + LINE / 2, bottom)
    axis.set(xlim=(0, width), ylim=(height, 0))
    figure.set_size_inches(width, height)
    if path is not None:
        try:
            save(figure, Path(path), min(DPI, (PIXELS / (width * height)) ** 0.5))
        except ValueError as error:  # matplotlib names the formats that it has
            raise InputError(f"{path}: {error}") from None
    return figure


def lit(image: Image.Image, map_HW: Tensor) -> np.ndarray:
    """Return the image (H, W, 3) from 0 to 1 with the cells of a map, from 0 to 1, in colours over it."""
    image_HW3 = np.asarray(image.convert("RGB"), dtype=np.float32) / 255
    size = (image.height, image.width)
    heat_HW = functional.interpolate(map_HW[None, None].float(), size, mode="nearest-exact")[0, 0].numpy()
    strength_HW1 = 0.65 * heat_HW[:, :, None]
    lit_HW3 = (1 - strength_HW1) * image_HW3 + strength_HW1 * HEAT(heat_HW)[:, :, :3]
    return lit_HW3.clip(0, 1)  # rounding may exceed 1, about which matplotlib warns


def _no_larger(image: Image.Image, side: int) -> Image.Image:
    """Return the image, shrunk if a side has more than `side` pixels."""
    image = image.copy()
    image.thumbnail((side, side))
    return image


def _show(axis: Axes, x: float, y: float, width: float, height: float, pixels: np.ndarray) -> None:
    """Draw an image with a thin frame; its upper left corner is at (x, y)."""
    extent = (x, x + width, y + height, y)
    axis.imshow(pixels, extent=extent, aspect="auto", interpolation="bilinear", zorder=2)
    axis.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor=GREY, linewidth=0.5, zorder=3))


def _write(axis: Axes, x: float, y: float, lines: Sequence[str], **style: Any) -> float:
    """Write lines of text below each other, the first one at (x, y), and return the y below them."""
    for number, line in enumerate(lines):
        axis.text(x, y + LINE * (number + 0.5), line, va="center", parse_math=False, **style)
    return y + LINE * len(lines)


def _draw_answers(axis: Axes, y: float, likeliest: Sequence[tuple[str, float]]) -> float:
    """Draw a line for each answer: its name, a bar for its probability, its probability. Return the y below them."""
    start = 0.11 * max(len(name) for name, _ in likeliest) + 0.1
    for number, (name, probability) in enumerate(likeliest):
        style = {"fontsize": ANSWER, "color": DARK, "weight": "normal" if number else "bold"}
        length = (LEFT - start - 0.6) * probability
        bar = Rectangle((start, y + LINE / 2 - 0.06), length, 0.12, color="0.75" if number else HEAT(0.65))
        axis.add_patch(bar)
        _write(axis, start + length + 0.06, y, [f"{100 * probability:.1f}%"], **style)
        y = _write(axis, 0, y, [name], **style)
    return y


def _draw_tree(
    axis: Axes, top: float, proportion: float, tree: ProgramTree, image: Image.Image, maps: Sequence[Tensor]
) -> tuple[float, float]:
    """Draw each node's picture and name, and the branches to its arguments. Return the x and y where the tree ends."""
    height = (AREA / proportion) ** 0.5
    width, row = height * proportion, height + BETWEEN
    names = [_name(node) for node in tree.nodes]
    column = width + 3 * NAME_GAP + LETTER * max(len(line) for lines in names for line in lines)
    columns = tree_columns([node.arguments for node in tree.nodes])
    corners = [
        (LEFT + GAP + column * across, top + row * node.depth) for across, node in zip(columns, tree.nodes, strict=True)
    ]
    for node, (x, y), lines, map_HW in zip(tree.nodes, corners, names, maps, strict=True):
        middle, bottom = x + width / 2, y + height
        for argument in node.arguments:
            to, halfway = corners[argument][0] + width / 2, bottom + BETWEEN / 2
            axis.plot((middle, middle, to, to), (bottom, halfway, halfway, y + row), color=GREY, linewidth=1, zorder=1)
        _show(axis, x, y, width, height, lit(image, map_HW))
        style: dict[str, Any] = {"fontsize": LABEL, "color": GREY if node.is_filled_in or node.unused else DARK}
        axis.text(x + width + NAME_GAP, y + height / 2, "\n".join(lines), va="center", parse_math=False, **style)
    return LEFT + GAP + column * (max(columns) + 1), max(y for _, y in corners) + height


def _name(node: Node) -> list[str]:
    """Return the lines of a node's name: its function, its value in brackets, and what is unusual about it."""
    function, bracket, value = node.token.partition("[")
    notes = ["(filled in)"] if node.is_filled_in else []
    if node.unused:
        notes.append(f"({NOT_USED})")
    lines = (function, bracket + value, *notes)
    return [line for line in lines if line]
