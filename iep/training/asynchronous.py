"""Asynchronous training of the execution engine: minibatches -> instances, which `iep/asynchronous/` runs on workers.

Every part of the engine, the stem and the classifier among them, is an op with an optimiser of its own; the loss of an
instance runs on the classifier's worker. The devices of the engine's placement are the workers, with a thread each.
`loop.py` validates and saves where nothing is in flight.
"""

import itertools
import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from iep.asynchronous.conductor import Record
from iep.asynchronous.trainer import AsynchronousTrainer, Instance, Run
from iep.config import Config
from iep.data.datasets import Batch
from iep.errors import InputError
from iep.execution_engine.parts import NONE
from iep.runtime.devices import autocast, peak_memory, resolve_precision
from iep.runtime.distributed import world_size
from iep.runtime.signals import stop_delayed, stop_signal
from iep.training.loop import Trainer
from iep.training.tasks import EngineTask, Metrics

MOMENTUM = 0.05
"""The weight of the newest minibatch in the moving averages of the numbers of calls."""


class NotFiniteError(Exception):
    """The loss of an instance is not finite."""

    def __init__(self, batch: Batch, loss: float):
        super().__init__(f"the loss is {loss}")
        self.batch, self.loss = batch, loss


def check_asynchronous(config: Config) -> None:
    """Check the settings of asynchronous training.

    Raises:
        InputError: there are several processes, or no workers; or `instance_size` does not divide `batch_size`.
    """
    if not config.asynchronous:
        return
    if world_size() > 1:
        raise InputError(f"asynchronous training is for one process, and there are {world_size()}; leave out torchrun")
    if config.placement == NONE:
        raise InputError("asynchronous training needs workers: give --threads N, or --placement and --devices")
    if config.batch_size % config.instance_size:
        sizes = f"batch_size is {config.batch_size} and instance_size {config.instance_size}"
        raise InputError(f"{sizes}; expected a multiple of instance_size")


def fit_asynchronously(run: Trainer, batches: Iterator[Batch], validation: Iterable[Batch] | None) -> None:
    """Train a run, whose engine is placed and in training mode, on batches, each an instance.

    Raises:
        Stopped: a signal has asked the process to stop.
        InputError: the loss of an instance is not finite.
    """
    _Workers(run).fit(batches, validation)


