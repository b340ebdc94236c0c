"""Measure asynchronous training on threads and under a virtual clock: `iep-bench async`.

The same network, placed on the same workers, is trained in several ways: synchronously (one instance in flight, and an
update of every op when it is done), with a flush after every K instances (K in flight, and an update when all are
done), and asynchronously (K in flight, and each op updates itself). A round is an epoch, and every seed trains a new
network. Simulated workers have the costs that `measured_costs` found in one thread, and compute real gradients.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import nn

from iep.asynchronous.conductor import PlanStep, WorkerTask
from iep.asynchronous.drivers import Record, run_threads, run_virtual
from iep.asynchronous.trainer import AsynchronousTrainer, Driver, Instance, Run
from iep.bench.async_engine import EngineNetwork, EngineQuestions
from iep.bench.compare import Case, Competitor, Fact
from iep.bench.tables import Benchmark
from iep.config import Config
from iep.errors import InputError
from iep.workloads.deduction import Deducer, deductions
from iep.workloads.list_reduction import ListReducer, list_reductions
from iep.workloads.molecules import PolarityRegressor, molecules
from iep.workloads.sentiment import SentimentTreeLSTM, sentiment_trees

SYNCHRONOUS = "synchronous"
CALIBRATION = 100
"""The number of instances whose tasks give the costs of simulated workers."""
SHOWN = 4
"""The number of instances of synchronous training in the picture of the timeline."""
COLOURS = {"forward pass": "#9ecae1", "backward pass": "#fdae6b"}
DriverOf = Callable[[AsynchronousTrainer], Driver]
Costs = tuple[dict[tuple[int, bool], float], dict[int, float]]
"""The median seconds of tasks by op and direction, and of updates by op."""


@dataclass(frozen=True)
class Workload:
    """Samples and a network.

    Attributes:
        samples: a number and a generator of random numbers -> that many samples.
        network: the settings of the network, such as its width -> a new network, which has `ops`, `placement`, `plan`,
            `inputs`, `loss` and `score` like `ListReducer`.
        score: the name of its score.
        is_accuracy: whether the score is an accuracy from 0 to 1. Otherwise it is an error, and lower is better.
        unseen: a number and a generator -> the samples for the score; None for those of `samples`.
    """

    samples: Callable[[int, np.random.Generator], list]
    network: Callable[..., nn.Module]
    score: str = "accuracy"
    is_accuracy: bool = True
    unseen: Callable[[int, np.random.Generator], list] | None = None

    def text(self, score: float) -> str:
        """Return a score as it is printed."""
        return f"{100 * score:.1f}%" if self.is_accuracy else f"{score:.3f}"


WORKLOADS = {
    "list-reduction": Workload(list_reductions, ListReducer),
    "tree-lstm": Workload(sentiment_trees, SentimentTreeLSTM),
    "deduction": Workload(deductions, Deducer),
    "molecules": Workload(molecules, PolarityRegressor, "error", is_accuracy=False),
}


def workload_of(name: str, data: Path | None, config: Config | None) -> Workload:
    """Return a workload by its name; `data` and `config` are for that of the engine.

    Raises:
        InputError: the data are missing or damaged.
    """
    if name != "engine":
        return WORKLOADS[name]
    questions = EngineQuestions(data, config)
    known, unseen = (partial(questions.samples, each) for each in (config.train_split, config.val_split))
    return Workload(known, partial(EngineNetwork, questions), unseen=unseen)


class Way(NamedTuple):
    """One way to train, which has a row in each table."""

    name: str
    max_active_keys: int
    min_update_frequency: int = 0
    """0 for the number of calls that the op has in an instance on average."""
    flush_every: int | None = None
    """None for asynchronous training."""


def ways_to_train(keys: Sequence[int], frequencies: Sequence[int]) -> list[Way]:
    """Return synchronous training, a flush for each number of keys, and asynchronous training in each combination."""
    ways = [Way(SYNCHRONOUS, 1, flush_every=1)]
    ways += [Way(f"flush every {each} instances", each, flush_every=each) for each in keys if each > 1]
    found = [*product(keys, frequencies)]
    name = "asynchronous, {} in flight, frequency {}" if len(found) > 1 else "asynchronous"
    return ways + [Way(name.format(number, each or "auto"), number, each) for number, each in found]


class Epoch(NamedTuple):
    """The results of one epoch: its real or simulated seconds, and the score of unseen samples at its end."""

    seconds: float
    score: float
    run: Run


@dataclass(frozen=True)
class Training:
    """What all ways to train share: the network, its data, and how it learns."""

    workload: Workload
    network: Mapping[str, Any]
    minibatches: Sequence[Sequence]
    unseen: Sequence
    backward_weights: str
    learning_rate: float
    epochs: int
    seeds: Sequence[int]
    target: float | None
    replicas: Mapping[int, int]
    """The number of workers that hold each op, of those that several do."""
    op_names: Sequence[str]

    def model(self, seed: int) -> nn.Module:
        """Return a new network, which is always the same for a seed."""
        torch.manual_seed(seed)
        return self.workload.network(**self.network)

    def instances(self, workers: int) -> list[Instance]:
        """Return an instance for each minibatch, with its plan for the workers, among which replicas are dealt."""
        model, instances = self.model(self.seeds[0]), []
        placement = model.placement(workers)
        for number, minibatch in enumerate(self.minibatches):
            dealt = {op: (placement.ops[op] + number % min(n, workers)) % workers for op, n in self.replicas.items()}
            plan = model.plan(minibatch, replace(placement, ops={**placement.ops, **dealt}))
            instances.append(Instance(plan, model.inputs(minibatch), model.loss(minibatch)))
        return instances

    def trainer(self, model: nn.Module, instances: Sequence[Instance], way: Way) -> AsynchronousTrainer:
        """Return a trainer of a network."""
        calls = Counter(step.op for instance in instances for step in instance.steps)
        # By default, each op has as many updates as in synchronous training.
        frequency = {op: way.min_update_frequency or max(1, round(n / len(instances))) for op, n in calls.items()}
        workers = instances[0].plan.num_devices
        ops = {op: module for op, module in enumerate(model.ops) if op in calls}
        adam, updates = partial(torch.optim.Adam, lr=self.learning_rate), None if way.flush_every else frequency
        held = {op: min(number, workers) for op, number in self.replicas.items() if op in ops}
        return AsynchronousTrainer(
            ops, adam, workers, way.max_active_keys, updates, way.flush_every, self.backward_weights, held
        )


def measured_costs(training: Training, instances: Sequence[Instance]) -> Costs:
    """Train a new network in one thread, one instance after the other, and return the costs."""
    trainer = training.trainer(training.model(training.seeds[0]), instances, Way("", 1, 10**9))  # no op updates itself
    numbers = {step.op: number for number, instance in enumerate(instances) for step in instance.steps}
    tasks, updates = defaultdict(list), defaultdict(list)

    def note(record: Record) -> None:
        tasks[record.op, record.task.is_backward].append(record.end - record.start)

    for number in {*range(0, len(instances), max(1, len(instances) // CALIBRATION)), *numbers.values()}:
        trainer.run([instances[number]], run_virtual, note)
        for op, state in trainer.ops.items():
            if state.pending:
                start = time.perf_counter()
                state.update()
                updates[op].append(time.perf_counter() - start)
    of_tasks = {kind: median(seconds) for kind, seconds in tasks.items()}
    return of_tasks, {op: median(seconds) for op, seconds in updates.items()}


def simulated(costs: Costs, latency: float, bandwidth: float, trainer: AsynchronousTrainer) -> Driver:
    """Return a driver with the virtual clock, on which updates and second forward passes of stale calls take time.

    An update between instances, as in synchronous training, delays the next task of its op.
    """
    of_tasks, of_updates = costs
    versions: dict[tuple[int, int], int] = defaultdict(int)
    """The version of each op on each worker after its last task there."""
    used: dict[tuple[int, int], int] = {}
    """The version in the forward pass of each call in flight."""

    def cost(step: PlanStep, task: WorkerTask) -> float:
        seconds, op = of_tasks[step.op, task.is_backward], step.op
        if op in of_updates:
            place = op, step.worker
            before, versions[place] = versions[place], trainer.replica(*place).version
            if not task.is_backward:
                used[task.instance, task.call] = versions[place]
            elif used.pop((task.instance, task.call)) < before and trainer.backward_weights == "current":
                seconds += of_tasks[op, False]
            seconds += of_updates[op] * (versions[place] - before)
        return seconds

    def delay(task: WorkerTask) -> float:
        return 1e-6 * latency + 1e-9 / bandwidth * trainer.message_bytes(task)

    return partial(run_virtual, cost=cost, delay=delay)


@dataclass(frozen=True, eq=False)
class Learner:
    """Trains in one way, with one seed after the other."""

    training: Training
    way: Way
    instances: Sequence[Instance]
    driver_of: DriverOf
    curves: list[list[Epoch]] = field(default_factory=list)
    """The epochs of every seed."""

    def rounds(self) -> Iterator[dict[str, float]]:
        """Train for an epoch, which is a round of the comparison, and yield the seconds for an instance."""
        training = self.training
        for seed in training.seeds:
            model, rng = training.model(seed), np.random.default_rng(seed)
            trainer = training.trainer(model, self.instances, self.way)
            driver = self.driver_of(trainer)
            self.curves.append([])
            for _ in range(training.epochs):
                order = [self.instances[each] for each in rng.permutation(len(self.instances))]
                start = time.perf_counter()
                run = trainer.run(order, driver)
                seconds = time.perf_counter() - start if driver is run_threads else run.seconds
                self.curves[-1].append(Epoch(seconds, model.score(training.unseen), run))
                yield {"computation": seconds / len(self.instances)}

    @property
    def epochs(self) -> list[Epoch]:
        """The epochs of all seeds."""
        return [epoch for curve in self.curves for epoch in curve]

    def staleness(self) -> dict[str, Counter[int]]:
        """Return the number of backward passes of each staleness by the name of the op."""
        found: dict[str, Counter[int]] = defaultdict(Counter)
        for (op, updates), number in sorted(sum((epoch.run.staleness for epoch in self.epochs), Counter()).items()):
            found[self.training.op_names[op]][updates] += number
        return found

    def facts(self) -> dict[str, Fact]:
        """Return the columns of the row; loss and score are those of the last epoch."""
        last, workload = [curve[-1] for curve in self.curves], self.training.workload
        used = fmean(share for epoch in self.epochs for share in epoch.run.utilisation)
        return {
            "utilisation": f"{100 * used:.0f}%",
            **summary(sum(self.staleness().values(), Counter())),
            "updates per epoch": fmean(sum(epoch.run.updates.values()) for epoch in self.epochs),
            "loss": over_seeds([fmean(epoch.run.losses) for epoch in last], "{:.3f}".format),
            workload.score: over_seeds([epoch.score for epoch in last], workload.text),
            **self.to_target(),
        }

    def to_target(self) -> dict[str, Fact]:
        """Return the epochs and seconds until the score reached the target; nothing without a target."""
        if (target := self.training.target) is None:
            return {}
        sign, reached = (1 if self.training.workload.is_accuracy else -1), []
        for curve in self.curves:
            found = [number for number, epoch in enumerate(curve, 1) if sign * epoch.score >= sign * target]
            reached += [(number, sum(epoch.seconds for epoch in curve[:number])) for number in found[:1]]
        failed = len(self.curves) - len(reached)
        text = f"not reached by {failed} of {len(self.curves)}" if len(self.curves) > 1 else "not reached"
        texts = [text] * 2 if failed else [over_seeds(each, "{:.4g}".format) for each in zip(*reached, strict=True)]
        return {"epochs to target": texts[0], "seconds to target": texts[1]}

    def details(self) -> dict[str, Any]:
        """Return the scores and seconds of every seed's epochs, and the updates and the staleness of each op."""
        ops = {}
        for name, staleness in self.staleness().items():
            updates = fmean(epoch.run.updates[self.training.op_names.index(name)] for epoch in self.epochs)
            ops[name] = {"updates per epoch": updates, **summary(staleness)}
        scores = [[epoch.score for epoch in curve] for curve in self.curves]
        return {"scores": scores, "seconds": [[epoch.seconds for epoch in curve] for curve in self.curves], "ops": ops}


