"""An answer and the saliency of its functions -> one picture: the image, the question, the answers, the program's tree,
and for each function the image with the function's saliency or attention map.

As figure 3 of Johnson et al. 2017 and figure 1 of Mascharka et al. 2018 (Transparency by Design). On the left, from the
top: the question, the image, the likeliest answers, notes. On the right the tree, with the root at the top, each
function a small picture with its name beside it. The picture is as large as the tree needs. Texts are drawn in
installed fonts that together have their characters; whether a font suits the language is not checked.

Shapes: C H W maps, A answers; H W pixels of an image or cells of a map.
"""

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from matplotlib.patches import Rectangle
from matplotlib.textpath import TextToPath
from PIL import Image
from torch import Tensor
from torch.nn import functional

from iep.asking.answers import MOST_WORDS, Answer, Asker, some
from iep.config import SALIENCY
from iep.errors import InputError
from iep.execution_engine.trace import Trace, trace
from iep.preprocess.images import open_image
from iep.programs import NOT_USED, Node, ProgramTree
from iep.runtime.pictures import DPI, save

USUAL = "sans-serif"
_NO_TEXT = ("Last Resort", "STIXNonUnicode", "STIXSize", "cm")
"""The beginnings of the names of matplotlib's own fonts whose shapes are not those of the characters."""
MOST_NODES = 200
"""The most functions of a program that is drawn; a larger picture would be illegible."""
PIXELS = 2**25
"""The most pixels of a picture; a larger one is drawn at a lower resolution."""
MARGIN = 0.05
"""The margin around everything, in inches, for the width of lines."""
HEAT = colormaps["inferno"]
QUESTION, ANSWER, LABEL, NOTE = 10.5, 9.5, 8.0, 7.5
"""Sizes of text, in points."""
GREY, DARK, WARNING = "0.45", "0.15", "#b03a2e"

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

# matplotlib warns of fonts without bold letters, although it draws others in their place.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)


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


def fonts_for(text: str) -> tuple[list[str], str]:
    """Return names of fonts, the usual one first, that together have all characters, and the characters of no font."""
    names, missing = [USUAL], {letter for letter in text if not letter.isspace()} - _letters(USUAL)
    others = sorted({entry.name for entry in fontManager.ttflist if not entry.name.startswith(_NO_TEXT)})
    for name in others if missing else ():
        if found := missing & _letters(name):
            names.append(name)
            missing -= found
    return names, "".join(sorted(missing))


@cache
def _letters(name: str) -> frozenset[str]:
    """Return the characters that a font has in normal and in bold."""
    fonts = (get_font(findfont(FontProperties(family=[name], weight=weight))) for weight in ("normal", "bold"))
    return frozenset.intersection(*(frozenset(map(chr, font.get_charmap())) for font in fonts))


def saliency_maps(trace: Trace, saliency: str) -> list[Tensor]:
    """Return a map (H, W) of numbers from 0 for every node of the tree, in its order.

    Args:
        trace: made with autograd on, for `gradient`.
        saliency: `norm`, the norm over the channels of a module's output, which for an attention is the attention
            itself (Mascharka et al. 2018, Transparency by Design, figure 1); or `gradient`, the norm of the gradient of
            the likeliest answer's logit by that output (Johnson et al. 2017, section 4.2 and figure 3, which take the
            sum of all logits and the last map alone), 0 where the logit does not depend on it.
    """
    values = trace.outputs
    if saliency == "gradient":
        # Each output once; a scene of ones has no gradient.
        learnt = {id(output): output for output in trace.outputs if output.requires_grad}
        found = torch.autograd.grad(trace.logits.max(), [*learnt.values()], allow_unused=True) if learnt else ()
        by_output = dict(zip(learnt, found, strict=True))
        gradients = [by_output.get(id(output)) for output in values]
        values = [
            torch.zeros_like(output) if gradient is None else gradient
            for output, gradient in zip(values, gradients, strict=True)
        ]
    return [value[0].detach().float().norm(dim=0).cpu() for value in values]


def to_unit(map_HW: Tensor, is_attention: bool) -> Tensor:
    """Scale a map to 0 to 1: an attention stays as it is, another map is scaled from its least value to its greatest,
    and a constant one becomes 0."""
    if is_attention:
        return map_HW.clamp(0, 1)
    low, high = map_HW.aminmax()
    return (map_HW - low) / (high - low) if high > low else torch.zeros_like(map_HW)


