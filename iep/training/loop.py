"""The training loop: an optimiser step for each batch, validation, records and checkpoints.

There is one short loop for every model. A task (`tasks.py`) computes the loss of a step, and `parallel.py` lets several
processes take a step together, of which the first writes the files. A run directory holds config.yaml, step-N.pt (the
newest few), best.pt, metrics.jsonl and tensorboard/. Whatever ends a run, its newest checkpoint is the state between
two steps, and a run resumed from it gives the same bits as one that never stopped.
"""

import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from iep.config import PLACES, Config, settings_of
from iep.data.datasets import Batch
from iep.data.loader import on_device
from iep.data.ordering import step_seed
from iep.errors import InputError
from iep.models.checkpoint import BEST, Checkpoint, RunState, remove_old, step_name, write_checkpoint, write_weights
from iep.models.network import Network
from iep.runtime.devices import autocast, enough_memory, peak_memory
from iep.runtime.distributed import gather, is_main, rank, total, world_size
from iep.runtime.records import VALIDATION, Records, start_tracker
from iep.runtime.signals import Stopped, stop_delayed
from iep.training.freezing import train_mode
from iep.training.parallel import Agreement, Replicas
from iep.training.run_data import RunData
from iep.training.tasks import Task

HINT = "try a lower learning_rate or clip_gradients=1"
SHOWN = 8
"""The greatest number of questions or images that a message lists."""


def learning_rate(config: Config, step: int) -> float:
    """Return the learning rate of a step: linear warm-up, then constant or a cosine to a hundredth of the peak."""
    peak = config.peak_learning_rate
    if step < config.warmup:
        return peak * (step + 1) / config.warmup
    if config.decay == "constant":
        return peak
    progress = (step - config.warmup) / max(1, config.iterations - config.warmup)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


TrainOn = Callable[["Trainer", Iterator[Batch], Iterable[Batch] | None], None]
"""A way to train a run on batches from its current step on, validating with the second batches when that is due."""


