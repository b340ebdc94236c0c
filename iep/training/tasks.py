"""What one training step and one validation step of each model compute; the loop around them is `loop.py`.

A task owns its networks: `networks` (trained and saved), `loss(batch)` -> a scalar to differentiate and the step's
metrics, means over `count(batch)` things; `correct(batch)` -> (B,) booleans for validation; and `state`: the numbers
that it carries from step to step, saved with every checkpoint.

Shapes: B examples, T question tokens, L program tokens, A answers.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from iep.data.datasets import Batch
from iep.evaluation.metrics import exact_match
from iep.execution_engine.engine import ExecutionEngine
from iep.program_generator.decode import greedy, sample
from iep.program_generator.seq2seq import Seq2Seq
from iep.runtime.distributed import total
from iep.training.freezing import is_trained
from iep.vocab import NULL

Metrics = dict[str, Tensor]


@dataclass(frozen=True)
class Execution:
    """How the engine runs a minibatch; see `ExecutionEngine.planner` and `ExecutionEngine.forward`."""

    batching: str
    sharing: bool | None
    defer_weight_grads: bool
    attention_penalty: float = 0.0
    """What a minibatch's sum of attentions is multiplied with in the loss."""


class GeneratorTask:
    """Program generator by teacher forcing on true programs (Johnson et al. 2017, section 3.4)."""

    def __init__(self, generator: Seq2Seq, max_length: int):
        self.networks: dict[str, nn.Module] = {"generator": generator}
        self.generator = generator
        self.max_length = max_length
        self.state: dict[str, float] = {}

    def count(self, batch: Batch) -> int:
        """Tokens to predict."""
        return int((batch.programs[:, 1:] != NULL).sum())

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Mean cross entropy a token."""
        loss = self.generator.loss(batch.questions, batch.programs)
        return loss, {"loss": loss.detach()}

    def correct(self, batch: Batch) -> Tensor:
        """Is the greedily decoded program the true one, token for token?"""
        programs_BL = greedy(self.generator, batch.questions, self.max_length)
        return torch.from_numpy(exact_match(programs_BL.cpu(), batch.programs.cpu()))


class EngineTask:
    """Execution engine by cross entropy on answers, on true programs or those of a fixed generator (section 3.4)."""

    def __init__(self, engine: ExecutionEngine, execution: Execution, generator: Seq2Seq | None, max_length: int):
        self.networks: dict[str, nn.Module] = {"engine": engine}
        self.engine = engine
        self.execution = execution
        self.generator = generator
        self.max_length = max_length
        self.state: dict[str, float] = {}

    def logits(self, batch: Batch) -> Tensor:
        """(B, A) answer logits."""
        return self._look(batch)[0]

    def _look(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if self.generator is None:
            return self.engine.look(batch.features, batch.plan, self.execution.defer_weight_grads)
        programs_BL = greedy(self.generator, batch.questions, self.max_length)
        return _look(self.engine, batch, programs_BL, self.execution)

    def count(self, batch: Batch) -> int:
        """Questions."""
        return len(batch.index)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Mean cross entropy an answer and the attentions' penalty, and the share of right ones."""
        logits_BA, attention = self._look(batch)
        return _engine_loss(logits_BA, attention, batch.answers, self.execution)

    def correct(self, batch: Batch) -> Tensor:
        """Is the likeliest answer the true one?"""
        return self.logits(batch).argmax(1) == batch.answers


