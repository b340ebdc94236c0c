"""The questions of a split and trained networks -> predicted programs and answers, and the time that they took.

Shapes: N questions of the split, B questions of a batch, L program tokens, A answers, K of them the likeliest.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from iep.data.datasets import Batch, ClevrDataset, sequential_batches
from iep.data.loader import Loading, on_device
from iep.errors import InputError
from iep.execution_engine.choices import DEFAULT_SCHEDULER
from iep.execution_engine.engine import ExecutionEngine
from iep.models.network import Network
from iep.program_generator.decode import beam, greedy
from iep.program_generator.seq2seq import Seq2Seq
from iep.runtime.devices import autocast
from iep.runtime.distributed import barrier, gather, is_main, rank, world_size
from iep.vocab import NULL

RANKED = 3
"""K, the number of the likeliest answers that are kept."""


@dataclass(frozen=True)
class Predictions:
    """The predictions for every question; None where no network makes them."""

    programs: np.ndarray | None
    """(N, L) predicted program tokens."""
    ranked_answers: np.ndarray | None
    """(N, K) likeliest answers, the likeliest first."""
    ranked_probabilities: np.ndarray | None
    """(N, K) their probabilities; None where only answers are known."""
    seconds: float | None
    """The time for all predictions, including the reading of the data; None where it was not measured."""

    @property
    def answers(self) -> np.ndarray | None:
        """(N,) likeliest answers."""
        return None if self.ranked_answers is None else self.ranked_answers[:, 0]


@dataclass(frozen=True)
class Predictor:
    """The networks of an evaluation and their options.

    The `engine` runs the generator's programs if `run_predicted`, otherwise those of the split. A `baseline` answers
    without the other two.
    """

    generator: Seq2Seq | None = None
    engine: ExecutionEngine | None = None
    baseline: nn.Module | None = None
    run_predicted: bool = False
    batching: str = DEFAULT_SCHEDULER
    sharing: bool | None = None
    _: KW_ONLY
    beam_size: int
    max_program_length: int | None = None
    """None for the generator's own."""

    @classmethod
    def of(cls, networks: Iterable[Network], **options: Any) -> "Predictor":
        """Return the predictor of networks; `options` are its other fields."""
        parts = {each.name if each.name in ("generator", "engine") else "baseline": each.module for each in networks}
        return cls(**parts, **options)

    def programs(self, batch: Batch) -> Tensor | None:
        """Return predicted programs (B, L), by beam search if `beam_size` is above 1, else greedily."""
        if self.generator is None:
            return None
        max_length = self.max_program_length or self.generator.max_program_length
        if self.beam_size > 1:
            return beam(self.generator, batch.questions, self.beam_size, max_length)[0]
        return greedy(self.generator, batch.questions, max_length)

    def logits(self, batch: Batch, programs_BL: Tensor | None) -> Tensor | None:
        """Return answer logits (B, A), None without an engine or baseline."""
        if self.baseline is not None:
            return self.baseline(batch.questions, batch.features, batch.image_rows)
        if self.engine is None:
            return None
        plan = batch.plan
        if self.run_predicted:
            assert programs_BL is not None
            plan = self.engine.plan(programs_BL, batch.image_rows, self.batching, self.sharing)
        return self.engine(batch.features, plan)


def ranked(logits_BA: Tensor, name: Callable[[int], str]) -> tuple[Tensor, Tensor]:
    """Return probabilities (B, A) and answers (B, A), the likeliest first.

    Args:
        name: a function from a row to the name of its question in an error.

    Raises:
        InputError: a question's logits are not finite (names the first such question).
    """
    if not (is_finite_B := logits_BA.isfinite().all(1)).all():
        row = int((~is_finite_B).nonzero()[0])
        raise InputError(
            f"{name(row)}: the answers' scores are not finite; the image's features are not finite, or the activations "
            "overflow"
        )
    probability_BA, answer_BA = logits_BA.float().softmax(1).sort(dim=1, descending=True, stable=True)
    return probability_BA, answer_BA


@torch.inference_mode()
def predict(
    predictor: Predictor,
    dataset: ClevrDataset,
    batch_size: int,
    loading: Loading,
    device: torch.device,
    precision: str = "float32",
) -> Predictions | None:
    """Predict the programs and answers of all questions; the predictions are in the order of `dataset`.

    Several processes divide the batches among them. The first returns the predictions, the others return None.

    Raises:
        InputError: a question's answer logits are not finite (names the question), or its features cannot be read.
    """
    batches = sequential_batches(dataset, batch_size, loading, rank(), world_size())
    parts: dict[str, list[Tensor]] = {"index": [], "programs": [], "answers": [], "probabilities": []}
    barrier()  # processes may take different times to load
    start = time.perf_counter()
    total = -(-len(dataset) // world_size())
    with tqdm(total=total, unit="question", desc="evaluate", mininterval=1.0, disable=not is_main()) as bar:
        for batch in on_device(batches, device):
            parts["index"].append(batch.index.cpu())
            programs_BL = predictor.programs(batch)  # always in float32: rounding changes programs and saves no time
            if programs_BL is not None:
                parts["programs"].append(programs_BL.cpu())
            with autocast(device, precision):
                logits_BA = predictor.logits(batch, programs_BL)
            if logits_BA is not None:
                probability_BA, answer_BA = ranked(logits_BA, partial(_name, dataset, batch.index))
                parts["answers"].append(answer_BA[:, :RANKED].cpu())
                parts["probabilities"].append(probability_BA[:, :RANKED].cpu())
            bar.update(len(batch.index))
    gathered = gather(parts)
    seconds = time.perf_counter() - start  # until the last process is done
    return None if gathered is None else _in_order(gathered, seconds)


def _name(dataset: ClevrDataset, index_B: Tensor, row: int) -> str:
    """Return the name of the question at a batch's row in an error."""
    questions = dataset.questions
    return f"{questions.path}: question_index {questions.orig_idxs[int(index_B[row])]}"


def _in_order(gathered: Sequence[dict[str, list[Tensor]]], seconds: float) -> Predictions:
    """Return the predictions of all processes in the order of the dataset."""
    parts = {name: [batch for process in gathered for batch in process[name]] for name in gathered[0]}
    place = torch.cat(parts["index"]).argsort()

    def stacked(name: str) -> np.ndarray | None:
        return torch.cat(parts[name])[place].numpy() if parts[name] else None

    width = max((programs_BL.shape[1] for programs_BL in parts["programs"]), default=0)
    parts["programs"] = [F.pad(each, (0, width - each.shape[1]), value=NULL) for each in parts["programs"]]
    return Predictions(stacked("programs"), stacked("answers"), stacked("probabilities"), seconds)
