"""An answer and the saliency of its functions -> one picture, laid out as figure 3 of Johnson et al. 2017.

The left column holds the question, the image, the likeliest answers and notes. On the right is the program's tree with
its root at the top: each function is a copy of the image with the function's saliency or attention map over it, and its
name beside it. The picture is as large as the tree needs.

Shapes: C H W maps; H W pixels of an image or cells of a map.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Rectangle
from matplotlib.textpath import TextToPath
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

# Lengths in inches.
MARGIN = 0.05
"""The margin around the picture, for the width of lines."""
LEFT, GAP = 3.6, 0.45
"""The width of the left column, and the gap between it and the tree."""
AREA, BETWEEN = 1.8, 0.2
"""The area of a node's picture in square inches, and the gap between rows of nodes."""
LABEL_GAP, COLUMN_GAP = 0.07, 0.22
"""The gap between a node's picture and its name, and between a name and the next picture."""
LINE, PARAGRAPH = 0.2, 0.14
"""The height of a line of text, and the gap between the parts of the left column."""
PROPORTIONS = 0.5, 2.0
"""The least and the greatest ratio of an image's width to its height; an image beyond them is squeezed."""

Measure = Callable[[str], float]
"""A function from a line of text to its width."""


class Box(NamedTuple):
    """A rectangle; y grows downwards."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """x of the right edge."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """y of the lower edge."""
        return self.y + self.height


class Arrangement(NamedTuple):
    """The positions of everything in the picture."""

    question: Box
    image: Box
    answers: Box
    notes: Box
    scale: Box
    """The scale of colours."""
    title: Box
    """The title of the tree."""
    pictures: list[Box]
    """The box of each node of the tree, in its order."""
    labels: list[Box]
    """The box of each node's name."""

    @property
    def boxes(self) -> list[Box]:
        """All boxes."""
        return [*self[:6], *self.pictures, *self.labels]

    @property
    def width(self) -> float:
        """The width of the picture without its margin."""
        return max(box.right for box in self.boxes)

    @property
    def height(self) -> float:
        """The height of the picture without its margin."""
        return max(box.bottom for box in self.boxes)


def arrange(
    tree: ProgramTree,
    labels: Sequence[Sequence[str]],
    measure: Measure,
    image_size: tuple[int, int],
    question_lines: int,
    num_answers: int,
    note_lines: int,
) -> Arrangement:
    """Lay out the picture.

    Args:
        labels: the lines of each node's name.
        measure: a function from such a line to its width.
        image_size: width and height of the image, in any unit.
        question_lines: the number of lines of text above the image.
        num_answers: the number of answers below the image.
        note_lines: the number of lines of text below the answers.
    """
    proportion = float(np.clip(image_size[0] / image_size[1], *PROPORTIONS))
    question = Box(0, 0, LEFT, LINE * question_lines)
    height = LEFT / max(proportion, 1.0)
    image = Box((LEFT - height * proportion) / 2, question.bottom + PARAGRAPH, height * proportion, height)
    answers = Box(0, image.bottom + PARAGRAPH, LEFT, LINE * num_answers)
    notes = Box(0, answers.bottom + PARAGRAPH, LEFT, LINE * note_lines)
    scale = Box(0.15, notes.bottom + PARAGRAPH, LEFT / 2, LINE / 2)
    title = Box(LEFT + GAP, 0, LEFT, LINE)

    height = (AREA / proportion) ** 0.5
    width = height * proportion
    lengths = [max(map(measure, lines)) for lines in labels]
    column = width + LABEL_GAP + max(lengths) + COLUMN_GAP
    columns = tree_columns([node.arguments for node in tree.nodes])
    pictures = [
        Box(LEFT + GAP + column * across, title.bottom + PARAGRAPH + (height + BETWEEN) * node.depth, width, height)
        for across, node in zip(columns, tree.nodes, strict=True)
    ]
    names = [
        Box(picture.right + LABEL_GAP, picture.y, length, height)
        for picture, length in zip(pictures, lengths, strict=True)
    ]
    return Arrangement(question, image, answers, notes, scale, title, pictures, names)