def summary(staleness: Counter[int]) -> dict[str, Fact]:
    """Return the mean, rounded to two digits after the point, and the maximum of the staleness."""
    mean = sum(updates * number for updates, number in staleness.items()) / staleness.total()
    return {"mean staleness": round(mean, 2), "greatest staleness": max(staleness)}


def over_seeds(values: Sequence[float], text: Callable[[float], str]) -> str:
    """Return the mean of one value for each seed, and their range if there are several."""
    extent = f" ({text(min(values))}..{text(max(values))})" if len(values) > 1 else ""
    return text(fmean(values)) + extent


def op_names(model: nn.Module) -> list[str]:
    """Return a name for each op: that which the network gives it, or the type of its module, numbered if not unique."""
    types = [type(module).__name__ for module in model.ops]
    numbered = [name if types.count(name) == 1 else f"{name} {op}" for op, name in enumerate(types)]
    return getattr(model, "op_names", numbered)


def replicas_of(texts: Sequence[str], names: Sequence[str]) -> dict[int, int]:
    """Return the number of replicas of each op, given as `NAME=N`.

    Raises:
        InputError: a name is unknown, or a number is not an integer from 2 on.
    """
    found = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        if name not in names:
            known = ", ".join(filter(None, names))
            raise InputError(f"replicas: {text!r} names no op, expected NAME=N with one of {known}")
        if not number.isdecimal() or int(number) < 2:
            raise InputError(f"replicas: {text!r}, expected {name}=N with N of 2 or more")
        found[names.index(name)] = int(number)
    return found


