"""The computation of a training step and of a validation step of each model; `loop.py` is the loop around them.

A `Task` holds the networks that are trained and saved, computes the loss of a minibatch, and finds the examples that
are answered correctly. `TASKS` has the task of each model.

Shapes: B examples, T question tokens, L program tokens, A answers.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from iep.backbone.augment import augmented
from iep.backbone.network import compare, find_objects, scene_loss
from iep.config import BASELINES, Config
from iep.data.datasets import Batch
from iep.errors import InputError
from iep.evaluation.metrics import exact_match
from iep.program_generator.decode import greedy, sample
from iep.runtime.distributed import total
from iep.training.freezing import is_trained
from iep.vocab import NULL

Metrics = dict[str, Tensor]
DEAD = 0.5
"""A module whose attention never exceeds this has not learned its function."""


class Task:
    """Training of a network without programs by cross entropy on answers (Johnson et al. 2017, CLEVR, section 4.1).

    The tasks of the other models override the methods in which they differ.

    Attributes:
        networks: the modules of the networks that are trained and saved, by name.
        state: the numbers that the task carries from step to step, which every checkpoint stores.
        examples: what the examples of a minibatch are called.
    """

    examples = "questions"

    def __init__(self, config: Config, networks: dict[str, Any]):
        """Take the networks.

        Raises:
            InputError: the networks cannot be trained with these settings.
        """
        self.config = config
        self.networks = networks
        self.state: dict[str, float] = {}

    def count(self, batch: Batch) -> int:
        """Return the number of terms that the loss is a mean over: here, questions."""
        return len(batch.index)

    def logits(self, batch: Batch) -> Tensor:
        """Return (B, A) answer logits."""
        (network,) = self.networks.values()
        return network(batch.questions, batch.features, batch.image_rows)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the loss, which is a scalar to differentiate, and the metrics of the step, which are means as well."""
        return _answer_loss(self.logits(batch), batch.answers)

    def validating(self) -> AbstractContextManager[list[str]]:
        """Return a context manager around a validation, whose list has warnings about the networks at the end."""
        return nullcontext([])

    def correct(self, batch: Batch) -> Tensor:
        """Return (B,) booleans: the likeliest answer is the true one."""
        return self.logits(batch).argmax(1) == batch.answers


