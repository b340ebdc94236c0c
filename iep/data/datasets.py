"""Questions and features -> minibatches, read in the loader's workers, which also make the engine's plan.

`ordering.py` chooses the questions of a batch, `question_file.py` reads the files, and `loader.py` runs the workers.

Shapes: B examples, N distinct images of a batch, T question tokens, L program tokens, C H W feature maps.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from iep.data.features import Features
from iep.data.loader import NO_WORKERS, Batches, Loading
from iep.data.ordering import Order, deal, step_numbers
from iep.data.question_file import Questions
from iep.errors import InputError
from iep.execution_engine.program_plan import Planner
from iep.program_generator.encoder import trim


@dataclass(frozen=True)
class Batch:
    """A minibatch, with None for parts that the split's files do not have.

    Those have the type `Any`, because a task checks once that the split has what its model reads.
    """

    index: torch.Tensor
    """(B,) position of each question in its data set."""
    questions: torch.Tensor
    """(B, T) question tokens, padded with `<NULL>` on the right to the length of the batch's longest question."""
    programs: Any
    """(B, L) prefix program tokens, padded in the same way."""
    answers: Any
    """(B,) answer indices."""
    features: Any = None
    """(N, C, H, W) features of the batch's N distinct images, in the file's dtype; float32 once `to` has moved them."""
    image_rows: np.ndarray | None = None
    """(B,) row in `features` of each question's image; stays on the CPU, where plans are made."""
    plan: Any = None
    """The engine's `ProgramPlan` for `programs` and `image_rows`."""
    draws: torch.Tensor | None = None
    """(B, ...) random numbers from 0 to below 1, by which training samples programs."""

    def to(self, device: torch.device) -> "Batch":
        """Return the batch with its tensors on `device` and its features in float32."""
        batch = replace(self, plan=None)._map(lambda tensor: tensor.to(device, non_blocking=True))
        # Converted after the transfer, since float16 has half as many bytes.
        features = None if batch.features is None else batch.features.float()
        return replace(batch, features=features, plan=self.plan and self.plan.to(device))

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory; the data loader calls this."""
        return self._map(torch.Tensor.pin_memory)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory of the tensors on the stream's device until the present work of `stream` is done."""

        def record(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device == stream.device:
                tensor.record_stream(stream)
            return tensor

        self._map(record)

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """Return the batch with `function` of its tensors and of the plan's."""
        tensors: dict[str, Any] = {
            name: function(value) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        return replace(self, **tensors, plan=self.plan and self.plan.map(function))


Choice = tuple[np.ndarray, np.ndarray | None]
"""The examples of a batch: their positions, and the batch's `draws`."""


class ClevrDataset:
    """Questions and their images' features, from which batches are made."""

    def __init__(self, questions: Questions, features: Features | None, make_plan: Planner | None = None):
        """Take the questions and features, and check that every question's image has features.

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

    @property
    def bytes_an_image(self) -> int:
        """The number of bytes of one image's features in a batch."""
        return 0 if self.features is None else self.features.row_bytes

    def batch(self, choice: Choice, allocate: Callable[..., np.ndarray] = np.empty) -> Batch:
        """Make the batch of `choice`, with its features in an array that `allocate` returns.

        Raises:
            InputError: features cannot be read.
        """
        rows, draws = choice
        part = self.questions.select(rows)
        programs_BL = None if part.programs is None else trim(torch.from_numpy(part.programs)).contiguous()
        features, image_rows = None, None
        if self.features is not None:
            images, inverse = np.unique(part.image_idxs, return_inverse=True)
            features, image_rows = self.features.read(images, allocate), inverse
        return Batch(
            index=torch.from_numpy(np.asarray(rows)),
            questions=trim(torch.from_numpy(part.questions)).contiguous(),
            programs=programs_BL,
            answers=None if part.answers is None else torch.from_numpy(part.answers),
            features=features,
            image_rows=image_rows,
            plan=None if self.make_plan is None else self.make_plan(programs_BL, image_rows_B=image_rows),
            draws=None if draws is None else torch.from_numpy(draws),
        )


def training_batches(
    dataset: ClevrDataset,
    order: Order,
    steps: range,
    loading: Loading,
    draws: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> Batches:
    """Return the batches of the training `steps`, with `draws` random numbers for every example.

    Each batch is the part for process `rank` of the `world_size` processes that train together.
    """

    def choose(step: int) -> Choice:
        rows = order.rows(step)
        part = deal(dataset.questions.image_idxs[rows], world_size)[rank]
        return rows[part], step_numbers(order.seed, step, (len(rows), draws))[part] if draws else None

    return Batches(dataset.batch, choose, steps, order.batch_size * dataset.bytes_an_image, loading)


def sequential_batches(
    dataset: ClevrDataset,
    batch_size: int,
    loading: Loading = NO_WORKERS,
    rank: int = 0,
    world_size: int = 1,
) -> Batches:
    """Return batches of every example once, in the file's order, in which CLEVR has the questions of an image together.

    Process `rank` gets every `world_size`th of these batches.
    """
    order = np.arange(len(dataset))

    def choose(number: int) -> Choice:
        return order[number * batch_size : (number + 1) * batch_size], None

    count = -(-len(dataset) // batch_size)
    numbers = range(rank, count, world_size)
    return Batches(dataset.batch, choose, numbers, batch_size * dataset.bytes_an_image, loading)
