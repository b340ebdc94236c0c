"""The training loop: batches through a task, an optimiser step each, validation, records and checkpoints.

One short loop for every model; what a step computes is passed in as a task (`tasks.py`). A run directory holds
config.yaml, last.pt, best.pt, metrics.jsonl and tensorboard/.
"""

import itertools
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from iep.config import Config, to_dict
from iep.datasets import Batch
from iep.devices import autocast, peak_memory
from iep.errors import InputError
from iep.networks import pack
from iep.training.checkpoint import BEST, LAST, random_states, restore_random_states, save_checkpoint
from iep.training.records import Records
from iep.vocab import Vocab


def learning_rate(config: Config, step: int) -> float:
    """The learning rate of a step: linear warm-up, then constant or a cosine down to a hundredth of the peak."""
    peak = config.peak_learning_rate
    if step < config.warmup:
        return peak * (step + 1) / config.warmup
    if config.decay == "constant":
        return peak
    progress = (step - config.warmup) / max(1, config.iterations - config.warmup)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


class Trainer:
    """The state of one run: task, optimiser, step and best score so far, with saving and resuming."""

    def __init__(self, task: Any, config: Config, vocab: Vocab, out: Path, device: torch.device):
        self.task = task
        self.config = config
        self.vocab = vocab
        self.out = out
        self.device = device
        self.step = 0
        self.best = -1.0
        self.parameters = [p for net in task.networks.values() for p in net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.peak_learning_rate, weight_decay=config.weight_decay, fused=True
        )

    def save(self, name: str) -> None:
        """Write the checkpoint `name` into the run directory, whole or not at all."""
        content = {
            "model": self.config.model,
            "step": self.step,
            "best": self.best,
            "task": self.task.state,
            "networks": pack(self.task.networks),
            "optimizer": self.optimizer.state_dict(),
            "random": random_states(),
            "config": to_dict(self.config),
            "vocab": self.vocab.to_json(),
        }
        save_checkpoint(self.out / name, content)

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Go on from a checkpoint whose networks are already loaded into the task."""
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.step, self.best = checkpoint["step"], checkpoint["best"]
        self.task.state.update(checkpoint["task"])
        restore_random_states(checkpoint["random"])

    def train_step(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Differentiate the task's loss on `batch`, step the optimiser; returns the step's metrics."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.step)
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.device, self.config.precision):
            loss, metrics = self.task.loss(batch.to(self.device))
        loss.backward()
        if self.config.clip_gradients is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.config.clip_gradients)
        self.optimizer.step()
        self.step += 1
        return metrics

    @torch.no_grad()
    def validate(self, batches: Iterable[Batch]) -> float:
        """Share of examples that the task gets right."""
        self._train_mode(False)
        with autocast(self.device, self.config.precision):
            right = [self.task.correct(batch.to(self.device)) for batch in batches]
        self._train_mode(True)
        return torch.cat(right).float().mean().item()

    def fit(self, training: Iterable[Batch], validation: Iterable[Batch] | None) -> None:
        """Train to `config.iterations`; validate and save every `validate_every` steps and at the end.

        `training` yields the batches from the current step on. Without `validation` the last checkpoint is the best.

        Raises:
            InputError: the loss is not finite where it is logged or saved; nothing is saved then.
        """
        config = self.config
        self._train_mode(True)
        with (
            Records(self.out, self.step) as records,
            tqdm(total=config.iterations, initial=self.step, unit="it", desc=config.model, mininterval=1.0) as bar,
        ):
            clock, examples = time.perf_counter(), 0
            for batch in itertools.islice(training, config.iterations - self.step):
                metrics = self.train_step(batch)
                examples += len(batch.index)
                bar.update()
                last = self.step == config.iterations
                saving = last or self.step % config.validate_every == 0
                if saving or self.step % config.log_every == 0:
                    self._check_finite(metrics["loss"].item())
                if last or self.step % config.log_every == 0:
                    row = {name: value.item() for name, value in metrics.items()}
                    row["questions_per_second"] = examples / (time.perf_counter() - clock)
                    row["peak_memory_gb"] = peak_memory(self.device) / 1e9
                    row["learning_rate"] = self.optimizer.param_groups[0]["lr"]
                    records.write(self.step, row)
                    bar.set_postfix_str(_summary(row))
                    clock, examples = time.perf_counter(), 0
                if saving:
                    paused = time.perf_counter()
                    self._validate_and_save(validation, records, bar)
                    clock += time.perf_counter() - paused  # only training counts

    def _check_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise InputError(
                f"{self.out}: the loss is {loss} at iteration {self.step}; nothing was saved since the last "
                "checkpoint; try a lower learning_rate or clip_gradients=1"
            )

    def _validate_and_save(self, validation: Iterable[Batch] | None, records: Records, bar: tqdm) -> None:
        improved = True
        if validation is not None:
            score = self.validate(validation)
            records.write(self.step, {"validation_accuracy": score})
            bar.write(f"{self.config.model} iteration {self.step}: validation accuracy {100 * score:.1f}%")
            improved = score > self.best
            self.best = max(score, self.best)
        if improved:
            self.save(BEST)
        self.save(LAST)

    def _train_mode(self, on: bool) -> None:
        for network in self.task.networks.values():
            network.train(on and any(p.requires_grad for p in network.parameters()))


def _summary(row: dict[str, float]) -> str:
    shown = [f"loss {row['loss']:.3f}"]
    if "accuracy" in row:
        shown.append(f"accuracy {100 * row['accuracy']:.0f}%")
    return ", ".join([*shown, f"{row['questions_per_second']:.0f} questions/s"])