def draw_answer(path: Path, image: Path, asker: Asker, answer: Answer, saliency: str, top: int) -> str:
    """Run the answer's program once more, and draw the saliency of its functions.

    Args:
        path: the file, written whole or not at all; its ending is its format (.png, .svg, .pdf).
        image: the image that the question is about.
        asker: the networks that answered.
        saliency: what is drawn of each function, a key of `SALIENCY`.
        top: the number of the likeliest answers to show.

    Returns:
        the characters that no installed font has; they are drawn as boxes, except in .svg.

    Raises:
        InputError: the program is too large to be drawn, or the image can no longer be read.
    """
    if len(answer.tree.nodes) > MOST_NODES:
        many = len(answer.tree.nodes)
        raise InputError(f"a program of {many} functions is not drawn, expected {MOST_NODES} at most")
    traced = trace(asker.predictor.engine, asker.features, answer.program)
    attentions = [saliency == "norm" and output.shape[1] == 1 for output in traced.outputs]
    maps = [to_unit(*pair) for pair in zip(saliency_maps(traced, saliency), attentions, strict=True)]
    # The answer does not depend on nodes that are not used.
    maps = [map_HW * (not node.unused) for node, map_HW in zip(answer.tree.nodes, maps, strict=True)]
    is_all_lit = all(node.unused or bool(map_HW.any()) for node, map_HW in zip(answer.tree.nodes, maps, strict=True))
    notes = _notes(answer, saliency, any(attentions), is_all_lit)
    names = (name for name, _ in answer.ranked[:top])
    fonts, missing = fonts_for("".join([answer.question.text if answer.question else "", *names, *dict(notes)]))
    with rc_context({"font.family": fonts}):
        _draw(path, open_image(image), answer, maps, notes, top)
    return "" if path.suffix.lower() == ".svg" else missing


def _draw(
    path: Path,
    image: Image.Image,
    answer: Answer,
    maps: Sequence[torch.Tensor],
    notes: Sequence[tuple[str, str]],
    top: int,
) -> None:
    """Lay out and write the picture, with `maps` (H, W) from 0 to 1, and `notes`, texts and their colours."""
    question = wrapped(answer.question.text if answer.question else "", LEFT, _measure(QUESTION, "bold"))
    notes = [(line, color) for text, color in notes for line in wrapped(text, LEFT, _measure(NOTE))]
    labels = [_label(node) for node in answer.tree.nodes]
    ranked = answer.ranked[:top]
    arrangement = arrange(answer.tree, labels, _measure(LABEL), image.size, len(question), len(ranked), len(notes))
    width, height = arrangement.width + 2 * MARGIN, arrangement.height + 2 * MARGIN
    figure = Figure(figsize=(width, height))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(-MARGIN, width - MARGIN), ylim=(height - MARGIN, -MARGIN), autoscale_on=False)
    axis.set_axis_off()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # of a language that the font lacks
        _write(axis, arrangement.question, [(line, "black") for line in question], QUESTION, "bold")
        _show(axis, arrangement.image, np.asarray(_no_larger(image, 1000)))
        _draw_answers(axis, arrangement.answers, ranked)
        _write(axis, arrangement.notes, notes, NOTE)
        _draw_tree(axis, arrangement, answer.tree, labels, _no_larger(image, 240), maps)
        save(figure, path, min(DPI, (PIXELS / (width * height)) ** 0.5))


def lit(image: Image.Image, map_HW: torch.Tensor) -> np.ndarray:
    """Return the image (H, W, 3) in grey, with the map, of numbers from 0 to 1, in colours over it."""
    grey_HW1 = np.asarray(image.convert("L"), dtype=np.float32)[:, :, None] / 255
    size = (image.height, image.width)
    heat_11HW = functional.interpolate(map_HW[None, None].float(), size, mode="bicubic", align_corners=False)
    heat_HW = heat_11HW[0, 0].clamp(0, 1).numpy()
    strength_HW1 = 0.65 * heat_HW[:, :, None]
    return (1 - strength_HW1) * 0.75 * grey_HW1 + strength_HW1 * HEAT(0.25 + 0.75 * heat_HW)[:, :, :3]


def _label(node: Node) -> list[str]:
    function, bracket, value = node.token.partition("[")
    said = [*(["(filled in)"] if node.is_filled_in else []), *([f"({NOT_USED})"] if node.unused else [])]
    return [function, *([bracket + value] if bracket else []), *said]


