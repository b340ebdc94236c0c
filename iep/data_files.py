"""A split's preprocessed HDF5 files -> arrays: all questions at once, features row by row on demand.

A split is `{split}_questions.h5` and, for models that look, `{split}_features.h5`: the original toolkit's formats,
which `iep-preprocess` writes. Its own files hold checksums of what is in them, and what is read is checked against
these. Making batches is `datasets.py`.

Shapes: N rows, T question tokens, L program tokens, C H W feature maps.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, fields, replace
from io import FileIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from iep.checksums import arrays_digest, row_checksums
from iep.distributed import barrier, broadcast, gather, local_rank
from iep.errors import InputError
from iep.memory import SharedMemory, attach, available_memory
from iep.together import attempt, raise_any
from iep.vocab import Vocab


def open_hdf5(path: Path) -> h5py.File:
    """The HDF5 file `path`, open for reading.

    Raises:
        InputError: it is missing, truncated, or not HDF5.
    """
    if not Path(path).is_file():
        raise InputError(f"{path}: no such file; iep-preprocess writes it")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise InputError(f"{path}: not a whole HDF5 file ({' '.join(str(error).split())})") from None


HDF5_ERRORS = (OSError, RuntimeError, LookupError, ValueError, TypeError, OverflowError)
"""What h5py raises of files whose structure is damaged."""


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Give what h5py raises of a damaged file's structure the form of our errors.

    Raises:
        InputError: names the file `path`.
    """
    try:
        yield
    except InputError:
        raise
    except HDF5_ERRORS as error:
        raise InputError(f"{path}: damaged ({' '.join(str(error).split())})") from None


def read_attributes(holder: h5py.File | h5py.Dataset) -> dict[str, Any]:
    """All attributes, texts as `str`."""
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in holder.attrs.items()}


CONTENT_DIGEST = "content_digest"
"""The attribute of a questions file that holds the digest of its arrays."""
REMEDY = "iep-preprocess --verify --overwrite makes the file anew"


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


