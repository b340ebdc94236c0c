"""Measure asynchronous training on threads and under a virtual clock: `iep-bench async list-reduction`.

The same network, placed on the same workers, is trained in three ways: synchronously (one instance in flight, and an
update of every op when it is done), with a flush after every K instances (K in flight, and an update when all are
done), and asynchronously (K in flight, and each op updates itself). A round is an epoch. Simulated workers have the
costs of tasks that were measured in one thread before, and compute real gradients.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from iep.asynchronous.conductor import PlanStep, WorkerTask
from iep.asynchronous.drivers import Record, run_threads, run_virtual
from iep.asynchronous.trainer import AsynchronousTrainer, Driver, Instance, Run
from iep.bench.compare import Case, Competitor, Fact
from iep.bench.tables import Benchmark
from iep.workloads.list_reduction import ListReducer, Reduction, list_reductions

SYNCHRONOUS, FLUSHED, ASYNCHRONOUS = "synchronous", "flush every {} instances", "asynchronous"
CALIBRATION = 100
"""The number of instances whose tasks give the costs of simulated workers."""
Costs = dict[tuple[int, bool], float]
"""The median seconds of a task by op and direction."""


@dataclass(frozen=True)
class Setting:
    """The settings, data and network that all strategies share."""

    max_active_keys: int
    min_update_frequency: int | None
    backward_weights: str
    width: int
    layers: int
    learning_rate: float
    seed: int

    def model(self) -> ListReducer:
        """Return a new network, which is always the same."""
        torch.manual_seed(self.seed)
        return ListReducer(self.width, self.layers)

    def trainer(
        self, model: ListReducer, instances: Sequence[Instance], flush_every: int | None
    ) -> AsynchronousTrainer:
        """Return a trainer of a network; `flush_every` is None for asynchronous training."""
        calls: dict[int, int] = defaultdict(int)
        for step in (step for instance in instances for step in instance.steps):
            calls[step.op] += 1
        # By default, each op has as many updates as in synchronous training.
        frequency = {op: self.min_update_frequency or max(1, round(n / len(instances))) for op, n in calls.items()}
        return AsynchronousTrainer(
            dict(enumerate(model.ops)),
            partial(torch.optim.Adam, lr=self.learning_rate),
            instances[0].plan.num_devices,
            flush_every or self.max_active_keys,
            None if flush_every else frequency,
            flush_every,
            self.backward_weights,
        )


def instances_of(model: ListReducer, minibatches: Sequence[Sequence[Reduction]], workers: int) -> list[Instance]:
    """Return an instance for each minibatch, with its plan for the workers."""
    placement = model.placement(workers)

    def loss(answers_B: Tensor, scores_BA: Tensor) -> Tensor:
        return cross_entropy(scores_BA, answers_B)

    return [
        Instance(model.plan(each, placement), model.inputs(each), partial(loss, torch.tensor([x.answer for x in each])))
        for each in minibatches
    ]


def measured_costs(setting: Setting, instances: Sequence[Instance]) -> Costs:
    """Train a new network in one thread, and return the costs of its tasks; those of an update are included."""
    found = instances[:: max(1, len(instances) // CALIBRATION)]
    records: list[Record] = []
    setting.trainer(setting.model(), instances, None).run(found, run_virtual, records.append)
    taken = defaultdict(list)
    for record in records:
        taken[record.op, record.task.is_backward].append(record.end - record.start)
    return {kind: median(seconds) for kind, seconds in taken.items()}


def competitor(
    name: str,
    setting: Setting,
    instances: Sequence[Instance],
    flush_every: int | None,
    driver_of: Callable[[AsynchronousTrainer], Driver],
    accuracy: Callable[[ListReducer], float],
) -> Competitor:
    """Return one way to train; a round is an epoch of a network that it trains from the first round on."""
    model = setting.model()
    trainer = setting.trainer(model, instances, flush_every)
    driver, rng, runs = driver_of(trainer), np.random.default_rng(setting.seed), list[Run]()

    def measure() -> dict[str, float]:
        start = time.perf_counter()
        runs.append(trainer.run([instances[each] for each in rng.permutation(len(instances))], driver))
        seconds = time.perf_counter() - start
        if driver is not run_threads:
            seconds = runs[-1].seconds
        return {"computation": seconds / len(instances)}

    def facts() -> dict[str, Fact]:
        staleness = sum((run.staleness for run in runs), Counter())
        used = fmean(share for run in runs for share in run.utilisation)
        return {
            "utilisation": f"{100 * used:.0f}%",
            "mean staleness": f"{fmean([each.updates for each in staleness.elements()]):.2f}",
            "greatest staleness": max(each.updates for each in staleness),
            "updates": sum(sum(run.updates.values()) for run in runs),
            "loss": f"{fmean(runs[-1].losses):.3f}",
            "accuracy": f"{100 * accuracy(model):.1f}%",
        }

    return Competitor(name, measure, facts=facts)


def list_reduction_benchmark(
    workers: int,
    simulate: Sequence[int],
    max_active_keys: int,
    min_update_frequency: int | None,
    backward_weights: str,
    instance_size: int,
    samples: int,
    val_samples: int,
    width: int,
    layers: int,
    learning_rate: float,
    latency: float,
    bandwidth: float,
    seed: int,
) -> Benchmark:
    """Return the comparison on threads, and that of every simulated number of workers.

    Args:
        min_update_frequency: None for the number of calls that the op has in an instance on average.
        latency: microseconds that a message between simulated workers takes, besides the time for its bytes.
        bandwidth: gigabytes per second of each link.
    """
    setting = Setting(max_active_keys, min_update_frequency, backward_weights, width, layers, learning_rate, seed)
    rng = np.random.default_rng(seed)
    sequences, unseen = list_reductions(samples, rng), list_reductions(val_samples, rng)
    minibatches = [sequences[first : first + instance_size] for first in range(0, samples, instance_size)]
    answers = torch.tensor([each.answer for each in unseen])

    @torch.no_grad()
    def accuracy(model: ListReducer) -> float:
        return (model(unseen).argmax(dim=1) == answers).double().mean().item()

    def simulated(costs: Costs, trainer: AsynchronousTrainer) -> Driver:
        def cost(step: PlanStep, task: WorkerTask) -> float:
            return costs[step.op, task.is_backward]

        def delay(task: WorkerTask) -> float:
            return 1e-6 * latency + 1e-9 / bandwidth * trainer.message_bytes(task)

        return partial(run_virtual, cost=cost, delay=delay)

    def cases() -> Iterator[Case]:
        for clock, count in [("threads", workers), *(("simulated", each) for each in sorted(simulate))]:
            instances = instances_of(setting.model(), minibatches, count)
            driver_of: Callable[[AsynchronousTrainer], Driver] = lambda _: run_threads  # noqa: E731
            if clock == "simulated":
                driver_of = partial(simulated, measured_costs(setting, instances))
            flushes = {SYNCHRONOUS: 1, FLUSHED.format(max_active_keys): max_active_keys, ASYNCHRONOUS: None}
            if max_active_keys == 1:
                del flushes[FLUSHED.format(1)]
            ways = [competitor(name, setting, instances, n, driver_of, accuracy) for name, n in flushes.items()]
            steps = fmean(len(instance.steps) for instance in instances)
            facts = {"instances": len(instances), "steps": steps}
            yield Case({"clock": clock, "workers": count}, 1, ways, SYNCHRONOUS, facts, warm_up=False)

    network = f"{layers} layer{'s' * (layers > 1)} of width {width}"
    updates = min_update_frequency or "as many calls as an instance has"
    description = (
        f"list reduction: {network}; {samples} sequences in instances of {instance_size}; "
        f"up to {max_active_keys} instances in flight, update frequency: {updates}, "
        f"{backward_weights} weights in backward passes, Adam {learning_rate:g}, seed {seed}"
    )
    return Benchmark(description, cases(), "workers", "instance")
