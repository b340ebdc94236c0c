"""Compare synchronous training, training with flushes, and asynchronous training of one network (AMPNet).

The network, placed on the same workers, is trained synchronously (one instance in flight, and an update of every op
when it is done), with a flush after every K instances (K in flight, and an update when all are done), and
asynchronously (K in flight, and each op updates itself). A round is an epoch, and every seed trains a new network.
Simulated workers have the costs that were measured in one thread, and compute real gradients.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from benchmarks.graphs import Deducer, PolarityRegressor, deductions, molecules
from benchmarks.message_networks import Experiment, ListReducer, SentimentTreeLSTM, list_reductions, sentiment_trees
from benchmarks.virtual_clock import message_bytes, run_virtual
from iep.asynchronous.conductor import PlanStep, Record, WorkerTask, run_threads
from iep.asynchronous.trainer import AsynchronousTrainer, Driver, Instance, Run
from iep.bench.compare import Benchmark, Case, Competitor, Fact

CALIBRATION = 100
"""The number of instances whose tasks give the costs of simulated workers."""
LATENCY, BANDWIDTH = 1e-5, 1e10
"""The seconds of a simulated message, and the bytes per second of a simulated link."""
DriverOf = Callable[[AsynchronousTrainer], Driver]


EXPERIMENTS = {
    "list-reduction": Experiment(list_reductions, ListReducer),
    "tree-lstm": Experiment(sentiment_trees, SentimentTreeLSTM),
    "deduction": Experiment(deductions, Deducer),
    "molecules": Experiment(molecules, PolarityRegressor, score="error"),
}


class Way(NamedTuple):
    """One way to train, which has a row in each table."""

    name: str
    keys: int
    frequency: int = 0
    """0 for the number of calls that the op has in an instance on average."""
    flush_every: int | None = None
    """None for asynchronous training."""


class Epoch(NamedTuple):
    """The results of one epoch: its real or simulated seconds, and the score of unseen samples at its end."""

    seconds: float
    score: float
    run: Run


NETWORK = ("layers", "width", "steps", "data", "config", "settings")
"""The options that determine the network, or are the arguments of `engine_experiment`."""


class Training:
    """The parts that all ways to train share: the network, its instances, and the rule of its updates."""

    def __init__(self, experiment: Experiment, given: SimpleNamespace, network: dict[str, int]):
        self.experiment, self.given, self.network = experiment, given, network
        rng = np.random.default_rng(given.seeds[0])
        known = experiment.samples(given.samples, rng)
        unseen = (experiment.unseen or experiment.samples)(given.val_samples, rng)
        self.minibatches = [known[n : n + given.instance_size] for n in range(0, len(known), given.instance_size)]
        self.unseen = self.model(given.seeds[0]).planned(unseen)

    def model(self, seed: int) -> nn.Module:
        """Return a new network, which is always the same for a seed."""
        torch.manual_seed(seed)
        return self.experiment.network(**self.network)

    def ways(self) -> list[Way]:
        """Return synchronous training, a flush for each number of keys, and each asynchronous combination."""
        keys, frequencies = self.given.max_active_keys, self.given.min_update_frequency
        ways = [Way("synchronous", 1, flush_every=1)]
        ways += [Way(f"flush every {each} instances", each, flush_every=each) for each in keys if each > 1]
        found = [*product(keys, frequencies)]
        name = "asynchronous, {} in flight, frequency {}" if len(found) > 1 else "asynchronous"
        return ways + [Way(name.format(number, each or "auto"), number, each) for number, each in found]

    def instances(self, workers: int) -> list[Instance]:
        """Return an instance for each minibatch, with its plan for the workers."""
        model = self.model(self.given.seeds[0])
        placement = model.placement(workers)
        return [
            Instance(model.plan(minibatch, placement), model.inputs(minibatch), model.loss(minibatch))
            for minibatch in self.minibatches
        ]

    def trainer(self, model: nn.Module, instances: Sequence[Instance], way: Way) -> AsynchronousTrainer:
        """Return a trainer of a network."""
        calls = Counter(step.op for instance in instances for step in instance.steps)
        # By default, each op has as many updates as in synchronous training.
        frequency = {op: way.frequency or max(1, round(n / len(instances))) for op, n in calls.items()}
        return AsynchronousTrainer(
            {op: module for op, module in enumerate(model.ops) if op in calls},
            partial(torch.optim.Adam, lr=self.given.learning_rate),
            instances[0].plan.num_devices,
            way.keys,
            None if way.flush_every else frequency,
            way.flush_every,
        )

    def rounds(self, way: Way, instances: Sequence[Instance], driver_of: DriverOf, curves: list) -> Iterator[dict]:
        """Train in one way, and yield the seconds for an instance after every epoch, which `curves` gets by seed."""
        for seed in self.given.seeds:
            model, rng = self.model(seed), np.random.default_rng(seed)
            trainer = self.trainer(model, instances, way)
            driver = driver_of(trainer)
            curves.append([])
            for _ in range(self.given.epochs):
                order = [instances[each] for each in rng.permutation(len(instances))]
                start = time.perf_counter()
                run = trainer.run(order, driver)
                seconds = time.perf_counter() - start if driver is run_threads else run.seconds
                curves[-1].append(Epoch(seconds, model.score(*self.unseen), run))
                yield {"computation": seconds / len(instances)}

    def facts(self, curves: list[list[Epoch]]) -> dict[str, Fact]:
        """Return the columns of a row, which are means over the seeds.

        Loss and score are those of the last epoch. The epochs and seconds until the score reached the target are left
        out if it did not with every seed. The JSON file also has all scores and seconds.
        """
        epochs, last = [epoch for curve in curves for epoch in curve], [curve[-1] for curve in curves]
        staleness = sum((epoch.run.staleness for epoch in epochs), Counter())
        sign = -1 if self.experiment.score == "error" else 1
        target = -np.inf if self.given.target is None else self.given.target * sign
        reached = [
            next((n for n, each in enumerate(curve, 1) if sign * each.score >= target), None) for curve in curves
        ]
        taken = [sum(each.seconds for each in curve[:n]) for curve, n in zip(curves, reached, strict=True)]
        to_target = {"epochs to target": fmean(reached), "seconds to target": fmean(taken)} if all(reached) else {}
        return {
            "utilisation": fmean(share for epoch in epochs for share in epoch.run.utilisation),
            "mean staleness": sum(each.updates * n for each, n in staleness.items()) / staleness.total(),
            "greatest staleness": max(each.updates for each in staleness),
            "updates per epoch": fmean(sum(epoch.run.updates.values()) for epoch in epochs),
            "loss": fmean(loss for epoch in last for loss in epoch.run.losses),
            self.experiment.score: fmean(epoch.score for epoch in last),
            **({} if self.given.target is None else to_target),
            "scores": [[epoch.score for epoch in curve] for curve in curves],
            "seconds": [[epoch.seconds for epoch in curve] for curve in curves],
        }

    def simulated(self, instances: Sequence[Instance]) -> DriverOf:
        """Return what makes drivers with the virtual clock, whose tasks and updates have costs measured here.

        A new network is trained in one thread, one instance after the other. On the virtual clock, second forward
        passes of stale calls take time, and an update between instances delays the next task of its op.
        """
        measuring = self.trainer(self.model(self.given.seeds[0]), instances, Way("", 1, 10**9))  # without updates
        numbers = {step.op: number for number, instance in enumerate(instances) for step in instance.steps}
        tasks, updates = defaultdict(list), defaultdict(list)

        def note(record: Record) -> None:
            tasks[record.op, record.task.is_backward].append(record.end - record.start)

        for number in {*range(0, len(instances), max(1, len(instances) // CALIBRATION)), *numbers.values()}:
            measuring.run([instances[number]], run_virtual, note)
            for op, state in measuring.ops.items():
                if state.pending:
                    start = time.perf_counter()
                    state.update()
                    updates[op].append(time.perf_counter() - start)
        of_tasks = {kind: median(seconds) for kind, seconds in tasks.items()}
        of_updates = {op: median(seconds) for op, seconds in updates.items()}

        def driver_of(trainer: AsynchronousTrainer) -> Driver:
            versions: dict[int, int] = defaultdict(int)  # of each op after its last task
            used: dict[tuple[int, int], int] = {}  # in the forward pass of each call in flight

            def cost(step: PlanStep, task: WorkerTask) -> float:
                seconds, op, call = of_tasks[step.op, task.is_backward], step.op, (task.instance, task.call)
                if op in of_updates:
                    before, versions[op] = versions[op], trainer.ops[op].version
                    if not task.is_backward:
                        used[call] = versions[op]
                    elif used.pop(call) < before:
                        seconds += of_tasks[op, False]
                    seconds += of_updates[op] * (versions[op] - before)
                return seconds

            def delay(task: WorkerTask) -> float:
                return LATENCY + message_bytes(trainer, task) / BANDWIDTH

            return partial(run_virtual, cost=cost, delay=delay)

        return driver_of


def asynchronous(name: str, **options: Any) -> Benchmark:
    """Return the comparison of all ways to train on threads, and on every simulated number of workers.

    Args:
        name: one of `EXPERIMENTS`, or `engine`.
        options: the options of the command, which its --help explains.

    Raises:
        InputError: the data of an engine are missing or damaged.
    """
    shown = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in options.items() if value)
    network = {option: options.pop(option) for option in NETWORK if option in options}
    given = SimpleNamespace(**options)
    if name == "engine":
        from benchmarks.async_engine import engine_experiment

        experiment, network = engine_experiment(**network), {}
    else:
        experiment = EXPERIMENTS[name]
    training = Training(experiment, given, network)
    ways = training.ways()

    def cases() -> Iterator[Case]:
        for clock, count in [("threads", given.workers), *(("simulated", each) for each in sorted(given.simulate))]:
            instances = training.instances(count)
            driver_of: DriverOf = training.simulated(instances) if clock == "simulated" else lambda _: run_threads
            rows = []
            for way in ways:
                curves: list[list[Epoch]] = []
                measure = partial(next, training.rounds(way, instances, driver_of, curves))
                rows.append(Competitor(way.name, measure, facts=partial(training.facts, curves)))
            steps = fmean(len(instance.steps) for instance in instances)
            setting = {"clock": clock, "workers": count, "instances": len(instances), "steps": steps}
            yield Case(setting, 1, rows, ways[0].name, warm_up=False)

    return Benchmark(f"{name}: {shown}", cases(), "instance")
