"""The execution engine and preprocessed questions as a workload of `iep-bench async`.

A sample is the position of a question in a split, and the score the accuracy with true programs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from iep.batching.placement import OpPlacement
from iep.batching.plan import Plan
from iep.config import Config
from iep.data.datasets import Batch, ClevrDataset
from iep.data.question_file import load_vocab, open_split
from iep.execution_engine.placement import BALANCED, Placement, Sample, costs_of, make_placement
from iep.execution_engine.program_plan import ProgramPlan
from iep.models.build import build, network_kwargs

SCORED = 256
"""The number of questions that are scored at a time."""


class Question(NamedTuple):
    """A question of a split."""

    split: str
    position: int


class EngineQuestions:
    """The questions and features of a directory of iep-preprocess.

    Raises:
        InputError: a file is missing or damaged.
    """

    def __init__(self, data: Path, config: Config):
        self.config, self.vocab = config, load_vocab(data)
        self.splits = {}
        for name in (config.train_split, config.val_split):
            split = open_split(
                data, name, num_samples=None, vocab=self.vocab, with_features=True, in_memory=config.features_in_memory
            )
            self.splits[name] = ClevrDataset(split.questions, split.features)

    def samples(self, split: str, number: int, rng: np.random.Generator) -> list[Question]:
        """Return random questions of a split: `number`, or all if there are fewer."""
        return [Question(split, each) for each in rng.permutation(len(self.splits[split]))[:number].tolist()]


class EngineNetwork(nn.Module):
    """An engine whose stem, modules and classifier are the ops."""

    def __init__(self, questions: EngineQuestions):
        super().__init__()
        self.questions, config = questions, questions.config
        shape = questions.splits[config.train_split].features.shape[1:]
        self.engine = build("engine", network_kwargs("engine", config.engine, questions.vocab, shape))
        names = self.engine.ops
        self.op_names = [names.get(op, "") for op in range(1 + max(names))]
        # Tokens without a module have a place that is never used.
        self.ops = nn.ModuleList(getattr(self.engine, name) if name else nn.Identity() for name in self.op_names)

    def placement(self, workers: int) -> OpPlacement:
        """Return the placement of the parts on workers of the CPU, balanced by the work of the training questions."""
        known = self.questions.splits[self.questions.config.train_split].questions
        costs = costs_of(self.engine, Sample(known.programs, known.image_idxs, known.path))
        placement = make_placement(BALANCED, ("cpu",) * workers, self.engine.parts, costs.work, known.path)
        return placement.of_ops(self.engine.program_tokens)

    def plan(self, samples: Sequence[Question], placement: OpPlacement) -> Plan:
        """Return the plan of a minibatch of questions."""
        parts = {self.op_names[op]: worker for op, worker in placement.ops.items()}
        return self._program_plan(samples, Placement(tuple(map(str, placement.devices)), parts)).plan

    def inputs(self, samples: Sequence[Question]) -> dict[int, Tensor]:
        """Return the inputs of a plan of the same questions."""
        return self.engine.inputs_of(self._batch(samples).features, self._program_plan(samples, None), torch.float32)

    def loss(self, samples: Sequence[Question]) -> Callable[[Tensor], Tensor]:
        """Return the mean cross entropy of the answers as a function of the scores."""
        return partial(cross_entropy, target=self._batch(samples).answers)

    @torch.no_grad()
    def score(self, samples: Sequence[Question]) -> float:
        """Return the share of right answers."""
        self.engine.eval()
        right = 0
        for first in range(0, len(samples), SCORED):
            batch = self._batch(samples[first : first + SCORED])
            plan = self.engine.plan(batch.programs, batch.image_rows, self.questions.config.batching)
            right += int((self.engine(batch.features, plan).argmax(1) == batch.answers).sum())
        self.engine.train()
        return right / len(samples)

    def _batch(self, samples: Sequence[Question]) -> Batch:
        dataset = self.questions.splits[samples[0].split]
        return dataset.batch((np.array([each.position for each in samples]), None)).to(torch.device("cpu"))

    def _program_plan(self, samples: Sequence[Question], placement: Placement | None) -> ProgramPlan:
        batch, config = self._batch(samples), self.questions.config
        planner = self.engine.planner(config.batching, config.sharing, training=True, ends=True)
        return planner(batch.programs, image_rows_B=batch.image_rows, placement=placement)
