"""Preprocessed HDF5 files -> minibatches, read in the loader's workers, where the engine's plan is made too.

A split is `{split}_questions.h5` and, for models that look, `{split}_features.h5` (formats: docs of
`iep-preprocess`; both are the original toolkit's). Which questions make up batch i of a run is a pure function of
the seed and i, so that a resumed run sees exactly what an unbroken one would.

Shapes: B examples, T question tokens, L program tokens, C H W feature maps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from iep.errors import InputError
from iep.programs import arities
from iep.vocab import END, NULL, START, Vocab


@dataclass(frozen=True)
class Batch:
    """One minibatch. Parts that the split's files do not hold are None."""

    index: torch.Tensor
    """(B,) position of each question in its file."""
    questions: torch.Tensor
    """(B, T) question tokens, padded with `<NULL>` on the right."""
    image_idxs: torch.Tensor
    """(B,) image index of each question."""
    programs: torch.Tensor | None
    """(B, L) prefix program tokens."""
    answers: torch.Tensor | None
    """(B,) answer indices."""
    features: torch.Tensor | None = None
    """(B, C, H, W) float32."""
    plan: Any = None
    """What `make_plan` made of `programs`."""

    def to(self, device: torch.device) -> "Batch":
        """The same batch with its tensors on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory; the data loader calls this."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: function(v) for k, v in values.items() if isinstance(v, torch.Tensor)})


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


@dataclass(frozen=True)
class Questions:
    """The arrays of a questions file, N questions; missing ones are None."""

    path: Path
    questions: np.ndarray
    image_idxs: np.ndarray
    orig_idxs: np.ndarray
    families: np.ndarray | None
    programs: np.ndarray | None
    answers: np.ndarray | None

    def __len__(self) -> int:
        return len(self.questions)

    def select(self, rows: slice | np.ndarray) -> "Questions":
        """The same file's questions at `rows`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v[rows] for k, v in values.items() if isinstance(v, np.ndarray)})


def read_questions(path: Path, vocab: Vocab) -> Questions:
    """Read a questions file whole and check it against the vocabulary.

    Raises:
        InputError: not HDF5, a dataset is missing or has the wrong shape, a token is not in `vocab`, or an image index
            is below 0.
    """
    with open_hdf5(path) as file:
        questions = file.get("questions")
        if not isinstance(questions, h5py.Dataset):
            raise InputError(f"{path}: has no dataset 'questions', expected a questions file of iep-preprocess")
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
    """Rows of a features file, read on demand; safe to hand to worker processes (each opens its own handle)."""

    def __init__(self, path: Path):
        """Check the file.

        Raises:
            InputError: not HDF5, no dataset `features`, or not (N, C, H, W) floating point.
        """
        self.path = Path(path)
        self._dataset: h5py.Dataset | None = None
        with open_hdf5(path) as file:
            dataset = file.get("features")
            if not isinstance(dataset, h5py.Dataset):
                raise InputError(f"{path}: has no dataset 'features', expected a features file of iep-preprocess")
            if dataset.ndim != 4 or dataset.dtype.kind != "f" or 0 in dataset.shape[1:]:
                raise InputError(f"{path}: features is {dataset.shape} {dataset.dtype}, expected (N, C, H, W) floats")
            self.shape: tuple[int, int, int, int] = dataset.shape
            self.dtype = dataset.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataset": None}

    def read(self, rows: np.ndarray) -> torch.Tensor:
        """(B, C, H, W) float32 features of the images `rows`; an image that occurs twice is read once.

        Raises:
            InputError: a row cannot be read, the file being damaged.
        """
        if self._dataset is None:
            self._dataset = open_hdf5(self.path)["features"]
        distinct, inverse = np.unique(rows, return_inverse=True)
        values = np.empty((len(distinct), *self.shape[1:]), dtype=self.dtype)
        for place, row in enumerate(distinct):
            try:
                self._dataset.read_direct(values, np.s_[int(row)], np.s_[place])
            except OSError as error:
                what = " ".join(str(error).split())
                raise InputError(f"{self.path}: features, row {row} cannot be read ({what})") from None
        values_NCHW = torch.from_numpy(values).float()
        return (
            values_NCHW if len(distinct) == len(rows) and (inverse[:-1] < inverse[1:]).all() else values_NCHW[inverse]
        )


class ClevrDataset(Dataset):
    """Questions with their images' features; an item is a `Batch`, indexed by an array of positions."""

    def __init__(
        self,
        questions: Questions,
        features: Features | None,
        make_plan: Callable[[torch.Tensor], Any] | None = None,
    ):
        """Check that every question's image has features.

        Raises:
            InputError: a question names an image beyond the features file.
        """
        if features is not None and len(questions) and questions.image_idxs.max() >= len(features):
            row = int(np.argmax(questions.image_idxs >= len(features)))
            raise InputError(
                f"{features.path}: holds {len(features)} images, but question {row} of {questions.path} "
                f"is about image {questions.image_idxs[row]}"
            )
        self.questions = questions
        self.features = features
        self.make_plan = make_plan

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, rows: np.ndarray) -> Batch:
        part = self.questions.select(rows)
        programs_BL = None if part.programs is None else torch.from_numpy(part.programs)
        return Batch(
            index=torch.from_numpy(np.asarray(rows)),
            questions=torch.from_numpy(part.questions),
            image_idxs=torch.from_numpy(part.image_idxs),
            programs=programs_BL,
            answers=None if part.answers is None else torch.from_numpy(part.answers),
            features=None if self.features is None else self.features.read(part.image_idxs),
            plan=None if self.make_plan is None else self.make_plan(programs_BL),
        )


