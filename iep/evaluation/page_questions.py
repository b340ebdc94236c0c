"""The questions that the HTML report lists, as objects with small pictures of their images and programs side by side.

Pictures are data URIs, each once, for a page that needs no other file. Programs are the lines of their trees, whether
well-formed or not.

Shapes: N questions.
"""

import base64
import io
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from enum import IntEnum
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from iep.errors import InputError
from iep.evaluation.outcome import Outcome, question_text
from iep.execution_engine.roles import ModuleSet, tree_run
from iep.preprocess.clevr_files import image_directories, image_number, png_files
from iep.preprocess.images import open_image
from iep.preprocess.recipe import listing, value_digest
from iep.programs import Node, program_tree
from iep.vocab import NULL, Vocab

WIDTH = 320
"""Pixels; smaller images stay as they are."""
QUALITY = 75
"""Of JPEG, up to 95."""


class Pictures:
    """The pictures that a page needs, read when first asked for."""

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
        """Data URIs by image index."""
        self.problems: dict[int, str] = {}
        """Why there is no picture, by image index."""

    def is_of(self, count: int, digest: str) -> bool:
        """Are the first `count` images those of a features file with this digest of names and sizes?"""
        if not all(index in self._paths for index in range(count)):
            return False
        return value_digest(listing(self._paths[index] for index in range(count))) == digest

    def key(self, image: int) -> int | None:
        """The key in `by_key` of the picture of image `image`; None where there is none, for a reason in `problems`."""
        if image not in self.by_key and image not in self.problems:
            path = self._paths.get(image)
            try:
                if path is None:
                    raise InputError(f"{self.directory}: no image with index {image}")
                self.by_key[image] = data_uri(open_image(path))
            except InputError as error:
                self.problems[image] = str(error)
        return image if image in self.by_key else None