def draw_staleness(learners: Mapping[str, Learner]) -> Figure:
    """Draw how many backward passes of each op had how much staleness, for each of several rows."""
    found = {title: learner.staleness() for title, learner in learners.items()}
    names = list(dict.fromkeys(name for staleness in found.values() for name in staleness))
    size = 3 + 3 * len(found), 1.5 + 0.2 * len(names)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axis, (title, staleness) in zip(axes, found.items(), strict=True):
        shares = np.zeros((len(names), 1 + max(map(max, staleness.values()))))
        for name, counts in staleness.items():
            shares[names.index(name), [*counts]] = [100 * n / counts.total() for n in counts.values()]
        image = axis.imshow(shares, cmap="Blues", vmin=0, vmax=100, aspect="auto")
        axis.set(title=title, xlabel="staleness, updates", yticks=range(len(names)), yticklabels=names)
        axis.xaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes, label="% of backward passes")
    return figure


def draw_timeline(
    training: Training, instances: Sequence[Instance], ways: Sequence[Way], driver_of: DriverOf
) -> Figure:
    """Draw which worker runs a task of which instance in each way to train (AMPNet, figure 1).

    The window has the length of `SHOWN` instances of synchronous training. It lies around the first task of an instance
    that follows a flush.
    """
    workers, seed, keys = instances[0].plan.num_devices, training.seeds[0], min(ways[-1].max_active_keys, CALIBRATION)
    order = np.resize(np.random.default_rng(seed).permutation(len(instances)), 3 * keys + SHOWN)
    figure = Figure(figsize=(12, len(ways) * (0.8 + 0.35 * workers)), layout="constrained")
    length = 0.0
    for axis, way in zip(figure.subplots(len(ways), 1, squeeze=False)[:, 0], ways, strict=True):
        trainer = training.trainer(training.model(seed), instances, way)
        records: list[Record] = []
        trainer.run([instances[each] for each in order], driver_of(trainer), records.append)
        length = length or SHOWN * max(record.end for record in records) / len(order)  # the first way is synchronous
        start = min(record.start for record in records if record.task.instance == 2 * keys) - length / 2
        for record in (each for each in records if start < each.end and each.start < start + length):
            left, width = 1000 * (record.start - start), 1000 * (record.end - record.start)
            colour = [*COLOURS.values()][record.task.is_backward]
            axis.barh(record.worker, width, 0.9, left, color=colour, edgecolor="white", linewidth=0.3)
            if width > 1000 * length / 80:
                number = str(record.task.instance)
                axis.text(left + width / 2, record.worker, number, ha="center", va="center", size=7, clip_on=True)
        axis.set(title=way.name, ylabel="worker", yticks=range(workers))
        axis.set(xlim=(0, 1000 * length), ylim=(workers - 0.5, -0.5))
    axis.set_xlabel("simulated milliseconds (an update belongs to a backward pass, or to the first task after a flush)")
    patches = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=patches, loc="outside right upper", fontsize="small")
    return figure


