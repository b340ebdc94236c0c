"""A split's preprocessed HDF5 files -> arrays: all questions at once, features on demand (`features.py`).

A split is `{split}_questions.h5` and, for models that read images, `{split}_features.h5`, in the original toolkit's
formats. The files that `iep-preprocess` writes hold checksums of their content, which are compared on reading.
`datasets.py` makes batches of them.

Shapes: N questions, T question tokens, L program tokens.
"""

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from iep.data.features import REMEDY, Features, open_hdf5, own_dataset, read_attributes
from iep.errors import InputError
from iep.runtime.distributed import attempt, broadcast, world_size
from iep.runtime.files import arrays_digest
from iep.vocab import END, Vocab

CONTENT_DIGEST = "content_digest"
"""The attribute of a questions file that holds the digest of its arrays."""
DATASETS = {"questions": 2, "image_idxs": 1, "orig_idxs": 1, "question_families": 1, "programs": 2, "answers": 1}
"""The datasets of a questions file and their numbers of dimensions."""
REQUIRED = ("questions", "image_idxs")


@dataclass(frozen=True)
class Questions:
    """The int64 arrays of a questions file with N questions, with None for datasets that the file does not have."""

    path: Path
    questions: np.ndarray
    """(N, T) question tokens."""
    image_idxs: np.ndarray
    """(N,) image index of each question."""
    orig_idxs: np.ndarray
    """(N,) CLEVR's `question_index`."""
    families: np.ndarray | None
    """(N,) CLEVR's `question_family_index`."""
    programs: np.ndarray | None
    """(N, L) prefix program tokens."""
    answers: np.ndarray | None
    """(N,) answer indices."""

    def __len__(self) -> int:
        return len(self.questions)

    def select(self, rows: slice | np.ndarray) -> "Questions":
        """Return the questions at `rows`."""
        return replace(self, **{name: value[rows] for name, value in self._arrays.items()})

    @property
    def digest(self) -> str:
        """The digest of the arrays."""
        return arrays_digest(self._arrays)

    @property
    def _arrays(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}


def read_questions(path: Path, vocab: Vocab) -> Questions:
    """Read a whole questions file and check it against the vocabulary.

    Raises:
        InputError: the file is missing, damaged, not HDF5 or encoded with another vocabulary, a dataset is missing,
            stored in another file or has a wrong shape, a token is not in `vocab`, a question or a program has no
            token, or an image index is negative.
    """
    with open_hdf5(path) as file:
        attributes = read_attributes(file)  # the original toolkit's files have none
        if attributes.get("vocab_digest", vocab.digest) != vocab.digest:
            raise InputError("was encoded with another vocabulary than the vocab.json beside it")
        arrays = _read_arrays(file)
        if attributes.get(CONTENT_DIGEST, digest := arrays_digest(arrays)) != digest:
            raise InputError(f"is damaged, its arrays are not those that were written; {REMEDY}")
        limits = {"questions": vocab.question, "programs": vocab.program, "answers": vocab.answer}
        for name, tokens in limits.items():
            values = arrays.get(name, np.empty(0))
            bad = np.argwhere((values < 0) | (values >= len(tokens)))
            if len(bad):
                raise InputError(
                    f"{name}, row {bad[0][0]}: index {values[tuple(bad[0])]} is not in the vocabulary of {len(tokens)} "
                    "tokens; expected the vocab.json that was made with it"
                )
        for name in ("questions", "programs"):
            last_N = arrays.get(name, np.empty((0, 2))).max(axis=1)
            if len(empty := np.flatnonzero(last_N <= END)):
                raise InputError(f"{name}, row {empty[0]}: holds no token, expected at least one")
        images_N = arrays["image_idxs"]
        if len(negative := np.flatnonzero(images_N < 0)):
            raise InputError(f"image_idxs, row {negative[0]}: is {images_N[negative[0]]}, expected 0 or more")
    arrays.setdefault("orig_idxs", np.arange(len(arrays["questions"])))
    parts: dict[str, Any] = {name: arrays.get(name) for name in DATASETS}
    return Questions(path=Path(path), families=parts.pop("question_families"), **parts)