class JointTask:
    """Generator by REINFORCE and engine by backpropagation, on sampled programs (Johnson et al. 2017, section 3.4).

    The reward of a sampled program is 1 where the engine answers right, else 0; a moving average of the mean reward
    is its baseline (Williams 1992). `reward_decay` is that average's; `temperature` divides the logits that programs
    are drawn from. The loss of a network that is frozen is left out.
    """

    def __init__(
        self,
        generator: Seq2Seq,
        engine: ExecutionEngine,
        execution: Execution,
        max_length: int,
        reward_decay: float = 0.9,
        temperature: float = 1.0,
    ):
        self.networks: dict[str, nn.Module] = {"generator": generator, "engine": engine}
        self.generator = generator
        self.engine = engine
        self.execution = execution
        self.max_length = max_length
        self.reward_decay = reward_decay
        self.temperature = temperature
        self.state = {"reward_baseline": 0.0}

    def count(self, batch: Batch) -> int:
        """Questions."""
        return len(batch.index)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """The sum of the engine's cross entropy and the generator's REINFORCE surrogate, less what is frozen."""
        programs_BL, log_probs_B = sample(
            self.generator, batch.questions, self.max_length, self.temperature, batch.draws
        )
        logits_BA, attention = _look(self.engine, batch, programs_BL, self.execution)
        engine_loss, metrics = _engine_loss(logits_BA, attention, batch.answers, self.execution)
        rewards_B = (logits_BA.detach().argmax(1) == batch.answers).float()
        right, questions = total(torch.tensor([rewards_B.sum().item(), len(rewards_B)], dtype=torch.float64)).tolist()
        baseline = self.state["reward_baseline"]
        generator_loss = -((rewards_B - baseline) * log_probs_B).mean()
        metrics |= {
            "reward": rewards_B.mean(),
            "reward_baseline": torch.tensor(baseline),
            "generator_loss": generator_loss.detach(),
        }
        decay = self.reward_decay
        self.state["reward_baseline"] = decay * baseline + (1 - decay) * right / questions
        losses = {"generator": generator_loss, "engine": engine_loss}
        return sum(loss for name, loss in losses.items() if is_trained(self.networks[name])), metrics

    def correct(self, batch: Batch) -> Tensor:
        """Is the answer right, with the greedily decoded program?"""
        programs_BL = greedy(self.generator, batch.questions, self.max_length)
        return _look(self.engine, batch, programs_BL, self.execution)[0].argmax(1) == batch.answers


class BaselineTask:
    """A network that answers without programs, by cross entropy on answers (Johnson et al. 2017, CLEVR, section 4.1).

    `name` is its name among networks; it is called with questions, features and image rows, as those of
    `iep/baselines/` are.
    """

    def __init__(self, name: str, network: nn.Module):
        self.networks: dict[str, nn.Module] = {name: network}
        self.network = network
        self.state: dict[str, float] = {}

    def logits(self, batch: Batch) -> Tensor:
        """(B, A) answer logits."""
        return self.network(batch.questions, batch.features, batch.image_rows)

    def count(self, batch: Batch) -> int:
        """Questions."""
        return len(batch.index)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Mean cross entropy an answer, and the share of right ones."""
        return _answer_loss(self.logits(batch), batch.answers)

    def correct(self, batch: Batch) -> Tensor:
        """Is the likeliest answer the true one?"""
        return self.logits(batch).argmax(1) == batch.answers


def _look(engine: ExecutionEngine, batch: Batch, programs_BL: Tensor, execution: Execution) -> tuple[Tensor, Tensor]:
    """(B, A) answer logits of programs that the batch does not hold a plan of, and their attentions' sum, where these
    are penalized and the engine is trained."""
    attentions = engine.training and execution.attention_penalty > 0
    plan = engine.plan(programs_BL, batch.image_rows, execution.batching, execution.sharing, attentions)
    return engine.look(batch.features, plan, execution.defer_weight_grads)


def _engine_loss(
    logits_BA: Tensor, attention: Tensor, answers_B: Tensor, execution: Execution
) -> tuple[Tensor, Metrics]:
    """Mean cross entropy an answer, and the penalty of the attentions (Mascharka et al. 2018, section 4.1, a sum over
    the minibatch in their code)."""
    loss, metrics = _answer_loss(logits_BA, answers_B)
    if not execution.attention_penalty:
        return loss, metrics
    # A process's loss counts for its share of the questions, so that all of them make up the whole minibatch's sum.
    questions = torch.tensor(len(answers_B), dtype=torch.float64)
    share = questions.item() / total(questions).item()
    penalty = execution.attention_penalty / share * attention
    return loss + penalty, metrics | {"loss": (loss + penalty).detach(), "attention_penalty": penalty.detach()}


def _answer_loss(logits_BA: Tensor, answers_B: Tensor) -> tuple[Tensor, Metrics]:
    loss = F.cross_entropy(logits_BA.float(), answers_B)
    accuracy = (logits_BA.detach().argmax(1) == answers_B).float().mean()
    return loss, {"loss": loss.detach(), "accuracy": accuracy}
