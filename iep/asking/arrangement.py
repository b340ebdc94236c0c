"""A program's tree and the texts of an answer -> where everything in its picture lies, in inches, without overlaps.

On the left, from above: the question, the image, the likeliest answers, notes. To the right the tree, each function a
small picture with its name to the right of it, in a tidy drawing (Reingold & Tilford 1981): nodes of a depth are in one
row, the root's above; arguments stand side by side in their order, as close as what is below them allows, and a node in
the middle of its arguments. The picture is as large as the tree asks for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from iep.programs import ProgramTree

LEFT, GAP = 3.6, 0.45
"""Width of the left column; between it and the tree."""
AREA, BETWEEN = 0.75, 0.2
"""Square inches of a node's picture; between rows of nodes."""
LABEL_GAP, COLUMN_GAP = 0.07, 0.22
"""Between a node's picture and its name; between a name and the next picture."""
LINE, PARAGRAPH = 0.2, 0.14
"""Height of a line of text; between the parts of the left column."""
PROPORTIONS = 0.5, 2.0
"""Of an image's width to its height, the least and the greatest; an image beyond them is squeezed."""

Measure = Callable[[str], float]
"""The width of a line of text."""


@dataclass(frozen=True)
class Box:
    """A rectangle; y grows downwards."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """Where it ends, to the right."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """Where it ends, below."""
        return self.y + self.height

    @property
    def middle(self) -> tuple[float, float]:
        """x and y of it."""
        return self.x + self.width / 2, self.y + self.height / 2


@dataclass(frozen=True)
class Arrangement:
    """Where things lie. `pictures` and `labels` are of the tree's nodes, in its order."""

    width: float
    height: float
    question: Box
    image: Box
    answers: Box
    notes: Box
    pictures: tuple[Box, ...]
    labels: tuple[Box, ...]

    @property
    def boxes(self) -> tuple[Box, ...]:
        """All of them."""
        return self.question, self.image, self.answers, self.notes, *self.pictures, *self.labels


def arrange(
    tree: ProgramTree,
    labels: Sequence[Sequence[str]],
    measure: Measure,
    image_size: tuple[int, int],
    question_lines: int,
    num_answers: int,
    note_lines: int,
) -> Arrangement:
    """Place everything.

    Args:
        labels: lines of each node's name.
        measure: of such a line.
        image_size: width and height of the image, in any unit.
        question_lines: lines of text above the image.
        num_answers: lines for answers.
        note_lines: lines of text below these.
    """
    least, most = PROPORTIONS
    proportion = min(max(image_size[0] / image_size[1], least), most)
    question = Box(0, 0, LEFT, LINE * question_lines)
    image = Box(0, question.bottom + PARAGRAPH, LEFT, LEFT / max(proportion, 1.0))
    image = Box((LEFT - image.height * proportion) / 2, image.y, image.height * proportion, image.height)
    answers = Box(0, image.bottom + PARAGRAPH, LEFT, LINE * num_answers)
    notes = Box(0, answers.bottom + PARAGRAPH, LEFT, LINE * note_lines)

    height = (AREA / proportion) ** 0.5
    width, row = height * proportion, height + BETWEEN
    widths = [max(map(measure, lines)) for lines in labels]
    column = width + LABEL_GAP + max(widths) + COLUMN_GAP
    columns = tidy_columns([node.arguments for node in tree.nodes])
    places = [
        (LEFT + GAP + column * across, row * node.depth) for across, node in zip(columns, tree.nodes, strict=True)
    ]
    pictures = tuple(Box(x, y, width, height) for x, y in places)
    names = tuple(
        Box(picture.right + LABEL_GAP, picture.y, long, height) for picture, long in zip(pictures, widths, strict=True)
    )
    right, bottom = max(name.right for name in names), max(picture.bottom for picture in pictures)
    return Arrangement(right, max(bottom, notes.bottom), question, image, answers, notes, pictures, names)


def wrapped(text: str, width: float, measure: Measure) -> list[str]:
    """Lines of `text` that are no wider than `width`; a word that is wider alone is broken. None of no words."""
    words = text.split()
    lines = [""] if words else []
    for word in words:
        longer = f"{lines[-1]} {word}".strip()
        if measure(longer) <= width:
            lines[-1] = longer
            continue
        if lines[-1]:
            lines.append("")
        for letter in word:
            if lines[-1] and measure(lines[-1] + letter) > width:
                lines.append("")
            lines[-1] += letter
    return lines


Outline = list[tuple[float, float]]
"""Of a subtree, row by row from its root: the leftmost and the rightmost node's column, the root's being 0."""


def tidy_columns(arguments: Sequence[Sequence[int]]) -> list[float]:
    """The column of each node, the leftmost 0; two nodes in a row are 1 apart or more.

    Args:
        arguments: of every node, in order; a node comes before its arguments, the root first.
    """
    shifts = [0.0] * len(arguments)  # of each node, from the one that takes its result
    outlines: list[Outline] = [[] for _ in arguments]
    for node in reversed(range(len(arguments))):
        below: Outline = []
        for argument in arguments[node]:
            shifts[argument] = _room(below, outlines[argument])
            below = _beside(below, outlines[argument], shifts[argument])
        middle = below[0][1] / 2 if below else 0.0  # of the first argument, at 0, and the last
        for argument in arguments[node]:
            shifts[argument] -= middle
        outlines[node] = [(0.0, 0.0), *((left - middle, right - middle) for left, right in below)]
    columns = [-min(left for left, _ in outlines[0])] * len(arguments)
    for node, taken in enumerate(arguments):
        for argument in taken:
            columns[argument] = columns[node] + shifts[argument]
    return columns


def _room(left: Outline, right: Outline) -> float:
    """How far a subtree must be shifted to stand to the right of others."""
    return max((edge[1] - other[0] + 1.0 for edge, other in zip(left, right, strict=False)), default=0.0)


def _beside(left: Outline, right: Outline, shift: float) -> Outline:
    """The outline of subtrees together with one more, shifted."""
    rows = []
    for first, second in zip_longest(left, right):
        moved = None if second is None else (second[0] + shift, second[1] + shift)
        rows.append((first or moved)[:1] + (moved or first)[1:])
    return rows
