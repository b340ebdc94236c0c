"""Question families (CLEVR's templates), from a list or by the length of their programs -> their questions.

Johnson et al. 2017 (Inferring and Executing Programs, section 4.4, on generalising to new question types) train on the
families with short programs and test on the others. `question_file.open_split` applies the filter to a split.

Shapes: N questions, L program tokens.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from iep.data.question_file import Questions, read_questions
from iep.errors import InputError
from iep.runtime.reading import parse_yaml, reading
from iep.vocab import END, NULL, START, Vocab

SHORT, LONG = "short", "long"
EXPECTED = "a file that lists question families, or one of the words short and long"
LONG_FROM = 16
"""The least mean program length of a long family."""


def family_filter(families: str, train_path: Path | None, vocab: Vocab) -> Callable[[Questions], Questions]:
    """Return a function that selects the questions of the `families`: a file that lists them, `short` or `long`.

    Families with a mean program length below 16 are short, and the others are long (Johnson et al. 2017, section 4.4).
    A program's length is the number of its functions, including `scene`. The mean is over the training questions in
    `train_path`, or over the questions to select from for families that have no programs there.

    Raises:
        InputError: the file does not hold a list of whole numbers from 0. The returned function raises it if questions
            have no families, a family has no programs, or no question is left.
    """
    listed: Sequence[int] | None = None
    of_training: dict[int, float] = {}
    if families not in (SHORT, LONG):
        listed = read_families(Path(families))
    elif train_path is not None and train_path.exists():
        of_training = mean_lengths(read_questions(train_path, vocab))

    def choose(questions: Questions) -> Questions:
        if questions.families is None:
            raise InputError(f"{questions.path}: has no dataset 'question_families', by which families are chosen")
        found = np.unique(questions.families).tolist()
        chosen = listed
        if chosen is None:
            lengths = mean_lengths(questions) | of_training
            if unknown := [family for family in found if family not in lengths]:
                raise InputError(f"{questions.path}: no program tells whether family {unknown[0]} is short or long")
            chosen = [family for family in found if (lengths[family] < LONG_FROM) == (families == SHORT)]
        rows = np.flatnonzero(np.isin(questions.families, chosen))
        if not len(rows):
            raise InputError(f"{questions.path}: no question of the families {families}, only of {found}")
        return questions.select(rows)

    return choose


def read_families(path: Path) -> tuple[int, ...]:
    """Return the list of CLEVR's `question_family_index` in a JSON or YAML file, such as the original toolkit's.

    Raises:
        InputError: the file cannot be read, or does not hold a list of whole numbers from 0 (names the item).
    """
    with reading(path, EXPECTED):
        content = parse_yaml(path.read_text(encoding="utf-8"))  # JSON is YAML
        if not isinstance(content, list) or not content:
            raise InputError("expected a list of question families, such as [0, 3, 12]")
        for position, family in enumerate(content):
            if type(family) is not int or family < 0:
                raise InputError(f"item {position} is {family!r}, expected a whole number from 0")
    return tuple(content)


def mean_lengths(questions: Questions) -> dict[int, float]:
    """Return the mean number of functions, including `scene`, in the programs of each family that has programs."""
    if questions.programs is None or questions.families is None:
        return {}
    lengths_N = (~np.isin(questions.programs, (NULL, START, END))).sum(axis=1)
    families, index_N = np.unique(questions.families, return_inverse=True)
    means = np.bincount(index_N, lengths_N) / np.bincount(index_N)
    return dict(zip(families.tolist(), means.tolist(), strict=True))