class Features:
    """Rows of a features file, read on demand; safe to hand to worker processes (each opens its own handle).

    Attributes:
        path: the file.
        shape: (N, C, H, W).
        dtype: of the values, float16, float32 or float64.
    """

    def __init__(self, path: Path):
        """Check the file.

        Raises:
            InputError: not HDF5, damaged, no dataset `features`, or not (N, C, H, W) floating point.
        """
        self.path = Path(path)
        with open_hdf5(path) as file, damage_named(path):
            dataset = file.get("features")
            if not isinstance(dataset, h5py.Dataset):
                raise InputError(f"{path}: has no dataset 'features', expected a features file of iep-preprocess")
            if dataset.ndim != 4 or dataset.dtype.newbyteorder("=") not in FLOATS or 0 in dataset.shape[1:]:
                raise InputError(f"{path}: features is {dataset.shape} {dataset.dtype}, expected (N, C, H, W) floats")
            self.shape: tuple[int, int, int, int] = dataset.shape
            self.dtype = dataset.dtype.newbyteorder("=")
            self._offset = _offset_of_plain_rows(dataset)
            self._checksums_N = _read_checksums(file, len(dataset))
        self._memory: SharedMemory | None = None
        self._bytes: FileIO | None = None
        self._dataset: h5py.Dataset | None = None

    def __len__(self) -> int:
        return self.shape[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bytes": None, "_dataset": None}

    @property
    def row_bytes(self) -> int:
        """Bytes of one image's features."""
        return int(np.prod(self.shape[1:])) * self.dtype.itemsize

    def read(self, rows: np.ndarray, allocate: Callable[..., np.ndarray] = np.empty) -> torch.Tensor:
        """(N, C, H, W) features of the images `rows` (N,), of the file's dtype, checked where the file has checksums.

        Args:
            allocate: (shape, dtype) -> the array to read into, C-contiguous.

        Raises:
            InputError: a row cannot be read or is damaged (names it).
        """
        values_NCHW = allocate((len(rows), *self.shape[1:]), self.dtype)
        self._announce(rows)
        for row, values_CHW in zip(rows.tolist(), values_NCHW, strict=True):
            try:
                self._read_row(row, values_CHW)
            except HDF5_ERRORS as error:
                what = " ".join(str(error).split())
                raise InputError(f"{self.path}: features, row {row} cannot be read ({what})") from None
            if self._checksums_N is not None and row_checksums(values_CHW[None])[0] != self._checksums_N[row]:
                raise InputError(f"{self.path}: features, row {row} is damaged, its checksum differs; {REMEDY}")
        return torch.from_numpy(values_NCHW)

    def verify(self) -> None:
        """Read every row.

        Raises:
            InputError: one cannot be read or is damaged (names it).
        """
        for row in range(len(self)):
            self.read(np.array([row]))

    def in_memory(self) -> "Features":
        """The same features, all read and checked once, in memory that other processes share.

        The processes that torchrun started have one copy on each machine; all must come here.

        Raises:
            InputError: they do not fit into memory, or a row cannot be read or is damaged.
        """
        memory, error = attempt(self._load) if local_rank() == 0 else (None, None)
        raise_any(error)
        node = os.environ.get("GROUP_RANK", "0")
        shared = broadcast(dict(filter(None, gather(memory and (node, (memory.path, memory.size))) or [])))
        memory = memory or attach(*shared[node])
        barrier()  # all have it open now, and it lasts until the last is gone
        other = copy(self)
        other._memory, other._offset, other._checksums_N = memory, 0, None
        other._bytes = other._dataset = None
        return other

    def _load(self) -> SharedMemory:
        need, there = len(self) * self.row_bytes, available_memory()
        if need > there:
            raise InputError(
                f"{self.path}: its features take {need:,} bytes of memory, and {there:,} are available; without "
                "features_in_memory they are read from the file as they are needed"
            )
        memory = SharedMemory(need)
        step = max(1, LOAD_BYTES // self.row_bytes)
        for start in range(0, len(self), step):
            rows = self.read(np.arange(start, min(start + step, len(self))))
            left, place = memoryview(rows.numpy()).cast("B"), start * self.row_bytes
            while left:
                count = os.pwrite(memory.descriptor, left, place)
                left, place = left[count:], place + count
        return memory

    def _announce(self, rows: np.ndarray) -> None:
        """Have the disk fetch all rows at once, rather than one after the other."""
        if self._offset is not None and self._memory is None and len(rows) > 1:
            descriptor = self._descriptor()
            for row in rows.tolist():
                where = self._offset + row * self.row_bytes
                os.posix_fadvise(descriptor, where, self.row_bytes, os.POSIX_FADV_WILLNEED)

    def _read_row(self, row: int, values_CHW: np.ndarray) -> None:
        if self._offset is None:
            if self._dataset is None:
                self._dataset = open_hdf5(self.path)["features"]
            self._dataset.read_direct(values_CHW, np.s_[row])
            return
        descriptor, place = self._descriptor(), self._offset + row * self.row_bytes
        left = memoryview(values_CHW).cast("B")
        while left:
            count = os.preadv(descriptor, [left], place)
            if not count:
                raise OSError("the file ends before it")
            left, place = left[count:], place + count

    def _descriptor(self) -> int:
        """Of the open file that rows are read from without HDF5."""
        if self._memory is not None:
            return self._memory.descriptor
        if self._bytes is None:
            self._bytes = open(self.path, "rb", buffering=0)  # noqa: SIM115 - for as long as this object lives
        return self._bytes.fileno()


LOAD_BYTES = 2**25
"""Read at once into memory."""
FLOATS = tuple(np.dtype(name) for name in ("float16", "float32", "float64"))


def _offset_of_plain_rows(dataset: h5py.Dataset) -> int | None:
    """Where in its file a dataset's values lie one after the other as numpy has them; None where they do not.

    Such rows are read without HDF5, in half the time.
    """
    native = h5py.h5t.py_create(dataset.dtype.newbyteorder("="), logical=True)
    return dataset.id.get_offset() if dataset.id.get_type().equal(native) else None


def _read_checksums(file: h5py.File, count: int) -> np.ndarray | None:
    """(count,) the checksum of each row; None where the file has none, such as the original toolkit's."""
    if "checksums" not in file:
        return None
    checksums_N = file["checksums"][()]
    if checksums_N.shape != (count,) or checksums_N.dtype != np.uint32:
        raise InputError(f"{file.filename}: checksums is {checksums_N.shape} {checksums_N.dtype}, expected one a row")
    return checksums_N


@dataclass(frozen=True)
class Split:
    """One split's questions and, where the model looks, features."""

    questions: Questions
    features: Features | None


def open_split(
    data: Path, split: str, vocab: Vocab, with_features: bool, num_samples: int | None, in_memory: bool = False
) -> Split:
    """The first `num_samples` questions of a split (None: all) and its features, read into memory if so asked.

    Raises:
        InputError: a file is missing, damaged or made with another vocabulary, there is no question, or memory is
            short.
    """
    questions_path, features_path = split_files(data, split)
    questions = read_questions(questions_path, vocab)
    if not len(questions):
        raise InputError(f"{questions_path}: holds no question")
    features = Features(features_path) if with_features else None
    if features is not None and in_memory:
        features = features.in_memory()
    return Split(questions.select(slice(num_samples)), features)