class Trainer:
    """The state of one run: task, optimiser, step and best score so far, with saving and resuming.

    Attributes:
        step: the number of steps that are done.
        best: the best validation score so far; -1 before the first validation.
        best_step: the step of the best checkpoint.
        validation_due: whether the last step must be followed by a validation that is not done yet.
    """

    def __init__(self, task: Task, config: Config, data: RunData, out: Path, networks: Mapping[str, Network]):
        """Make the optimiser, and give all processes the same weights.

        Args:
            networks: the task's networks, with what checkpoints store of them.
        """
        self.task, self.config, self.data, self.out = task, config, data, out
        self.device = data.device
        self.step, self._saved_step = 0, 0
        self.best, self.best_step = -1.0, 0
        self.validation_due = False
        self.records: Records | None = None
        """The files with the metrics, which the first process writes while it trains."""
        self._networks, self._bar = networks, tqdm(disable=True)
        self._clock, self.examples = 0.0, 0
        """The time of the last row of metrics, and the number of examples of this process since then."""
        self.sums: Counter[str] = Counter()
        """The sums of the metrics over the steps since the last row, and the number of these `steps`."""
        self.parameters = [p for net in task.networks.values() for p in net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.peak_learning_rate, weight_decay=config.weight_decay, fused=True
        )
        self.replicas = Replicas(task, self.parameters)

    def restore(self, start: Checkpoint) -> None:
        """Continue from a checkpoint whose networks are already loaded into the task.

        Raises:
            InputError: the state of the optimiser does not belong to these networks.
        """
        run = start.state
        states = run.optimizer["state"]
        for number, state in states.items():  # the fused optimiser would read and write beyond its memory
            is_known = number in range(len(self.parameters))
            shape = self.parameters[number].shape if is_known else None
            if {state["exp_avg"].shape, state["exp_avg_sq"].shape} != {shape}:
                raise InputError(f"{start.path}: optimizer.state.{number} is not of a parameter of these networks")
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": states})
        self.step, self.validation_due = run.step, run.validation_due
        self.optimizer.param_groups[0]["lr"] = learning_rate(self.config, max(0, self.step - 1))  # saved with the state
        if (self.out / BEST).exists():
            self.best, self.best_step = run.best, run.best_step
        self.task.state.update(run.task)
        self.sums.update(run.sums)
        self._saved_step = self.step

    def fit(
        self, training: Iterable[Batch], validation: Iterable[Batch] | None, train_on: TrainOn | None = None
    ) -> None:
        """Train to `config.iterations`, validating and saving every `validate_every` steps and at the end.

        Args:
            training: the batches from the current step on.
            validation: the batches to validate on; without them, the last checkpoint is the best.
            train_on: how to train this run on batches, such as `fit_asynchronously`; None for a step for each batch.

        Raises:
            Stopped: a signal has asked a process to stop; its step is finished and saved.
            InputError: the loss or a weight is not finite, or a batch does not fit into memory.
        """
        config = self.config
        what = f"a batch of {config.batch_size} {self.task.examples}; --resume continues from the last checkpoint"
        try:
            with (
                enough_memory(self.device, what, "batch_size"),
                # Several processes stop at a step that they agree on, not where the signal arrives.
                stop_delayed() if world_size() > 1 else nullcontext(),
                tqdm(
                    total=config.iterations,
                    initial=self.step,
                    desc=config.model,
                    mininterval=1,
                    disable=not is_main() or not sys.stderr.isatty(),
                ) as self._bar,
                # The error of a worker may keep frames, and with them the loader, whose processes would not end.
                closing(on_device(training, self.device)) as batches,
            ):
                if is_main():
                    tracker = start_tracker(config.tracker, self.out, settings_of(config))
                    self.records = Records(self.out, self.step, self.validation_due, tracker)
                if self.step == 0 and validation is not None:
                    self._tell(f"before the first iteration: {_accuracy(self.validate(validation))}")
                if self.validation_due:
                    self.validate_and_save(validation)
                self._train_mode(True)
                self._clock = time.perf_counter()
                (train_on or Trainer.train_on)(self, batches, validation)
        except Stopped as stop:
            if self.step > self._saved_step:
                self._check_weights()
                self.save_step()
            if self.step == config.iterations and not self.validation_due:
                return  # the run was complete
            outcome = f"after iteration {self.step}, which is saved; --resume continues from there"
            raise Stopped(stop.number, outcome if self.step else "before the first iteration") from None

    def train_on(self, batches: Iterator[Batch], validation: Iterable[Batch] | None) -> None:
        """Take a step on each batch, and validate and save when it is due.

        Raises:
            Stopped: a signal has asked a process to stop; its step is finished.
            InputError: the loss or a weight is not finite.
        """
        for batch in itertools.islice(batches, self.config.iterations - self.step):
            with stop_delayed():  # a signal stops the run between two steps
                agreed = self.train_step(batch)
                self.sums.update(agreed.metrics | {"steps": 1})
                self.advance(len(batch.index))
                if self.step == self.config.iterations or self.step % self.config.log_every == 0:
                    steps = self.sums.pop("steps")
                    means = {name: value / steps for name, value in self.sums.items()}
                    examples = int(total(torch.tensor(self.examples)))
                    self.log(means, examples, gather(peak_memory(self.device)))
            if agreed.stop is not None:
                raise Stopped(agreed.stop)
            if self.validation_due:
                self.validate_and_save(validation)

    def train_step(self, batch: Batch) -> Agreement:
        """Differentiate the task's loss on `batch`, step the optimiser, and return what all processes know of the step.

        Raises:
            InputError: the loss is not finite. No weight has changed.
        """
        torch.manual_seed(step_seed(self.config.seed, self.step, rank()))
        self.set_learning_rate()
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.device, self.config.precision):
            loss, metrics = self.replicas.loss(batch)
        agreed = self.replicas.backward(batch, loss, metrics)
        if not math.isfinite(agreed.loss):
            self.raise_not_finite(batch.index.tolist(), agreed.loss)
        if self.config.clip_gradients is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.config.clip_gradients)
        self.optimizer.step()
        self.step += 1
        self.validation_due = self.step == self.config.iterations or self.step % self.config.validate_every == 0
        return agreed

    def set_learning_rate(self) -> None:
        """Set the learning rate of the next step."""
        self.optimizer.param_groups[0]["lr"] = learning_rate(self.config, self.step)

    def advance(self, examples: int) -> None:
        """Count the examples of a step that is done in this process."""
        self.examples += examples
        self._bar.update()

    def log(self, metrics: dict[str, float], examples: int, memory: Sequence[int] | None) -> None:
        """Write a row with the means of the metrics and the speed since the last row.

        Args:
            metrics: the means of the metrics over the steps since the last row.
            examples: the number of examples in all processes since the last row.
            memory: the peak memory of each process, in bytes; None in processes that do not write.
        """
        speed = examples / (time.perf_counter() - self._clock)
        self._clock, self.examples = time.perf_counter(), 0
        self.sums.clear()
        if self.records is None or memory is None:
            return
        row = {
            **metrics,
            f"{self.task.examples}_per_second": speed,
            "peak_memory_gb": max(memory) / 1e9,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
        }
        self.records.write(self.step, row)
        accuracy = f", accuracy {100 * row['accuracy']:.0f}%" if "accuracy" in row else ""
        text = f"loss {row['loss']:.3f}{accuracy}, {speed:.0f} {self.task.examples}/s"
        self._bar.set_postfix_str(text)
        if self._bar.disable:
            when = f"iteration {self.step} of {self.config.iterations}"
            tqdm.write(f"{self.config.model} {when}: {text}", file=sys.stderr)

    def validate_and_save(self, validation: Iterable[Batch] | None) -> None:
        """Validate if there is a split for it, and write the checkpoints of this step: the best, then the numbered one.

        A run that is killed between the two resumes from the numbered checkpoint before, and comes here again.
        """
        paused = time.perf_counter()
        self._check_weights()
        score = None if validation is None else self.validate(validation)  # a signal interrupts it
        with stop_delayed():
            self.validation_due = False
            improved = score is None or score >= self.best  # of equal ones, the newer
            if improved:
                self.best, self.best_step = self.best if score is None else score, self.step
            if score is not None and self.records is not None:
                self.records.write(self.step, {VALIDATION: score})
                self._tell(f"iteration {self.step}: {_accuracy(score)}")
            if improved:
                self.save(BEST)
            self.save_step()
        self._clock += time.perf_counter() - paused  # the speed is that of training alone

    @torch.no_grad()
    def validate(self, batches: Iterable[Batch]) -> float:
        """Return the share of examples that the task gets right, and write its notes on the networks."""
        self._train_mode(False)
        what = f"validation with {self.config.val_batch_size} {self.task.examples} at a time"
        with (
            enough_memory(self.device, what, "val_batch_size"),
            autocast(self.device, self.config.precision),
            self.task.validating() as notes,
        ):
            correct = [self.task.correct(batch) for batch in on_device(batches, self.device)]
        self._train_mode(True)
        for note in notes if self.step else ():
            self._tell(f"iteration {self.step}: {note}")
        counts = torch.tensor([sum(int(correct_B.sum()) for correct_B in correct), sum(map(len, correct))])
        right, questions = total(counts).tolist()
        return right / questions

    def save(self, name: str) -> None:
        """Write the checkpoint `name` into the run directory, whole or not at all, in the first process."""
        if not is_main():
            return
        features = self.data.training.features
        settings = settings_of(self.config)
        run = RunState(
            step=self.step,
            config={key: value for key, value in settings.items() if key not in PLACES},
            validation_due=self.validation_due,
            best=self.best,
            best_step=self.best_step,
            sums=dict(self.sums),
            task=self.task.state,
            optimizer=self.optimizer.state_dict(),
        )
        packed = {name: network.packed() for name, network in self._networks.items()}
        recipe = {} if features is None else features.recipe
        checkpoint = Checkpoint(self.out / name, packed, self.data.vocab, recipe, run)
        write_checkpoint(checkpoint)
        if name == BEST:
            write_weights(self.out, checkpoint)

    def save_step(self) -> None:
        """Write the numbered checkpoint of this step, and then remove the oldest ones but for `config.keep`."""
        self.save(step_name(self.step))
        if is_main():
            remove_old(self.out, self.config.keep)
        self._saved_step = self.step

    def describe_best(self) -> str:
        """Return which checkpoint is the best and at what accuracy."""
        accuracy = "" if self.best < 0 else f", {_accuracy(self.best)}"
        return f"the best checkpoint is {self.out / BEST}, of iteration {self.best_step}{accuracy}"

    def raise_not_finite(self, positions: Sequence[int], loss: float) -> NoReturn:
        """End the run before a step whose loss is not finite, since the weights would not be finite after it.

        Args:
            positions: those of this process's questions.

        Raises:
            InputError: always; names the questions of all processes, and the images whose features are not finite.
        """
        what, reason = f"{self.out}: the loss is {loss} at iteration {self.step + 1}", HINT
        gathered = gather(positions)
        if gathered is None:
            raise InputError(what)
        questions, features = self.data.training.questions.select(np.concatenate(gathered)), self.data.training.features
        if features is not None:
            images = np.unique(questions.image_idxs)
            bad = images[~features.read(images).isfinite().flatten(1).all(1).numpy()]
            if len(bad):
                reason = f"{features.path}: the features of image {_first(bad)} are not finite"
        where = f"on {len(questions)} questions (question_index {_first(questions.orig_idxs)})"
        raise InputError(f"{what}, {where}; {reason}")

    def _check_weights(self) -> None:
        """Check parameters and running statistics before they are saved: gradients may be infinite where the loss is
        finite.

        Raises:
            InputError: a weight is not finite.
        """
        held = (tensor for net in self.task.networks.values() for tensor in net.state_dict().values())
        if not all(bool(tensor.isfinite().all()) for tensor in held):
            raise InputError(
                f"{self.out}: weights are not finite after iteration {self.step}; nothing was saved since the last "
                f"checkpoint; {HINT}"
            )

    def _train_mode(self, on: bool) -> None:
        for network in self.task.networks.values():
            train_mode(network, on)

    def _tell(self, text: str) -> None:
        if is_main():
            tqdm.write(f"{self.config.model} {text}")


def _accuracy(score: float) -> str:
    return f"validation accuracy {100 * score:.1f}%"


def _first(numbers: np.ndarray) -> str:
    return ", ".join(map(str, numbers[:SHOWN].tolist())) + (", ..." if len(numbers) > SHOWN else "")