def program_lengths(programs: np.ndarray, program_tokens: Sequence[str]) -> np.ndarray:
    """(N,) number of functions besides `scene` in each well-formed program of (N, L)."""
    counted = arities(program_tokens) > 0
    counted[[NULL, START, END]] = False
    return counted[programs].sum(axis=1)


class Order:
    """Which examples each training step sees: a new permutation each epoch, short programs first if asked.

    `stages` are pairs (first step, positions that may be drawn), first steps rising from 0.
    """

    def __init__(self, stages: Sequence[tuple[int, np.ndarray]], batch_size: int, seed: int):
        self.stages = stages
        self.batch_size = batch_size
        self.seed = seed
        self._shuffled: tuple[tuple[int, int], np.ndarray] = ((-1, -1), np.empty(0, dtype=np.int64))

    def rows(self, step: int) -> np.ndarray:
        """(B,) positions of the batch of `step`; smaller than `batch_size` only where a stage holds fewer examples."""
        stage = max(i for i, (first, _) in enumerate(self.stages) if first <= step)
        first, pool = self.stages[stage]
        epoch, place = divmod(step - first, max(1, len(pool) // self.batch_size))
        if self._shuffled[0] != (stage, epoch):
            generator = np.random.default_rng([self.seed, stage, epoch])
            self._shuffled = ((stage, epoch), generator.permutation(pool))
        return self._shuffled[1][place * self.batch_size : (place + 1) * self.batch_size]


def make_order(lengths: np.ndarray | None, count: int, curriculum: Sequence[tuple[int, int]], **kwargs: int) -> Order:
    """An `Order` over `count` examples; `curriculum` pairs are (first step, greatest program length).

    Raises:
        InputError: the curriculum does not start at step 0 and rise, there are no programs to measure, or a stage has
            no example.
    """
    if not curriculum:
        return Order([(0, np.arange(count))], **kwargs)
    firsts = [first for first, _ in curriculum]
    if firsts[0] != 0 or firsts != sorted(set(firsts)):
        raise InputError(f"curriculum starts its stages at iterations {firsts}, expected 0 first and then rising")
    if lengths is None:
        raise InputError("a curriculum needs programs, and the training questions have none")
    stages = [(first, np.flatnonzero(lengths <= longest)) for first, longest in curriculum]
    for (_, longest), (_, pool) in zip(curriculum, stages, strict=True):
        if not len(pool):
            raise InputError(f"curriculum: no training program has at most {longest} functions")
    return Order(stages, **kwargs)


class _Rows(Sampler):
    """Arrays of positions, one per batch, from a function of the batch's number."""

    def __init__(self, rows: Callable[[int], np.ndarray], numbers: range):
        self.rows = rows
        self.numbers = numbers

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.rows(number) for number in self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


class _ErrorsAsItems(Dataset):
    """A dataset whose `InputError`s are items: raised in a worker, they would arrive as tracebacks of several lines."""

    def __init__(self, dataset: ClevrDataset):
        self.dataset = dataset

    def __getitem__(self, rows: np.ndarray) -> Batch | InputError:
        try:
            return self.dataset[rows]
        except InputError as error:
            return error


class Batches:
    """Batches in order; may be gone through several times."""

    def __init__(self, loader: DataLoader):
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        """The batches.

        Raises:
            InputError: one cannot be read.
        """
        for item in self._loader:
            if isinstance(item, InputError):
                raise item
            yield item


def training_batches(dataset: ClevrDataset, order: Order, steps: range, workers: int, pin: bool = False) -> Batches:
    """The batches of `steps`, made by `workers` processes (0: in this one)."""
    return _loader(dataset, order.rows, steps, workers, pin)


def sequential_batches(dataset: ClevrDataset, batch_size: int, workers: int = 0, pin: bool = False) -> Batches:
    """Every example once, in the file's order."""

    def rows(number: int) -> np.ndarray:
        return np.arange(number * batch_size, min((number + 1) * batch_size, len(dataset)))

    return _loader(dataset, rows, range(-(-len(dataset) // batch_size)), workers, pin)


def _loader(
    dataset: ClevrDataset, rows: Callable[[int], np.ndarray], numbers: range, workers: int, pin: bool
) -> Batches:
    # Its own generator: otherwise every pass would draw a seed for its workers from the generator that training uses.
    loader = DataLoader(
        _ErrorsAsItems(dataset),
        sampler=_Rows(rows, numbers),
        batch_size=None,
        num_workers=workers,
        pin_memory=pin,
        generator=torch.Generator(),
    )
    return Batches(loader)
