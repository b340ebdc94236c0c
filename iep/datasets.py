"""Questions and features -> minibatches, read in the loader's workers, where the engine's plan is made too.

Which questions make up a batch is `ordering.py`; what the files hold, `data_files.py`.

Shapes: B examples, N distinct images of a batch, T question tokens, L program tokens, C H W feature maps.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from iep.data_files import Features, Questions
from iep.errors import InputError
from iep.execution_engine.engine import Plan, Planner
from iep.ordering import Order, deal, step_numbers


@dataclass(frozen=True)
class Batch:
    """One minibatch. Parts that the split's files do not hold are None."""

    index: torch.Tensor
    """(B,) position of each question in its file."""
    questions: torch.Tensor
    """(B, T) question tokens, padded with `<NULL>` on the right."""
    programs: torch.Tensor | None
    """(B, L) prefix program tokens."""
    answers: torch.Tensor | None
    """(B,) answer indices."""
    features: torch.Tensor | None = None
    """(N, C, H, W) features of the batch's N distinct images, of the file's dtype; float32 once `to` has moved them."""
    image_rows: np.ndarray | None = None
    """(B,) row in `features` of each question's image; stays on the CPU, where plans are made of it."""
    plan: Plan | None = None
    """What `make_plan` made of `programs` and `image_rows`."""
    draws: torch.Tensor | None = None
    """(B, ...) numbers from 0 to below 1 for what training draws by chance."""

    def to(self, device: torch.device) -> "Batch":
        """The same batch with its tensors on `device`, features as float32."""
        batch = self._map(lambda tensor: tensor.to(device, non_blocking=True))
        # After the transfer: float16 is half as many bytes to move.
        return batch if batch.features is None else replace(batch, features=batch.features.float())

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory; the data loader calls this."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        changed = {k: function(v) for k, v in values.items() if isinstance(v, torch.Tensor)}
        if self.plan is not None:
            changed["plan"] = self.plan.map(function)
        return replace(self, **changed)


class ClevrDataset(Dataset):
    """Questions with their images' features; an item is a `Batch`, indexed by an array of positions."""

    def __init__(
        self,
        questions: Questions,
        features: Features | None,
        make_plan: Planner | None = None,
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
        features, image_rows = None, None
        if self.features is not None:
            images, inverse = np.unique(part.image_idxs, return_inverse=True)
            features, image_rows = self.features.read(images), inverse
        return Batch(
            index=torch.from_numpy(np.asarray(rows)),
            questions=torch.from_numpy(part.questions),
            programs=programs_BL,
            answers=None if part.answers is None else torch.from_numpy(part.answers),
            features=features,
            image_rows=image_rows,
            plan=None if self.make_plan is None else self.make_plan(programs_BL, image_rows_B=image_rows),
        )


Choice = tuple[np.ndarray, np.ndarray | None]
"""What a batch is made of: positions of its examples, and its `draws`."""


class _Choices(Sampler):
    """What each batch is made of, from a function of the batch's number."""

    def __init__(self, choose: Callable[[int], Choice], numbers: range):
        self.choose = choose
        self.numbers = numbers

    def __iter__(self) -> Iterator[Choice]:
        return (self.choose(number) for number in self.numbers)


class _ErrorsAsItems(Dataset):
    """A dataset whose `InputError`s are items: raised in a worker, they would arrive as tracebacks of several lines."""

    def __init__(self, dataset: ClevrDataset):
        self.dataset = dataset

    def __getitem__(self, choice: Choice) -> Batch | InputError:
        rows, draws = choice
        try:
            return replace(self.dataset[rows], draws=None if draws is None else torch.from_numpy(draws))
        except InputError as error:
            return error


class Batches:
    """Batches in order; may be gone through several times."""

    def __init__(self, loader: DataLoader):
        self._loader = loader

    def __iter__(self) -> Iterator[Batch]:
        """The batches.

        Raises:
            InputError: one cannot be read.
        """
        for item in self._loader:
            if isinstance(item, InputError):
                raise item
            yield item


def training_batches(
    dataset: ClevrDataset,
    order: Order,
    steps: range,
    workers: int,
    pin: bool = False,
    draws: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> Batches:
    """The batches of `steps`, made by `workers` processes (0: in this one); of each what falls to process `rank` of the
    `world_size` that train together, and `draws` numbers for every example, if any."""

    def choose(step: int) -> Choice:
        rows = order.rows(step)
        part = deal(dataset.questions.image_idxs[rows], world_size)[rank]
        return rows[part], step_numbers(order.seed, step, (len(rows), draws))[part] if draws else None

    return _loader(dataset, choose, steps, workers, pin)


def sequential_batches(
    dataset: ClevrDataset,
    batch_size: int,
    workers: int = 0,
    pin: bool = False,
    by_image: bool = False,
    rank: int = 0,
    world_size: int = 1,
) -> Batches:
    """Every example once, in the file's order, or image by image so that the questions of an image meet in a batch; of
    these batches every `world_size`th is for process `rank`."""
    order = np.arange(len(dataset))
    if by_image:
        order = np.argsort(dataset.questions.image_idxs, kind="stable")

    def choose(number: int) -> Choice:
        return order[number * batch_size : (number + 1) * batch_size], None

    count = -(-len(dataset) // batch_size)
    return _loader(dataset, choose, range(rank, count, world_size), workers, pin)


def _loader(dataset: ClevrDataset, choose: Callable[[int], Choice], numbers: range, workers: int, pin: bool) -> Batches:
    # Its own generator: otherwise every pass would draw a seed for its workers from the generator that training uses.
    loader = DataLoader(
        _ErrorsAsItems(dataset),
        sampler=_Choices(choose, numbers),
        batch_size=None,
        num_workers=workers,
        pin_memory=pin,
        generator=torch.Generator(),
    )
    return Batches(loader)
