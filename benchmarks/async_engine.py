"""The execution engine and preprocessed questions as an experiment of asynchronous training.

A sample is a question of a split, and the score the accuracy with true programs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.message_networks import Experiment
from iep.batching.placement import OpPlacement
from iep.batching.plan import Plan
from iep.cli.bench import trusted_config
from iep.config import Config, find_config
from iep.data.datasets import Batch, ClevrDataset
from iep.data.question_file import load_vocab, open_split
from iep.execution_engine.parts import BALANCED, Placement, ProgramSample, make_placement
from iep.execution_engine.program_plan import ProgramPlan
from iep.models.network import Network
from iep.vocab import Vocab

SCORED = 256
"""The number of questions that are scored at a time."""


class Question(NamedTuple):
    """A question of a split."""

    split: ClevrDataset
    position: int


def engine_experiment(data: Path, config: Path, settings: Sequence[str]) -> Experiment:
    """Return the experiment on a directory of iep-preprocess.

    Raises:
        InputError: a file is missing or damaged, or names code of another package.
    """
    config = trusted_config(find_config(config), settings)
    vocab = load_vocab(data)

    def dataset(name: str) -> ClevrDataset:
        split = open_split(data, name, vocab, True, num_samples=None)
        if config.features_in_memory:
            split = split.in_memory()
        return ClevrDataset(split.questions, split.features)

    def samples(split: ClevrDataset, number: int, rng: np.random.Generator) -> list[Question]:
        return [Question(split, each) for each in rng.permutation(len(split))[:number].tolist()]

    known, unseen = map(dataset, (config.train_split, config.val_split))
    network = partial(EngineNetwork, vocab, config, known)
    return Experiment(partial(samples, known), network, partial(samples, unseen))


class EngineNetwork(nn.Module):
    """An engine whose stem, modules and classifier are the ops."""

    def __init__(self, vocab: Vocab, config: Config, known: ClevrDataset):
        super().__init__()
        self.config, self.known = config, known
        self.engine = Network.new("engine", config.engine, vocab, known.features.shape[1:]).module
        names = self.engine.ops
        self.op_names = [names.get(op, "") for op in range(1 + max(names))]
        # Tokens without a module have a place that is never used.
        self.ops = nn.ModuleList(getattr(self.engine, name) if name else nn.Identity() for name in self.op_names)

    def placement(self, workers: int) -> OpPlacement:
        """Return the placement of the parts on workers of the CPU, balanced by the work of the training questions."""
        known = self.known.questions
        sample = ProgramSample(known.programs, known.image_idxs, known.path)
        placement, _ = make_placement(BALANCED, ("cpu",) * workers, self.engine, sample)
        return placement.of_ops(self.engine.program_tokens)

    def plan(self, samples: Sequence[Question], placement: OpPlacement) -> Plan:
        """Return the plan of a minibatch of questions."""
        parts = {self.op_names[op]: worker for op, worker in placement.ops.items()}
        return self._program_plan(samples, Placement(tuple(map(str, placement.devices)), parts)).plan

    def inputs(self, samples: Sequence[Question]) -> dict[int, Tensor]:
        """Return the inputs of a plan of the same questions."""
        return self.engine.inputs_of(batch_of(samples).features, self._program_plan(samples, None), torch.float32)

    def loss(self, samples: Sequence[Question]) -> Callable[[Tensor], Tensor]:
        """Return the mean cross entropy of the answers as a function of the scores."""
        return partial(cross_entropy, target=batch_of(samples).answers)

    def planned(self, samples: Sequence[Question]) -> Sequence[Sequence[Question]]:
        """Return samples in minibatches, as `score` reads them."""
        return [samples[first : first + SCORED] for first in range(0, len(samples), SCORED)]

    @torch.no_grad()
    def score(self, *minibatches: Sequence[Question]) -> float:
        """Return the accuracy."""
        self.engine.eval()
        right = []
        for batch in map(batch_of, minibatches):
            plan = self.engine.plan(batch.programs, batch.image_rows, self.config.batching)
            right.append(self.engine(batch.features, plan).argmax(1) == batch.answers)
        self.engine.train()
        return torch.cat(right).double().mean().item()

    def _program_plan(self, samples: Sequence[Question], placement: Placement | None) -> ProgramPlan:
        batch = batch_of(samples)
        planner = self.engine.planner(self.config.batching, self.config.sharing, training=True, whole=True)
        return planner(batch.programs, image_rows_B=batch.image_rows, placement=placement)


def batch_of(samples: Sequence[Question]) -> Batch:
    """Return a minibatch of questions of one split."""
    positions = np.array([each.position for each in samples])
    return samples[0].split.batch((positions, None)).to(torch.device("cpu"))