def data_uri(image: Image.Image) -> str:
    """The image, at most `WIDTH` pixels wide, as a JPEG in a data URI."""
    small = image.copy()
    small.thumbnail((WIDTH, 4 * WIDTH), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    small.save(content, "JPEG", quality=QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(content.getvalue()).decode("ascii")


class Kind(IntEnum):
    """What a line of a tree is."""

    FUNCTION = 0
    """A token of the program."""
    FILLED_IN = 1
    """A `scene` that the program lacks: it has `<NULL>` there, or had ended."""
    IGNORED = 2
    """A token after the tree is complete, which does not run."""
    NOT_USED = 3
    """A function whose value is of another kind than what is to take it, or one below it."""


class Line(NamedTuple):
    """One line: how deep in the tree, which token, and of what kind."""

    depth: int
    token: str
    kind: Kind


def program_lines(program_L: np.ndarray, vocab: Vocab, own: ModuleSet | None = None) -> list[Line]:
    """The lines of the tree that a program stands for, from its root by depth-first search, and of what is ignored.

    Args:
        program_L: program tokens with `<START>`, `<END>` and padding.
        vocab: what they are indices of.
        own: the modules that run it; None where nothing does.
    """
    tokens = [vocab.program[token] for token in np.asarray(program_L).tolist()]
    tree = program_tree(tokens) if own is None else tree_run(tokens, own)
    lines = [Line(node.depth, node.token, _kind(node)) for node in tree.nodes]
    return lines + [Line(0, token, Kind.IGNORED) for token in tree.ignored]


def _kind(node: Node) -> Kind:
    if node.unused:
        return Kind.NOT_USED
    return Kind.FILLED_IN if node.is_filled_in else Kind.FUNCTION


def side_by_side(left: Sequence[Line], right: Sequence[Line]) -> list[tuple[int | None, int | None]]:
    """Rows of two columns: the lines of both trees by number, in order, equal ones in one row as far as possible.

    Lines are equal that have the same token and are of the same kind, however deep: below a function that only one
    tree has, the rest is the same but for its depth.
    """
    matcher = SequenceMatcher(None, *([line[1:] for line in lines] for lines in (left, right)), autojunk=False)
    rows: list[tuple[int | None, int | None]] = []
    for _, left_start, left_end, right_start, right_end in matcher.get_opcodes():
        for offset in range(max(left_end - left_start, right_end - right_start)):
            at_left, at_right = left_start + offset, right_start + offset
            rows.append((at_left if at_left < left_end else None, at_right if at_right < right_end else None))
    return rows


def choose(outcome: Outcome, most: int) -> np.ndarray:
    """(R,) rows of at most `most` questions to list, ascending.

    Of more, in turn: the wrong answers, most confident first; the wrong programs, likewise; one after the other of
    every pair of a true and a predicted answer; one after the other of every question family.
    """
    count = len(outcome.questions)
    if count <= most:
        return np.arange(count)
    confidence_N = _confidence(outcome)
    order_N = np.argsort(-confidence_N, kind="stable")
    sorts = [order_N[~good_N[order_N]] for good_N in (outcome.right, outcome.exact) if good_N is not None]
    answers, predicted = outcome.questions.answers, outcome.predictions.answers
    if predicted is not None:
        pairs_N = predicted if answers is None else answers * len(outcome.vocab.answer) + predicted
        sorts.append(_round_robin(pairs_N[order_N], order_N))
    kinds_N = outcome.types if outcome.questions.families is None else outcome.questions.families
    sorts.append(_round_robin(kinds_N, np.arange(count)))
    chosen = islice(dict.fromkeys(_in_turn([candidates.tolist() for candidates in sorts])), most)
    return np.array(sorted(chosen), dtype=np.int64)


def _confidence(outcome: Outcome) -> np.ndarray:
    probabilities = outcome.predictions.ranked_probabilities
    return np.zeros(len(outcome.questions)) if probabilities is None else probabilities[:, 0]


def _round_robin(keys_N: np.ndarray, rows_N: np.ndarray) -> np.ndarray:
    """`rows_N` reordered: the first of every key, then the second of every key, and so on."""
    by_key = np.argsort(keys_N, kind="stable")
    _, first, counts = np.unique(keys_N[by_key], return_index=True, return_counts=True)
    turn = np.arange(len(keys_N)) - np.repeat(first, counts)
    return rows_N[by_key[np.argsort(turn, kind="stable")]]


def _in_turn(lists: list[list[int]]) -> Iterator[int]:
    rounds = chain.from_iterable(zip_longest(*lists))
    return (row for row in rounds if row is not None)


def question_objects(outcome: Outcome, lengths_N: np.ndarray | None, pictures: Pictures | None) -> list[dict[str, Any]]:
    """The questions as objects: numbers are positions in the vocabulary's tokens and in `QUESTION_TYPES`.

    Keys: `index` (`question_index`), `image`, `picture` (the key of its picture, where there is one), `text`, `type`,
    `family`, `length`; `answer`; `ranked`, pairs of answer and probability; `right`, `exact`; `program` and
    `predicted`, the lines of the trees, the latter only where it differs from the true one, with the rows of both
    side by side in `rows`.
    What is unknown is None.
    """
    questions, predictions = outcome.questions, outcome.predictions
    objects = []
    for n in range(len(questions)):
        image = int(questions.image_idxs[n])
        ranked = predictions.ranked_answers is not None and zip(
            predictions.ranked_answers[n].tolist(),
            predictions.ranked_probabilities[n].tolist(),
            strict=True,
        )
        objects.append(
            {
                "index": int(questions.orig_idxs[n]),
                "image": image,
                "picture": None if pictures is None else pictures.key(image),
                "text": question_text(questions.questions[n], outcome.vocab.question),
                "type": int(outcome.types[n]) if outcome.types[n] >= 0 else None,
                "family": None if questions.families is None else int(questions.families[n]),
                "length": None if lengths_N is None or lengths_N[n] < 0 else int(lengths_N[n]),
                "answer": None if questions.answers is None else int(questions.answers[n]),
                "ranked": list(ranked) if ranked else None,
                "right": None if outcome.right is None else bool(outcome.right[n]),
                "exact": None if outcome.exact is None else bool(outcome.exact[n]),
                **_programs(outcome, n),
            }
        )
    return objects


def _programs(outcome: Outcome, n: int) -> dict[str, Any]:
    vocab = outcome.vocab
    own = outcome.modules
    true, predicted = (
        None if programs is None else program_lines(programs[n], vocab, own)
        for programs in (outcome.questions.programs, outcome.predictions.programs)
    )
    is_exact = outcome.exact is not None and outcome.exact[n]
    return {
        "program": _indexed(true, vocab),
        "predicted": None if is_exact else _indexed(predicted, vocab),
        "rows": side_by_side(true, predicted) if outcome.exact is not None and not is_exact else None,
    }


def _indexed(lines: list[Line] | None, vocab: Vocab) -> list[tuple[int, int, int]] | None:
    if lines is None:
        return None
    return [(line.depth, vocab.program_index.get(line.token, NULL), line.kind) for line in lines]