def _read_arrays(file: h5py.File) -> dict[str, np.ndarray]:
    """Return the datasets of a questions file that exist as int64 arrays.

    Raises:
        InputError: a required dataset is missing, or a dataset is stored in another file or has a wrong shape or type.
    """
    arrays: dict[str, np.ndarray] = {}
    for name, dimensions in DATASETS.items():
        if name not in file and name not in REQUIRED:
            continue
        dataset = own_dataset(file, name)
        count = len(arrays.get("questions", dataset)) if dataset.ndim else 0
        fits = dataset.ndim == dimensions and len(dataset) == count and dataset.dtype.kind in "iu"
        if not fits or dataset.shape[1:] in ((0,), (1,)):
            expected = f"({count},)" if dimensions == 1 else f"({count}, 2 or more)"
            raise InputError(f"{name} is {dataset.shape} {dataset.dtype}, expected integers {expected}")
        arrays[name] = dataset[()].astype(np.int64)
    return arrays


def split_files(data: Path, split: str) -> tuple[Path, Path]:
    """Return the paths of a split's questions and features files in a directory that `iep-preprocess` wrote."""
    return data / f"{split}_questions.h5", data / f"{split}_features.h5"


def load_vocab(data: Path) -> Vocab:
    """Return the vocabulary of a directory that `iep-preprocess` wrote.

    Raises:
        InputError: `data` is a CLEVR directory, which must be preprocessed first, or its `vocab.json` is missing or not
            a vocabulary.
    """
    path = data / "vocab.json"
    if not path.exists() and (data / "questions").is_dir():
        command = f"iep-preprocess {shlex.quote(str(data))} --out DIR"
        raise InputError(f"{data}: not preprocessed yet; run {command}, and then give --data DIR")
    return Vocab.load(path)


def training_split(data: Path) -> str | None:
    """Return the first split in `data` whose name begins with `train`, or None if there is no such split."""
    suffix = split_files(data, "")[0].name
    return min((path.name.removesuffix(suffix) for path in data.glob(f"train*{suffix}")), default=None)


@dataclass(frozen=True)
class Split:
    """The questions of a split and, for a model that reads images, their features."""

    questions: Questions
    features: Features | None
    total: int
    """The number of questions in the file, of which `questions` may be only some."""

    def in_memory(self, workers: int = 0) -> "Split":
        """Return the split with its features in memory. All processes must call this, as for `Features.in_memory`."""
        return replace(self, features=self.features and self.features.in_memory(workers))


def open_split(
    data: Path,
    split: str,
    vocab: Vocab,
    with_features: bool,
    num_samples: int | None,
    choose: Callable[[Questions], Questions] | None = None,
    skip: int = 0,
) -> Split:
    """Open a split: read its questions, and open its features.

    Args:
        with_features: also open the features.
        num_samples: use at most this many questions; None for all.
        choose: a function that selects questions before `skip` and `num_samples` apply; None for all.
        skip: the number of questions to leave out at the beginning.

    Raises:
        InputError: a file is missing, damaged or made with another vocabulary, or no question is left. `choose` may
            raise it as well.
    """
    questions_path, features_path = split_files(data, split)
    questions = read_questions(questions_path, vocab)
    total = len(questions)
    if not total:
        raise InputError(f"{questions_path}: holds no question")
    if choose is not None:
        questions = choose(questions)
    if len(questions) <= skip:
        raise InputError(f"{questions_path}: of {len(questions)} questions the first {skip} are skipped, none is left")
    features = Features(features_path) if with_features else None
    end = None if num_samples is None else skip + num_samples
    return Split(questions.select(slice(skip, end)), features, total)


def check_same_data(data: Path, vocab: Vocab, splits: Iterable[Split | None]) -> None:
    """Check that all processes have opened the same data; each may read a copy of its own.

    Args:
        data: the directory of this process's copy.

    Raises:
        InputError: a file of some process is not that of the first process (names both). It is raised in the main
            process, and the others exit.
    """
    if world_size() == 1:
        return
    mine = {Path("vocab.json"): vocab.digest}
    for split in filter(None, splits):
        parts = (split.questions, split.features)
        mine |= {part.path.relative_to(data): part.digest for part in parts if part is not None}
    first = broadcast(mine)

    def compare() -> None:
        for path in first | mine:
            if first.get(path) != mine.get(path):
                raise InputError(f"{data / path} is not the same as in process 0; all processes need the same data")

    attempt(compare)
