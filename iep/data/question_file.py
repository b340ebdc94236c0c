"""A split's preprocessed HDF5 files -> arrays: all questions at once, features on demand (`features.py`).

A split is `{split}_questions.h5` and, for models that look, `{split}_features.h5`: the original toolkit's formats,
which `iep-preprocess` writes. Its own files hold checksums of what is in them, and what is read is checked against
these. Making batches is `datasets.py`.

Shapes: N questions, T question tokens, L program tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import h5py
import numpy as np

from iep.data.features import Features
from iep.data.hdf5 import REMEDY, damage_named, open_hdf5, read_attributes
from iep.errors import InputError
from iep.runtime.files import arrays_digest
from iep.vocab import Vocab

CONTENT_DIGEST = "content_digest"
"""The attribute of a questions file that holds the digest of its arrays."""


@dataclass(frozen=True)
class Questions:
    """The int64 arrays of a questions file, N questions; missing ones are None."""

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
        """The same file's questions at `rows`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v[rows] for k, v in values.items() if isinstance(v, np.ndarray)})


def read_questions(path: Path, vocab: Vocab) -> Questions:
    """Read a questions file whole and check it against the vocabulary.

    Raises:
        InputError: not HDF5, damaged, encoded with another vocabulary, a dataset is missing or has the wrong shape, a
            token is not in `vocab`, or an image index is below 0.
    """
    with open_hdf5(path) as file, damage_named(path):
        questions = file.get("questions")
        if not isinstance(questions, h5py.Dataset):
            raise InputError(f"{path}: has no dataset 'questions', expected a questions file of iep-preprocess")
        attributes = read_attributes(file)  # the original toolkit's files have none
        if attributes.get("vocab_digest", vocab.digest) != vocab.digest:
            raise InputError(f"{path}: was encoded with another vocabulary than the vocab.json beside it")
        count = len(questions) if questions.ndim else 0
        arrays = {
            name: _read_array(file, name, dimensions, count, required)
            for name, dimensions, required in (
                ("questions", 2, True),
                ("image_idxs", 1, True),
                ("orig_idxs", 1, False),
                ("question_families", 1, False),
                ("programs", 2, False),
                ("answers", 1, False),
            )
        }
        content = {name: values for name, values in arrays.items() if values is not None}
        if CONTENT_DIGEST in attributes and attributes[CONTENT_DIGEST] != arrays_digest(content):
            raise InputError(f"{path}: damaged, its arrays are not those that were written; {REMEDY}")
    for name, tokens in (
        ("questions", vocab.question),
        ("programs", vocab.program),
        ("answers", vocab.answer),
    ):
        _check_tokens(path, name, arrays[name], tokens)
    if count and arrays["image_idxs"].min() < 0:
        row = int(np.argmax(arrays["image_idxs"] < 0))
        raise InputError(f"{path}: image_idxs, row {row}: {arrays['image_idxs'][row]}, expected 0 or more")
    if arrays["orig_idxs"] is None:
        arrays["orig_idxs"] = np.arange(count)
    return Questions(path=Path(path), families=arrays.pop("question_families"), **arrays)


def _read_array(file: h5py.File, name: str, dimensions: int, count: int, required: bool) -> np.ndarray | None:
    if name not in file and not required:
        return None
    if name not in file:
        raise InputError(f"{file.filename}: has no dataset {name!r}")
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset):
        raise InputError(f"{file.filename}: {name!r} is no dataset, expected integers")
    fits = dataset.ndim == dimensions and len(dataset) == count and dataset.dtype.kind in "iu"
    if not fits or dataset.shape[1:] in ((0,), (1,)):
        expected = f"({count},)" if dimensions == 1 else f"({count}, 2 or more)"
        raise InputError(f"{file.filename}: {name} is {dataset.shape} {dataset.dtype}, expected integers {expected}")
    try:
        return dataset[()].astype(np.int64)
    except OSError as error:
        raise InputError(f"{file.filename}: {name} cannot be read ({' '.join(str(error).split())})") from None


def _check_tokens(path: Path, name: str, values: np.ndarray | None, tokens: Sequence[str]) -> None:
    if values is None:
        return
    bad = np.argwhere((values < 0) | (values >= len(tokens)))
    if len(bad):
        row = bad[0][0]
        raise InputError(
            f"{path}: {name}, row {row}: index {values[tuple(bad[0])]} is not in the vocabulary of {len(tokens)} "
            "tokens; expected the vocab.json that was made with it"
        )


def split_files(data: Path, split: str) -> tuple[Path, Path]:
    """The questions and features files of a split in a directory that `iep-preprocess` wrote."""
    return data / f"{split}_questions.h5", data / f"{split}_features.h5"


def training_split(data: Path) -> str | None:
    """The split that the models for `data` learn from: the first whose name begins with `train`, None without any."""
    suffix = split_files(data, "")[0].name
    return min((path.name.removesuffix(suffix) for path in data.glob(f"train*{suffix}")), default=None)


@dataclass(frozen=True)
class Split:
    """One split's questions and, where the model looks, features."""

    questions: Questions
    features: Features | None
    total: int
    """Number of questions in the file, of which `questions` may be some."""


def open_split(
    data: Path,
    split: str,
    vocab: Vocab,
    with_features: bool,
    num_samples: int | None,
    in_memory: bool = False,
    choose: Callable[[Questions], Questions] | None = None,
    skip: int = 0,
) -> Split:
    """Questions of a split and its features, read into memory if so asked.

    The questions are what `choose` leaves (None: all), without the first `skip` of these, and of the rest the first
    `num_samples` (None: all).

    Raises:
        InputError: a file is missing, damaged or made with another vocabulary, there is no question, or memory is
            short; or what `choose` raises.
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
    if features is not None and in_memory:
        features = features.in_memory()
    end = None if num_samples is None else skip + num_samples
    return Split(questions.select(slice(skip, end)), features, total)
