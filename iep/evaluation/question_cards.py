"""The questions that the HTML report lists, with small pictures of their images and their programs side by side.

The page needs no other file: each picture is in it once, as a data URI. Programs are shown as the lines of their trees,
whether they are well-formed or not.

Shapes: N questions, R of them listed, L program tokens.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from iep.errors import InputError
from iep.evaluation.outcome import Outcome
from iep.execution_engine.roles import ModuleSet, tree_run
from iep.preprocess.clevr_files import image_directories, image_number, png_files
from iep.preprocess.images import open_image
from iep.preprocess.recipe import listing, value_digest
from iep.programs import NOT_USED, program_tree
from iep.runtime.pictures import data_uri, heat_uri
from iep.vocab import Vocab

FILLED_IN, IGNORED = "filled in", "ignored"
REMARKS = {
    FILLED_IN: "the program has no function here, and the engine uses the scene.",
    IGNORED: "these functions come after the tree is complete and do not run.",
    NOT_USED: "this value is an attention where an encoding is needed, or the reverse; the engine uses the scene.",
}
"""The page's explanation of each kind of line that is not a plain function of the program."""


class Pictures:
    """The pictures of a page, each read at its first use."""

    def __init__(self, clevr_dir: Path, split: str):
        """Find the split's images, by the index in their names.

        Raises:
            InputError: `clevr_dir` has no images of the split.
        """
        directories = image_directories(clevr_dir)
        if split not in directories:
            found = f", found images of {', '.join(directories)}" if directories else ""
            raise InputError(f"{clevr_dir / 'images' / split}: no such directory, expected the split's images{found}")
        self.directory = directories[split]
        self._paths = {image_number(path.name): path for path in sorted(png_files(self.directory))}
        self.by_key: dict[int, str] = {}
        """The data URIs of the pictures by image index."""
        self.problems: dict[int, str] = {}
        """The reasons why there is no picture, by image index."""

    def is_of(self, count: int, digest: str) -> bool:
        """Return whether the first `count` images are those of a features file with this digest of names and sizes."""
        if not all(index in self._paths for index in range(count)):
            return False
        return value_digest(listing(self._paths[index] for index in range(count))) == digest

    def has(self, image: int) -> bool:
        """Read the picture of an image into `by_key`, or the reason why there is none into `problems`.

        Returns:
            whether there is a picture.
        """
        if image not in self.by_key and image not in self.problems:
            path = self._paths.get(image)
            try:
                if path is None:
                    raise InputError(f"{self.directory}: no image with index {image}")
                self.by_key[image] = data_uri(open_image(path))
            except InputError as error:
                self.problems[image] = str(error)
        return image in self.by_key


Maps = Callable[[int], list[tuple[int, str, np.ndarray]]]
"""A function from the row of a question to the functions that ran, in prefix order. Each has its depth in the program's
tree, its name, and a map (H, W) from 0 to 1 of where it looked."""
MOST_MAPS = 100
"""The most wrong answers with maps; with a dozen functions of half a kilobyte each, they are a small part of a page."""


class Line(NamedTuple):
    """One line of a tree: its depth, its token and its kind, which is empty or a key of `REMARKS`."""

    depth: int
    token: str
    kind: str


def program_lines(program_L: np.ndarray, vocab: Vocab, own: ModuleSet | None = None) -> list[Line]:
    """Return the lines of a program's tree in prefix order, followed by the tokens that are ignored after it.

    Args:
        program_L: program tokens with `<START>`, `<END>` and padding.
        vocab: the vocabulary of the tokens.
        own: the modules that run the program; None where no engine does.
    """
    tokens = [vocab.program[token] for token in np.asarray(program_L).tolist()]
    tree = program_tree(tokens) if own is None else tree_run(tokens, own)
    lines = [
        Line(node.depth, node.token, NOT_USED if node.unused else FILLED_IN if node.is_filled_in else "")
        for node in tree.nodes
    ]
    return lines + [Line(0, token, IGNORED) for token in tree.ignored]


def differ(one: Line | None, other: Line | None) -> bool:
    """Return whether two lines differ in token or kind, or one is missing.

    Depth does not count: below a function that only one tree has, the rest differs only in depth.
    """
    return one is None or other is None or one[1:] != other[1:]


def side_by_side(left: Sequence[Line], right: Sequence[Line]) -> list[tuple[Line | None, Line | None]]:
    """Return the lines of both trees as rows of two columns, with equal lines in the same row as far as possible."""
    matcher = SequenceMatcher(None, [line[1:] for line in left], [line[1:] for line in right], autojunk=False)
    blocks = (zip_longest(left[a:b], right[c:d]) for _, a, b, c, d in matcher.get_opcodes())
    return list(chain.from_iterable(blocks))


def choose(outcome: Outcome, most: int) -> np.ndarray:
    """Return the rows (R,) of at most `most` questions to list, the worst first.

    Wrong answers come first, then right answers with wrong programs, both with the most confident before the others;
    then all others, the least confident first. If there are more than `most` questions, they are taken in turn from
    every question family (or from every type where families are unknown), the worst of each first.
    """
    count, probabilities = len(outcome.questions), outcome.predictions.ranked_probabilities
    confidence_N = np.zeros(count) if probabilities is None else probabilities[:, 0]
    right_N, exact_N = (np.ones(count, bool) if good_N is None else good_N for good_N in (outcome.right, outcome.exact))
    group_N = np.where(right_N, np.where(exact_N, 2, 1), 0)
    order_N = np.lexsort((np.where(group_N == 2, confidence_N, -confidence_N), group_N))
    kinds_N = outcome.types if outcome.questions.families is None else outcome.questions.families
    turns, seen = [], Counter[int]()
    for kind in kinds_N[order_N].tolist():
        turns.append(seen[kind])
        seen[kind] += 1
    return order_N[np.sort(np.argsort(turns, kind="stable")[:most])]


def question_cards(outcome: Outcome, pictures: Pictures | None, maps: Maps | None = None) -> list[dict[str, Any]]:
    """Return the contents of each question's card on the page.

    A card has the keys of the question's row in predictions.jsonl and these: `ranked`, pairs of answer and probability;
    `programs`, the lines of the true and the predicted program side by side; `remarks`, the kinds of lines of the
    predicted program; `picture`, whether there is a picture; `maps`, the depth, name and map (a data URI) of each
    function, for the first wrong answers; and `data`, the attributes by which the page filters, None where unknown.
    """
    cards = []
    for n, row in enumerate(outcome.rows()):
        true, predicted = (
            [] if programs is None else program_lines(programs[n], outcome.vocab, outcome.modules)
            for programs in (outcome.questions.programs, outcome.predictions.programs)
        )
        answer, program = (
            None if good_N is None else "right" if good_N[n] else "wrong" for good_N in (outcome.right, outcome.exact)
        )
        picture = pictures is not None and pictures.has(row["image_index"])
        shows_maps = picture and answer == "wrong" and n < MOST_MAPS
        more = {
            "ranked": outcome.ranked(n),
            "programs": side_by_side(true, predicted) if true and predicted else list(zip_longest(true, predicted)),
            "remarks": list(dict.fromkeys(line.kind for line in predicted if line.kind)),
            "picture": picture,
            "maps": [(*each, heat_uri(map_HW)) for *each, map_HW in maps(n)] if maps is not None and shows_maps else (),
            "data": {name: row.get(name) for name in ("type", "family")} | {"answer": answer, "program": program},
        }
        cards.append(row | more)
    return cards