def _notes(answer: Answer, saliency: str, with_attentions: bool, is_all_lit: bool) -> list[tuple[str, str]]:
    """Return the notes below the answers, with their colours."""
    notes = []
    if unknown := [f"'{word}'" for word, _ in answer.question.unknown] if answer.question else []:
        words = "unknown words" if len(unknown) > 1 else "unknown word"
        notes.append((f"{words}: {some(unknown, MOST_WORDS)}", WARNING))
    reasons = [f"{node.token}: {node.unused}" for node in answer.tree.nodes if node.unused not in ("", NOT_USED)]
    if reasons:
        notes.append((some(reasons, MOST_WORDS, "; "), WARNING))
    if answer.tree.ignored:
        notes.append((f"ignored after the program's tree: {some(answer.tree.ignored, MOST_WORDS, ' ')}", WARNING))
    alone = "; attentions as they are, from 0 to 1" if with_attentions else ""
    dark = "" if is_all_lit else "; no colour where it is 0 or constant"
    return [*notes, (f"Colours: {SALIENCY[saliency]}, each from its least to its greatest{alone}{dark}.", GREY)]


def _measure(size: float, weight: str = "normal") -> Measure:
    """Return a function from a line of text, of a size in points, to its width in inches."""
    font, paths = FontProperties(size=size, weight=weight), TextToPath()

    def measure(text: str) -> float:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from")
            return paths.get_text_width_height_descent(text, font, ismath=False)[0] / 72

    return measure


def _no_larger(image: Image.Image, side: int) -> Image.Image:
    """Return the image, shrunk if a side has more than `side` pixels."""
    factor = min(1.0, side / max(image.size))
    size = tuple(max(1, round(factor * length)) for length in image.size)
    return image if factor == 1 else image.resize(size, Image.Resampling.BICUBIC)


def _show(axis: Axes, box: Box, pixels: np.ndarray) -> None:
    axis.imshow(pixels, extent=(box.x, box.right, box.bottom, box.y), aspect="auto", interpolation="bilinear", zorder=2)
    axis.add_patch(
        Rectangle((box.x, box.y), box.width, box.height, fill=False, edgecolor=GREY, linewidth=0.5, zorder=3)
    )


def _write(axis: Axes, box: Box, lines: Sequence[tuple[str, str]], size: float, weight: str = "normal") -> None:
    """Write lines of text in their colours, from the top of the box."""
    for number, (line, color) in enumerate(lines):
        place = (box.x, box.y + LINE * (number + 0.5))
        axis.text(*place, line, fontsize=size, weight=weight, color=color, va="center", parse_math=False)


def _draw_answers(axis: Axes, box: Box, ranked: Sequence[tuple[str, float]]) -> None:
    """Draw a line for each answer: its name, a bar for its probability, its probability."""
    names = min(max(_measure(ANSWER, "bold")(name) for name, _ in ranked) + 0.15, 0.5 * box.width)
    longest = box.width - names - 0.6
    for number, (name, probability) in enumerate(ranked):
        y = box.y + LINE * (number + 0.5)
        style = {"fontsize": ANSWER, "va": "center", "color": DARK, "weight": "bold" if number == 0 else "normal"}
        axis.text(box.x, y, name, parse_math=False, **style)
        bar = Rectangle(
            (box.x + names, y - 0.06), longest * probability, 0.12, color=HEAT(0.65) if number == 0 else "0.75"
        )
        axis.add_patch(bar)
        axis.text(box.x + names + longest * probability + 0.06, y, f"{100 * probability:.1f}%", **style)


def _draw_tree(
    axis: Axes,
    arrangement: Arrangement,
    tree: ProgramTree,
    labels: Sequence[Sequence[str]],
    image: Image.Image,
    maps: Sequence[torch.Tensor],
) -> None:
    pictures = arrangement.pictures
    for node, picture, name, lines, map_HW in zip(tree.nodes, pictures, arrangement.labels, labels, maps, strict=True):
        x = picture.middle[0]
        for argument in node.arguments:
            below = pictures[argument]
            halfway = (picture.bottom + below.y) / 2
            xs, ys = (x, x, below.middle[0], below.middle[0]), (picture.bottom, halfway, halfway, below.y)
            axis.plot(xs, ys, color=GREY, linewidth=1, zorder=1)
        _show(axis, picture, lit(image, map_HW))
        color = GREY if node.is_filled_in or node.unused else DARK
        text = "\n".join(lines)
        axis.text(name.x, name.middle[1], text, fontsize=LABEL, color=color, va="center", parse_math=False)