class GeneratorTask(Task):
    """Training of the program generator by teacher forcing on true programs (Johnson et al. 2017, section 3.4)."""

    def count(self, batch: Batch) -> int:
        """Return the number of tokens to predict."""
        return int((batch.programs[:, 1:] != NULL).sum())

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the mean cross entropy of a token."""
        loss = self.networks["generator"].loss(batch.questions, batch.programs)
        return loss, {"loss": loss.detach()}

    def correct(self, batch: Batch) -> Tensor:
        """Return (B,) booleans: the greedily decoded program is the true one, token for token."""
        generator = self.networks["generator"]
        programs_BL = greedy(generator, batch.questions, generator.max_program_length)
        return torch.from_numpy(exact_match(programs_BL.cpu().numpy(), batch.programs.cpu().numpy()))


class EngineTask(Task):
    """Training of the execution engine by cross entropy on answers (Johnson et al. 2017, section 3.4).

    The programs are the true ones, or those that a fixed generator has predicted.
    """

    def __init__(self, config: Config, networks: dict[str, Any]):
        super().__init__(config, networks)
        self.engine = networks["engine"]
        if config.attention_penalty and not self.engine.makes_attentions:
            what = f"attention_penalty is {config.attention_penalty}, but modules {config.engine.modules} compute no"
            raise InputError(f"{what} attention maps; those of --modules tbd and pooled do")

    def logits(self, batch: Batch) -> Tensor:
        return self._forward(batch)[0]

    @contextmanager
    def validating(self) -> Iterator[list[str]]:
        notes: list[str] = []
        with self.engine.greatest_attentions() as greatest:
            yield notes
        dead = [token for token, attention in greatest.items() if attention <= DEAD]
        if dead:
            notes.append(f"the attention of {', '.join(dead)} never exceeds {DEAD}")

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the mean cross entropy of an answer plus the attention penalty, and the metrics of the step."""
        return self.engine_loss(*self._forward(batch), batch.answers)

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (B, A) answer logits, and the sum of the attention maps if these are penalised."""
        return self.engine.forward_with_attentions(batch.features, batch.plan, self.config.defer_weight_grads)

    def engine_loss(self, logits_BA: Tensor, attention: Tensor, answers_B: Tensor) -> tuple[Tensor, Metrics]:
        """Return the mean cross entropy of an answer plus the attention penalty, and the metrics of the step.

        The penalty is that of Mascharka et al. 2018, section 4.1, which is a sum over the minibatch in their code.
        """
        loss, metrics = _answer_loss(logits_BA, answers_B)
        if not self.config.attention_penalty:
            return loss, metrics
        # The loss of a process is weighted by its share of the questions, but the penalty is a sum over all of them.
        questions = torch.tensor(len(answers_B), dtype=torch.float64)
        share = questions.item() / total(questions).item()
        penalty = self.config.attention_penalty / share * attention
        return loss + penalty, metrics | {"loss": (loss + penalty).detach(), "attention_penalty": penalty.detach()}


class JointTask(EngineTask):
    """Training of generator and engine on sampled programs (Johnson et al. 2017, section 3.4).

    The engine is trained by backpropagation and the generator by REINFORCE (Williams 1992). The reward of a sampled
    program is 1 if the engine answers right, else 0, and its baseline is a moving average of the mean reward with the
    decay `reward_decay`. `temperature` divides the logits that programs are sampled from. The loss of a frozen network
    is left out.
    """

    def __init__(self, config: Config, networks: dict[str, Any]):
        super().__init__(config, networks)
        self.generator = networks["generator"]
        self.state = {"reward_baseline": 0.0}

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the engine's cross entropy plus the generator's REINFORCE surrogate, and the metrics of the step."""
        config = self.config
        programs_BL, log_probs_B = sample(
            self.generator, batch.questions, self.generator.max_program_length, config.temperature, batch.draws
        )
        logits_BA, attention = self._forward_programs(batch, programs_BL)
        engine_loss, metrics = self.engine_loss(logits_BA, attention, batch.answers)
        rewards_B = (logits_BA.detach().argmax(1) == batch.answers).float()
        right, questions = total(torch.tensor([rewards_B.sum().item(), len(rewards_B)], dtype=torch.float64)).tolist()
        baseline = self.state["reward_baseline"]
        generator_loss = -((rewards_B - baseline) * log_probs_B).mean()
        metrics |= {
            "reward": rewards_B.mean(),
            "reward_baseline": rewards_B.new_full((), baseline),
            "generator_loss": generator_loss.detach(),
        }
        decay = config.reward_decay
        self.state["reward_baseline"] = decay * baseline + (1 - decay) * right / questions
        losses = {"generator": generator_loss, "engine": engine_loss}
        return sum(loss for name, loss in losses.items() if is_trained(self.networks[name])), metrics

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        programs_BL = greedy(self.generator, batch.questions, self.generator.max_program_length)
        return self._forward_programs(batch, programs_BL)

    def _forward_programs(self, batch: Batch, programs_BL: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        attentions = self.engine.training and config.attention_penalty > 0
        plan = self.engine.plan(programs_BL, batch.image_rows, config.batching, config.sharing, attentions)
        return self.engine.forward_with_attentions(batch.features, plan, config.defer_weight_grads)


class BackboneTask(Task):
    """A backbone that finds the objects of scenes. An object is right if it is found with all attributes right."""

    examples = "images"

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the loss of `scene_loss` on images that are changed at random."""
        pixels_BCHW, objects_BMF = batch.features[batch.image_rows], batch.answers
        with torch.autocast(pixels_BCHW.device.type, enabled=False):  # pixels need more digits than bfloat16 has
            pixels_BCHW, objects_BMF = augmented(pixels_BCHW, objects_BMF)
        loss = scene_loss(self.networks["backbone"](pixels_BCHW), objects_BMF)
        return loss, {"loss": loss.detach()}

    def correct(self, batch: Batch) -> Tensor:
        """Return (N,) booleans, one for each of the N objects of the images, in no order."""
        network = self.networks["backbone"]
        found = find_objects(network(batch.features[batch.image_rows]))
        right_P = compare(found, batch.answers, network.image_size).all(1)
        objects = int((batch.answers[..., 0] >= 0).sum())
        return F.pad(right_P, (0, objects - len(right_P)))  # the others are not found


def _answer_loss(logits_BA: Tensor, answers_B: Tensor) -> tuple[Tensor, Metrics]:
    """Return the mean cross entropy of an answer, and the metrics of the step: loss and share of right answers."""
    loss = F.cross_entropy(logits_BA.float(), answers_B)
    accuracy = (logits_BA.detach().argmax(1) == answers_B).float().mean()
    return loss, {"loss": loss.detach(), "accuracy": accuracy}


TASKS: dict[str, type[Task]] = {
    "pg": GeneratorTask,
    "ee": EngineTask,
    "joint": JointTask,
    **dict.fromkeys(BASELINES, Task),
    "backbone": BackboneTask,
}
"""The task of each model."""