def async_benchmark(
    workload: str,
    workers: int,
    simulate: Sequence[int],
    max_active_keys: Sequence[int],
    min_update_frequency: Sequence[int],
    backward_weights: str,
    replicas: Sequence[str] | None,
    instance_size: int,
    samples: int,
    val_samples: int,
    learning_rate: float,
    latency: float,
    bandwidth: float,
    epochs: int,
    seeds: Sequence[int],
    target: float | None,
    data: Path | None = None,
    config: Config | None = None,
    **network: int,
) -> Benchmark:
    """Return the comparison on threads, and that of every simulated number of workers.

    Args:
        workload: one of `WORKLOADS`, or `engine`.
        max_active_keys: the numbers K of instances in flight.
        min_update_frequency: 0 among them for the number of calls that the op has in an instance on average.
        replicas: the ops that several workers hold, as `NAME=N`.
        latency: microseconds that a message between simulated workers takes, besides the time for its bytes.
        bandwidth: gigabytes per second of each link.
        seeds: seeds of the initial weights and of the order of the instances; the first one makes the samples.
        target: the score up to which epochs and seconds are reported.
        data: the data of an engine.
        config: the settings of an engine.
        network: the settings of another network.

    Raises:
        InputError: the data are missing or damaged, or `replicas` is invalid.
    """
    kind, rng = workload_of(workload, data, config), np.random.default_rng(seeds[0])
    known, unseen = kind.samples(samples, rng), (kind.unseen or kind.samples)(val_samples, rng)
    minibatches = [known[first : first + instance_size] for first in range(0, len(known), instance_size)]
    names = op_names(kind.network(**network))
    held = replicas_of(replicas or (), names)
    training = Training(
        kind, network, minibatches, unseen, backward_weights, learning_rate, epochs, seeds, target, held, names
    )
    ways = ways_to_train(max_active_keys, min_update_frequency)
    largest = max(max_active_keys)
    # The pictures show the largest number of keys with the first frequency.
    drawn = [way for way in ways if way.flush_every in (1, largest)]
    drawn.append(next(way for way in ways if way.flush_every is None and way.max_active_keys == largest))
    pictures: dict[str, Callable[[], Figure]] = {}
    shown: dict[str, Learner] = {}

    def cases() -> Iterator[Case]:
        for clock, count in [("threads", workers), *(("simulated", each) for each in sorted(simulate))]:
            instances = training.instances(count)
            driver_of: DriverOf = lambda _: run_threads  # noqa: E731
            if clock == "simulated":
                driver_of = partial(simulated, measured_costs(training, instances), latency, bandwidth)
            learners = {way: Learner(training, way, instances, driver_of) for way in ways}
            facts = {"instances": len(instances), "steps": fmean(len(instance.steps) for instance in instances)}
            rows = [
                Competitor(way.name, partial(next, each.rounds()), None, each.facts, details=each.details)
                for way, each in learners.items()
            ]
            yield Case({"clock": clock, "workers": count}, 1, rows, SYNCHRONOUS, facts, warm_up=False)
            shown[f"{count} {clock if clock == 'threads' else 'simulated workers'}"] = learners[drawn[-1]]
            pictures["staleness"] = partial(draw_staleness, shown)
            if clock == "simulated":
                pictures.setdefault("timeline", partial(draw_timeline, training, instances, drawn, driver_of))

    frequencies = ", ".join(str(each or "calls in an instance") for each in min_update_frequency)
    settings = [f"{name} {value}" for name, value in network.items()] + [f"replicas {each}" for each in replicas or ()]
    description = (
        f"{workload}: {', '.join(settings) or data}; {len(known)} samples in "
        f"instances of {instance_size}; up to {', '.join(map(str, max_active_keys))} instances in flight, update "
        f"frequency: {frequencies}; {backward_weights} weights in backward passes, Adam {learning_rate:g}, "
        f"seeds {', '.join(map(str, seeds))}" + (f", target {kind.text(target)}" if target is not None else "")
    )
    return Benchmark(description, cases(), "workers", "instance", pictures=pictures)