def wrapped(text: str, width: float, measure: Measure) -> list[str]:
    """Break `text` into lines no wider than `width`; a single word that is wider is broken. No words give no lines."""
    lines: list[str] = []
    for word in text.split():
        if lines and measure(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
            continue
        lines.append("")
        for letter in word:
            if lines[-1] and measure(lines[-1] + letter) > width:
                lines.append("")
            lines[-1] += letter
    return lines


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
    lines = wrapped(question, LEFT, _measure(QUESTION, "bold"))
    notes = [(line, WARNING) for text in warned for line in wrapped(text, LEFT, _measure(NOTE))]
    notes += [(line, GREY) for line in wrapped(colours, LEFT, _measure(NOTE))]
    labels = [_label(node) for node in tree.nodes]
    arrangement = arrange(tree, labels, _measure(LABEL), image.size, len(lines), len(likeliest), len(notes))
    width, height = arrangement.width + 2 * MARGIN, arrangement.height + 2 * MARGIN
    figure = Figure(figsize=(width, height))
    axis = figure.add_axes((0, 0, 1, 1), xlim=(-MARGIN, width - MARGIN), ylim=(height - MARGIN, -MARGIN))
    axis.set(autoscale_on=False)
    axis.set_axis_off()
    for number, line in enumerate(lines):
        _write(axis, arrangement.question, number, line, fontsize=QUESTION, weight="bold")
    _show(axis, arrangement.image, np.asarray(_no_larger(image, 1000)))
    _draw_answers(axis, arrangement.answers, likeliest)
    for number, (line, color) in enumerate(notes):
        _write(axis, arrangement.notes, number, line, fontsize=NOTE, color=color)
    _write(axis, arrangement.title, 0, TITLE, fontsize=QUESTION, weight="bold")
    _draw_tree(axis, arrangement, tree, labels, _no_larger(image, 480), maps)
    _show(axis, arrangement.scale, HEAT(np.linspace(0, 1, 256))[None, :, :3])
    for text, x in (("0", 0), ("1", arrangement.scale.right + 0.06)):
        axis.text(x, arrangement.scale.y + LINE / 4, text, va="center", fontsize=NOTE, color=GREY, clip_on=False)
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


def _label(node: Node) -> list[str]:
    """Return the lines of a node's name: its function, its value in brackets, and what is unusual about it."""
    function, bracket, value = node.token.partition("[")
    lines = (function, bracket + value, "(filled in)" * node.is_filled_in, f"({NOT_USED})" * bool(node.unused))
    return [line for line in lines if line]


def _measure(size: float, weight: str = "normal") -> Measure:
    """Return a function from a line of text, of a size in points, to its width in inches."""
    font, paths = FontProperties(size=size, weight=weight), TextToPath()
    return lambda text: paths.get_text_width_height_descent(text, font, ismath=False)[0] / 72


def _no_larger(image: Image.Image, side: int) -> Image.Image:
    """Return the image, shrunk if a side has more than `side` pixels."""
    image = image.copy()
    image.thumbnail((side, side))
    return image


def _show(axis: Axes, box: Box, pixels: np.ndarray) -> None:
    """Draw an image with a thin frame into a box."""
    axis.imshow(pixels, extent=(box.x, box.right, box.bottom, box.y), aspect="auto", interpolation="bilinear", zorder=2)
    axis.add_patch(Rectangle(box[:2], box.width, box.height, fill=False, edgecolor=GREY, linewidth=0.5, zorder=3))


def _write(axis: Axes, box: Box, line: int, text: str, indent: float = 0.0, **style: Any) -> None:
    """Write one line of text in a box, counted from the top of the box."""
    axis.text(box.x + indent, box.y + LINE * (line + 0.5), text, va="center", parse_math=False, **style)


def _draw_answers(axis: Axes, box: Box, ranked: Sequence[tuple[str, float]]) -> None:
    """Draw a line for each answer: its name, a bar for its probability, its probability."""
    start = min(max(_measure(ANSWER, "bold")(name) for name, _ in ranked) + 0.15, 0.5 * box.width)
    for number, (name, probability) in enumerate(ranked):
        style: dict[str, Any] = {"fontsize": ANSWER, "color": DARK, "weight": "normal" if number else "bold"}
        length = (box.width - start - 0.6) * probability
        corner = (box.x + start, box.y + LINE * (number + 0.5) - 0.06)
        axis.add_patch(Rectangle(corner, length, 0.12, color="0.75" if number else HEAT(0.65)))
        _write(axis, box, number, name, **style)
        _write(axis, box, number, f"{100 * probability:.1f}%", start + length + 0.06, **style)


def _draw_tree(
    axis: Axes,
    arrangement: Arrangement,
    tree: ProgramTree,
    labels: Sequence[Sequence[str]],
    image: Image.Image,
    maps: Sequence[Tensor],
) -> None:
    """Draw each node's picture and name, and the branches to its arguments."""
    pictures = arrangement.pictures
    for node, picture, name, lines, map_HW in zip(tree.nodes, pictures, arrangement.labels, labels, maps, strict=True):
        x = picture.x + picture.width / 2
        for argument in node.arguments:
            below = pictures[argument]
            to, halfway = below.x + below.width / 2, (picture.bottom + below.y) / 2
            axis.plot((x, x, to, to), (picture.bottom, halfway, halfway, below.y), color=GREY, linewidth=1, zorder=1)
        _show(axis, picture, lit(image, map_HW))
        color = GREY if node.is_filled_in or node.unused else DARK
        middle = name.y + name.height / 2
        axis.text(name.x, middle, "\n".join(lines), fontsize=LABEL, color=color, va="center", parse_math=False)