class _Workers:
    """The workers that train the engine of a run.

    Between stretches of training, the run's optimiser holds the state of all parameters' optimisers, for checkpoints.
    """

    def __init__(self, run: Trainer):
        assert isinstance(run.task, EngineTask)  # other models have no asynchronous training
        self.run, self.task, self.engine, self.config = run, run.task, run.task.engine, run.config
        self.names = self.engine.ops
        self.rates: list[float] = []
        """The learning rate of each instance of this stretch."""
        self.newest = 0
        """The newest instance that has run on a worker, whose learning rate is that of the next updates."""
        self.calls: dict[int, float] = {}
        """The moving average of the number of calls of each op in the minibatches that use it."""
        self.metrics: list[Metrics] = []
        """The metrics of the instances whose losses have been computed since the last row."""
        self._lock = threading.Lock()
        config = self.config
        self.trainer = AsynchronousTrainer(
            {op: getattr(self.engine, part) for op, part in self.names.items()},
            self._make_optimizer,
            len(self.engine.placement.devices),
            config.max_active_keys,
            config.min_update_frequency or 1,
            context=lambda: autocast(torch.device(self.engine.placement.devices[0]), config.precision),
        )
        for state in self.trainer.ops.values():
            for parameter in state.weights:
                if state.optimizer is not None and parameter in run.optimizer.state:
                    state.optimizer.state[parameter] = run.optimizer.state[parameter]

    def fit(self, batches: Iterator[Batch], validation: Iterable[Batch] | None) -> None:
        """Train on the batches in stretches that end with a validation, or when a stop is requested."""
        run, config = self.run, self.config
        assert run.records is not None  # the only process writes them
        while run.step < config.iterations:
            end = min(config.iterations, (run.step // config.validate_every + 1) * config.validate_every)
            with stop_delayed():  # a signal stops the run when nothing is in flight
                try:
                    row = self._train(self._instances(batches, end))
                except NotFiniteError as error:
                    run.step -= 1
                    run.raise_not_finite(error.batch.index.tolist(), error.loss)
                run.validation_due = run.step == end
                self._log()
                run.records.write(run.step, row)
            if run.validation_due:
                run.validate_and_save(validation)

    def _train(self, instances: Iterable[Instance]) -> dict[str, float]:
        """Train on instances, and return a row of metrics when nothing is in flight.

        Gradients that are too few for an update are then used as well, so that weights and optimisers are the whole
        state.

        Raises:
            NotFiniteError: the loss of an instance is not finite.
        """
        self.rates, self.newest, threads = [], 0, torch.get_num_threads()
        torch.set_num_threads(max(1, threads // self.trainer.num_workers))
        try:
            return self._row(self.trainer.run(instances, note=self._note, update=True))
        finally:
            torch.set_num_threads(threads)
            for state in self.trainer.ops.values():
                if state.optimizer is not None:
                    self.run.optimizer.state.update(state.optimizer.state)

    def _instances(self, batches: Iterator[Batch], end: int) -> Iterator[Instance]:
        """Yield the instances of all minibatches up to the step `end`, or until a stop is requested."""
        run, config = self.run, self.config
        while run.step < end and stop_signal() is None:
            minibatch = list(itertools.islice(batches, config.batch_size // config.instance_size))
            run.set_learning_rate()
            run.step += 1
            instances = [self._instance(batch) for batch in minibatch]
            self.rates += [run.optimizer.param_groups[0]["lr"]] * len(instances)
            if not config.min_update_frequency:
                self._follow(Counter(step.op for instance in instances for step in instance.steps if step.op >= 0))
            yield from instances
            run.advance(sum(len(batch.index) for batch in minibatch))
            if run.step % config.log_every == 0 and run.step < end:
                self._log()

    def _log(self) -> None:
        """Write a row of metrics, unless no loss has been computed since the last one."""
        with self._lock:
            seen, self.metrics = self.metrics, []
        if seen:
            means = {name: torch.stack([each[name] for each in seen]).mean().item() for name in seen[0]}
            self.run.log(means, self.run.examples, [peak_memory(self.run.device)])

    def _make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, weight_decay=self.config.weight_decay, fused=True)

        def before_step(*_: Any) -> None:
            optimizer.param_groups[0]["lr"] = self.rates[self.newest]
            if self.config.clip_gradients is not None:
                nn.utils.clip_grad_norm_(parameters, self.config.clip_gradients)

        optimizer.register_step_pre_hook(before_step)
        return optimizer

    def _note(self, record: Record) -> None:
        self.newest = max(self.newest, record.task.instance)

    def _follow(self, calls: Counter[int]) -> None:
        """Set the update frequency of each op to the mean number of its calls in the minibatches that use it."""
        for op, number in calls.items():
            self.calls[op] = mean = (1 - MOMENTUM) * self.calls.get(op, number) + MOMENTUM * number
            self.trainer.min_update_frequency[op] = round(mean)

    def _instance(self, batch: Batch) -> Instance:
        plan = batch.plan
        precision = resolve_precision(self.config.precision, batch.features.device)
        dtype = torch.bfloat16 if precision == "bfloat16" else batch.features.dtype
        inputs = self.engine.inputs_of(batch.features, plan, dtype)
        return Instance(plan.plan, inputs, partial(self._loss, batch))

    def _loss(self, batch: Batch, scores_BA: Tensor, *attentions: Tensor) -> Tensor:
        """Return the share of an instance in the loss of its minibatch: in the mean over answers, and in the sum of the
        attentions."""
        parts = self.config.batch_size / self.config.instance_size
        attention = parts * sum((each.sum(dtype=torch.float32) for each in attentions), torch.zeros(()))
        loss, metrics = self.task.engine_loss(scores_BA, attention, batch.answers.to(scores_BA.device))
        if not math.isfinite(loss.item()):
            raise NotFiniteError(batch, loss.item())
        with self._lock:
            self.metrics.append(metrics)
        return loss / parts

    def _row(self, run: Run) -> dict[str, float]:
        staleness = [each.updates for each in run.staleness.elements()]
        row = {f"utilisation/worker_{number}": share for number, share in enumerate(run.utilisation)}
        row |= {"staleness/mean": float(np.mean(staleness)), "staleness/greatest": max(staleness)} if staleness else {}
        return row | {f"updates/{self.names[op]}": number for op, number in run.updates.items() if number}
