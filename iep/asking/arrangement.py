"""A program's tree and the texts of an answer -> the position of everything in its picture, in inches.

On the left, from the top: the question, the image, the likeliest answers, notes. On the right the tree, with the root
at the top, each function a small picture with its name beside it. Nodes of one depth are in one row. The picture is as
large as the tree needs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from iep.programs import ProgramTree

LEFT, GAP = 3.6, 0.45
"""The width of the left column, and the gap between it and the tree."""
AREA, BETWEEN = 0.75, 0.2
"""The area of a node's picture in square inches, and the gap between rows of nodes."""
LABEL_GAP, COLUMN_GAP = 0.07, 0.22
"""The gap between a node's picture and its name, and between a name and the next picture."""
LINE, PARAGRAPH = 0.2, 0.14
"""The height of a line of text, and the gap between the parts of the left column."""
PROPORTIONS = 0.5, 2.0
"""The least and the greatest ratio of an image's width to its height; an image beyond them is squeezed."""

Measure = Callable[[str], float]
"""A function from a line of text to its width."""


@dataclass(frozen=True)
class Box:
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

    @property
    def middle(self) -> tuple[float, float]:
        """x and y of the centre."""
        return self.x + self.width / 2, self.y + self.height / 2


@dataclass(frozen=True)
class Arrangement:
    """The positions of everything. `pictures` and `labels` are those of the tree's nodes, in its order."""

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
        """All boxes."""
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
    """Lay out the picture.

    Args:
        labels: the lines of each node's name.
        measure: the width of such a line.
        image_size: width and height of the image, in any unit.
        question_lines: lines of text above the image.
        num_answers: lines for answers.
        note_lines: lines of text below the answers.
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
    columns = tree_columns([node.arguments for node in tree.nodes])
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
    """Break `text` into lines no wider than `width`; a single word that is wider is broken. No words give no lines."""
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
