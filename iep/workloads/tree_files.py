"""Files of the Stanford Sentiment Treebank and of SICK -> trees.

The formats are those in which the two are distributed: bracketed constituency trees with a label on every vertex
(Socher et al. 2013, Recursive Deep Models for Semantic Compositionality Over a Sentiment Treebank), and dependency
trees as lists of parents (the preprocessed data of Tai et al. 2015, Improved Semantic Representations From
Tree-Structured Long Short-Term Memory Networks, section 5.2). Raw text is not parsed.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from iep.errors import InputError
from iep.runtime.reading import reading
from iep.workloads.trees import SENTIMENTS, Tree, TreePair, tree_from_parents

UNKNOWN = "<unk>"
SST_TOKEN = re.compile(r"[()]|[^() ]+")
"""The tokens of a line. Only spaces separate words, because words of the treebank may contain other white space."""
WORD = re.compile(r"[^ ]+")
SICK_PARENT = re.compile(r"-?[0-9]+")
RELATEDNESS = re.compile(r"[0-9]+(\.[0-9]+)?")


def read_lines(path: Path) -> list[str]:
    """Return the lines of a UTF-8 file. Only line feeds end lines.

    Raises:
        InputError: as `reading`, or the file is not UTF-8.
    """
    with reading(path, "UTF-8 text"):
        return Path(path).read_text(encoding="utf-8").removesuffix("\n").split("\n")


def index_words(words: Iterable[str]) -> dict[str, int]:
    """Return the indices of the distinct words in alphabetical order, from 1; 0 is the index of `UNKNOWN`."""
    return {UNKNOWN: 0} | {word: n for n, word in enumerate(sorted(set(words) - {UNKNOWN}), start=1)}


def read_sst(path: Path, word_to_idx: Mapping[str, int] | None = None) -> tuple[list[Tree], Mapping[str, int]]:
    """Read a file of bracketed trees, one for each line, such as `(3 (2 It) (4 works))`; empty lines are skipped.

    Args:
        path: a file such as `train.txt` in the treebank's `trees` directory.
        word_to_idx: the index of each known word, and of `UNKNOWN` for all others; None to number the file's words.

    Returns:
        Binary trees with the `labels` of all vertices, and the indices of the words.

    Raises:
        InputError: the file cannot be read, or a line is not such a tree; the message names line and token.
    """
    parsed = [_parse_sst(line, f"{path}, line {n}") for n, line in enumerate(read_lines(path), start=1) if line.strip()]
    if not parsed:
        raise InputError(f"{path}: no trees, expected one a line, such as (3 (2 It) (4 works))")
    if word_to_idx is None:
        word_to_idx = index_words(word for _, words, _ in parsed for word in words if word is not None)
    trees = []
    for children, words, labels in parsed:
        indices = [-1 if word is None else word_to_idx.get(word, word_to_idx[UNKNOWN]) for word in words]
        trees.append(Tree(np.array(children), np.array(indices), labels[-1], np.array(labels)))
    return trees, word_to_idx


def _parse_sst(line: str, where: str) -> tuple[list[tuple[int, int]], list[str | None], list[int]]:
    """Return the children, the word and the label of every vertex, children first."""
    children, words, labels = [], [], []
    opened: list[list[int | str]] = []  # for each open vertex its label, then its word or its children's numbers
    for number, token in enumerate(SST_TOKEN.findall(line), start=1):
        at = f"{where}, token {number}: {token!r}"
        if not opened and (labels or token != "("):
            raise InputError(f"{at}, expected {'the end of the line' if labels else '('}")
        if opened and not opened[-1]:
            if token not in map(str, range(SENTIMENTS)):
                raise InputError(f"{at}, expected a label 0 to {SENTIMENTS - 1}")
            opened[-1].append(int(token))
        elif token == "(":
            opened.append([])
        elif token != ")":
            opened[-1].append(token)
        else:
            label, *parts = opened.pop()
            kinds = [type(part) for part in parts]
            if kinds not in ([str], [int, int]):
                raise InputError(f"{at} ends a vertex of {len(parts)} parts, expected a word or two vertices")
            words.append(parts[0] if kinds == [str] else None)
            children.append((-1, -1) if kinds == [str] else tuple(parts))
            labels.append(label)
            if opened:
                opened[-1].append(len(labels) - 1)
    if opened:
        raise InputError(f"{where}: ends with {len(opened)} brackets open")
    return children, words, labels


def read_sick(
    directory: Path, word_to_idx: Mapping[str, int] | None = None
) -> tuple[list[TreePair], Mapping[str, int]]:
    """Read pairs of dependency trees from a directory with `a.toks`, `a.parents`, `b.toks`, `b.parents`, `sim.txt`.

    Line n of every file belongs to pair n: words separated by spaces; for each word the position of its parent, from 1,
    0 for the root and -1 for words outside of the tree; and the relatedness, a number. Every vertex has a word. The
    children of a vertex are in the order of the sentence.

    Args:
        directory: a directory such as `train` of the data that Tree-LSTM implementations preprocess.
        word_to_idx: as for `read_sst`.

    Raises:
        InputError: a file cannot be read, files have different numbers of lines, a line is empty, or its parents do not
            form a tree; the message names file, line and word.
    """
    parts = [directory / name for name in ("a.toks", "a.parents", "b.toks", "b.parents", "sim.txt")]
    lines = [read_lines(part) for part in parts]
    for part, found in zip(parts, lines, strict=True):
        if len(found) != len(lines[0]):
            raise InputError(f"{part}: {len(found)} lines, expected {len(lines[0])} as in {parts[0].name}")
    if word_to_idx is None:
        word_to_idx = index_words(word for line in (*lines[0], *lines[2]) for word in WORD.findall(line))
    pairs = []
    for n, (a_words, a_parents, b_words, b_parents, similar) in enumerate(zip(*lines, strict=True), start=1):
        if not RELATEDNESS.fullmatch(similar):
            raise InputError(f"{parts[4]}, line {n}: {similar!r}, expected a number, such as 4.5")
        relatedness = float(similar)
        left = _sick_tree(a_words, a_parents, relatedness, word_to_idx, f"{parts[1]}, line {n}")
        right = _sick_tree(b_words, b_parents, relatedness, word_to_idx, f"{parts[3]}, line {n}")
        pairs.append(TreePair(left, right, relatedness))
    return pairs, word_to_idx


def _sick_tree(sentence: str, parents: str, relatedness: float, word_to_idx: Mapping[str, int], where: str) -> Tree:
    words, heads = WORD.findall(sentence), WORD.findall(parents)
    if len(words) != len(heads):
        raise InputError(f"{where}: {len(heads)} parents, expected {len(words)}, one a word")
    parent = np.empty(len(heads), dtype=np.int64)
    for n, head in enumerate(heads):
        if not SICK_PARENT.fullmatch(head) or not -1 <= int(head) <= len(heads):
            raise InputError(f"{where}, word {n + 1}: {head!r}, expected a parent, -1 to {len(heads)}")
        parent[n] = int(head)
    used = np.flatnonzero(parent >= 0)
    if (parent == 0).sum() != 1:
        raise InputError(f"{where}: {(parent == 0).sum()} roots (parent 0), expected 1")
    if (parent[parent[used][parent[used] > 0] - 1] < 0).any():
        raise InputError(f"{where}: a parent is in no tree")
    position = np.full(len(heads) + 1, -1)
    position[used + 1] = np.arange(len(used))
    indices = np.array([word_to_idx.get(words[n], word_to_idx[UNKNOWN]) for n in used], dtype=np.int64)
    try:
        return tree_from_parents(position[parent[used]], indices, relatedness)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None
