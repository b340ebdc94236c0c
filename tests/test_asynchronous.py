"""Asynchronous training: tasks in any possible order, gradients and weights of every op, bounds, and failures."""

import itertools
import os
import signal
import threading
from collections import Counter
from functools import partial
from random import Random

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from batching_cases import assert_same, quick
from columns_cases import COUNT, JOIN, LIFT, SPLIT, inputs_of, typed_graphs
from hypothesis import given, settings
from torch import nn

from benchmarks.virtual_clock import run_virtual
from iep.asynchronous.conductor import COPY, LOSS, Conductor, PlanStep, Record, WorkerTask, run_threads
from iep.asynchronous.trainer import AsynchronousTrainer, Instance
from iep.batching.execute import execute
from iep.batching.graph import Graph
from iep.batching.placement import OpPlacement, make_placed_plan
from iep.batching.plan import make_plan
from iep.batching.schedulers import SCHEDULERS, make_schedule

CPU = torch.device("cpu")


def staleness_bound(keys: int, calls: int, frequency: int) -> int:
    """Return the bound of docs/asynchronous.md for an op with at most `calls` calls in an instance."""
    return -(-((2 * keys - 1) * calls - 1) // frequency)


def random_steps(random: Random, workers: int, ops: int = 4) -> list[PlanStep]:
    """Return the steps of an instance that reads at random; an op is always on the same worker."""
    steps = []
    for call in range(random.randint(0, 12)):
        op = random.randrange(ops)
        reads = sorted(random.sample(range(call), min(call, random.randrange(3))))
        steps.append(PlanStep(op, op % workers, tuple(reads)))
    unread = set(range(len(steps))).difference(*(step.reads for step in steps))
    return [*steps, PlanStep(LOSS, random.randrange(workers), tuple(sorted(unread)))]


def recorded(driver, conductor: Conductor, workers: int, instances: list, run=None, **clock) -> list[Record]:
    """Run instances that are given as their steps, and return the records of their tasks."""
    records = []
    driver(conductor, workers, instances, lambda _, steps: steps, run, records.append, **clock)
    return records


def adversary(seed: int):
    """Return a cost of tasks and a delay of messages, which are often equal, zero, or very long."""
    random = Random(seed)
    return (lambda *_: random.choice([0, 1, 1, 7, 1000])), (lambda _: random.choice([0, 0, 1, 50]))


def test_any_clock_runs_every_task_once_within_the_bounds_and_without_a_deadlock():
    for seed in range(200):
        check_random_clock(seed)


def check_random_clock(seed: int) -> None:
    """Run random instances on random workers under a clock of random costs, and on threads."""
    random = Random(seed)
    workers, keys, frequency = random.randint(1, 4), random.randint(1, 5), random.randint(1, 6)
    instances = [random_steps(random, workers) for _ in range(random.randint(1, 12))]
    flush = random.choice([None, None, 1, 2, 3])
    conductor = Conductor(keys, flush)
    versions, pending, before, active = Counter(), Counter(), {}, []

    def run(task: WorkerTask) -> None:
        """Count updates as a trainer would, and check the staleness of every call."""
        op = conductor.step(task).op
        active.append(len(conductor.in_flight))
        assert max(conductor.in_flight) - min(conductor.in_flight) < keys
        assert not flush or max(conductor.in_flight) // flush == min(conductor.in_flight) // flush
        if op != LOSS and not task.is_backward:
            before[task] = versions[op]
        elif op != LOSS:
            calls = max(sum(step.op == op for step in steps) for steps in instances)
            staleness = versions[op] - before[task._replace(is_backward=False)]
            assert staleness <= staleness_bound(keys, calls, frequency)
            pending[op] += 1
            if pending[op] == frequency:
                pending[op], versions[op] = 0, versions[op] + 1

    cost, delay = adversary(seed)
    records = recorded(run_virtual, conductor, workers, instances, run, cost=cost, delay=delay)
    expected = [(n, call, way) for n, steps in enumerate(instances) for call in range(len(steps)) for way in (0, 1)]
    loss_has_one = [task for task in expected if task[2] or task[1] < len(instances[task[0]]) - 1]
    assert sorted(tuple(record.task) for record in records) == loss_has_one
    assert max(active) <= keys
    assert not conductor.in_flight
    ends, clock = {record.task: record.end for record in records}, [0.0] * workers
    for record in records:  # a worker runs one task at a time, after those whose results it reads
        steps, (n, call, backward) = instances[record.task.instance], record.task
        readers = [WorkerTask(n, other, True) for other, step in enumerate(steps) if call in step.reads]
        reads = [WorkerTask(n, other, False) for other in steps[call].reads]
        needed = readers if backward and call < len(steps) - 1 else reads
        assert record.start >= max([clock[record.worker], *(ends[task] for task in needed)])
        assert record.worker == steps[call].worker
        clock[record.worker] = record.end
        if flush:
            earlier = (each.end for each in records if each.task.instance < record.task.instance // flush * flush)
            assert record.start >= max(earlier, default=0)
    cost, delay = adversary(seed)
    assert recorded(run_virtual, Conductor(keys, flush), workers, instances, cost=cost, delay=delay) == records
    on_threads = recorded(run_threads, Conductor(keys, flush), workers, instances, lambda _: None)
    assert sorted(record.task for record in on_threads) == sorted(record.task for record in records)


def test_a_worker_prefers_backward_passes_then_the_oldest_instance_then_the_order_of_the_plan():
    chain = [PlanStep(0, 0, ()), PlanStep(0, 0, (0,)), PlanStep(LOSS, 0, (1,))]
    records = recorded(run_virtual, Conductor(2), 1, [chain] * 3, cost=lambda *_: 1.0)
    of_one = [(0, False), (1, False), (2, True), (1, True), (0, True)]
    assert [record.task for record in records] == [WorkerTask(n, *each) for n in range(3) for each in of_one]
    two = [PlanStep(0, 0, ()), PlanStep(0, 0, ()), PlanStep(LOSS, 1, (0, 1))]
    records = recorded(run_virtual, Conductor(2), 2, [two] * 2, cost=lambda *_: 1.0)
    order = [record.task for record in records if not record.worker]
    tasks = [(0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 1, 1), (0, 0, 1), (1, 1, 0), (1, 1, 1), (1, 0, 1)]
    assert order == [WorkerTask(*each) for each in tasks]


def test_messages_delay_forward_and_backward_passes():
    steps = [PlanStep(0, 0, ()), PlanStep(COPY, 1, (0,)), PlanStep(1, 1, (1,)), PlanStep(LOSS, 1, (2,))]
    clock = {"cost": lambda *_: 1.0, "delay": lambda task: 10.0 * (task.call == 1)}
    records = recorded(run_virtual, Conductor(1), 2, [steps] * 2, **clock)
    # calls 0, 1 and 2 forward with 10 before 1, the loss, calls 2, 1 and 0 backward with 10 before 0
    assert [record.start for record in records] == [0, 11, 12, 13, 14, 15, 26, 27, 38, 39, 40, 41, 42, 53]


class Lift(nn.Module):
    """Two results of different shapes."""

    def __init__(self, inputs: int, parts: int):
        super().__init__()
        self.map, self.parts = nn.Linear(inputs, 7, dtype=torch.float64), parts

    def forward(self, x):
        wide = torch.tanh(self.map(x.flatten(1)))
        return (wide[:, :5], wide[:, 5:].unsqueeze(2)) if self.parts else (wide[:, :2].unsqueeze(2), wide[:, 2:])


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(12, 5, dtype=torch.float64)

    def forward(self, wide_G25, pair_G21):
        return torch.tanh(self.map(torch.cat([wide_G25.flatten(1), pair_G21.flatten(1)], dim=1)))


class Count(nn.Module):
    def forward(self, whole_G, pair_G21):
        return whole_G + 1, pair_G21 * whole_G.view(-1, 1, 1)


def typed_modules() -> nn.ModuleList:
    torch.manual_seed(0)
    modules = {LIFT: Lift(2, 1), SPLIT: Lift(5, 0), JOIN: Join(), COUNT: Count()}
    return nn.ModuleList(modules[op] for op in range(4))


def by_op(modules: nn.ModuleList) -> dict[int, nn.Module]:
    return dict(enumerate(modules))


def uneven_sum(*roots: torch.Tensor) -> torch.Tensor:
    roots = [each.flatten() for each in roots if each.is_floating_point()]
    return sum((each * torch.linspace(0.5, 1.5, len(each), dtype=each.dtype)).sum() for each in roots)


def weights_of(modules: nn.Module, which: str = "data") -> dict:
    return {name: getattr(each, which) for name, each in modules.named_parameters()}


@st.composite
def minibatches(draw, max_size: int = 4):
    """Draw instances on up to three workers, and what `execute` needs."""
    workers = draw(st.integers(1, 3))
    at = st.integers(0, workers - 1)
    instances, plain = [], []
    places = OpPlacement((CPU,) * workers, {op: draw(at) for op in range(4)}, draw(at), draw(at))
    for graph, types in draw(st.lists(typed_graphs(), min_size=1, max_size=max_size)):
        schedule = make_schedule(graph, draw(st.sampled_from(sorted(SCHEDULERS))))
        inputs = inputs_of(types, torch.float64)
        instances.append(Instance(make_placed_plan(graph, schedule, places, types), inputs, uneven_sum))
        plain.append((make_plan(graph, schedule, types), inputs))
    return workers, instances, plain


def a_driver(draw_threads: bool, seed: int):
    cost, delay = adversary(seed)
    return run_threads if draw_threads else partial(run_virtual, cost=cost, delay=delay)


@given(drawn=minibatches(), threads=st.booleans(), seed=st.integers(0, 99))
@settings(quick, max_examples=30)
def test_one_instance_at_a_time_with_updates_when_drained_equals_execute_with_one_optimiser(drawn, threads, seed):
    workers, instances, plain = drawn
    actual, expected = typed_modules(), typed_modules()
    make = partial(torch.optim.AdamW, lr=0.1)
    trainer = AsynchronousTrainer(by_op(actual), make, workers)
    optimizer = make(expected.parameters())
    for instance, (plan, inputs) in zip(instances, plain, strict=True):
        run = trainer.run([instance], a_driver(threads, seed))
        loss = uneven_sum(*execute(plan, by_op(expected), inputs))
        if loss.requires_grad:
            loss.backward()
        assert run.losses == pytest.approx([loss.item()], rel=1e-9)
        assert_same(weights_of(actual, "grad"), weights_of(expected, "grad"), 1e-9, none_is_zero=True)
        ran = [op for op, state in trainer.ops.items() if state.pending]
        for module in (networks[op] for networks in (actual, expected) for op in ran):
            for weight in module.parameters():  # a call without a reader has no gradient, or one of zeros
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        trainer.update()
        optimizer.step()
        optimizer.zero_grad()
        assert_same(weights_of(actual), weights_of(expected), 1e-9)


class Collect(torch.optim.Optimizer):
    """Adds up gradients, as training with a learning rate of zero would show them, and changes no weight."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.sums = {parameter: torch.zeros_like(parameter) for parameter in self.param_groups[0]["params"]}

    @torch.no_grad()
    def step(self):
        for parameter, total in self.sums.items():
            if parameter.grad is not None:
                total += parameter.grad


@given(
    drawn=minibatches(max_size=6),
    keys=st.integers(1, 5),
    frequency=st.integers(1, 4),
    threads=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(quick, max_examples=30)
def test_with_any_instances_in_flight_summed_gradients_equal_those_of_the_minibatch(
    drawn, keys, frequency, threads, seed
):
    (workers, instances, plain), modules = drawn, typed_modules()
    trainer = AsynchronousTrainer(by_op(typed_modules()), Collect, workers, keys, frequency)
    run = trainer.run(instances, a_driver(threads, seed))
    trainer.update()
    assert not trainer.in_flight
    loss = sum(uneven_sum(*execute(plan, by_op(modules), inputs)) for plan, inputs in plain)
    if loss.requires_grad:
        loss.backward()
    sums = {
        f"{op}.{name}": state.optimizer.sums[weight]
        for op, state in trainer.ops.items()
        for name, weight in state.module.named_parameters()
    }
    assert_same(sums, weights_of(modules, "grad"), 1e-9, none_is_zero=True)
    assert sum(run.losses) == pytest.approx(loss.item(), rel=1e-9)
    calls, passes = [Counter(step.op for step in instance.steps) for instance in instances], Counter()
    for (op, staleness), count in run.staleness.items():
        passes[op] += count
        assert staleness <= staleness_bound(keys, max(each[op] for each in calls), frequency)
    assert passes == {op: count for op, count in sum(calls, Counter()).items() if op in (LIFT, SPLIT, JOIN)}
    for op, updates in run.updates.items():
        assert updates == sum(each[op] for each in calls) // frequency


class Square(nn.Module):
    """(w x) ** 2, whose gradient 2 w x ** 2 depends on the weight, so that a wrong version shows."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x_G):
        return (self.w * x_G) ** 2


def square_instance(x: float, workers: int = 2, op: int = 0, at: int = 0) -> Instance:
    """Return x -> Square on worker `at` -> a loss on the last worker, that is the root."""
    graph = Graph(1, np.array([op]), np.array([[0]]), np.array([0]), np.array([1]))
    places = OpPlacement((CPU,) * workers, {op: at}, 0, workers - 1)
    plan = make_placed_plan(graph, make_schedule(graph, "vanilla"), places)
    return Instance(plan, torch.tensor([x], dtype=torch.float64), torch.sum)


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.AdamW, lr=0.1),
        partial(torch.optim.AdamW, lr=0.1, fused=True),
    ],
    ids=["sgd", "adamw", "fused"],
)
def test_a_stale_backward_pass_uses_the_current_weights(make):
    """The loss takes long, so that the three forward passes of a run precede its first update."""
    module, xs = Square(), [1.0, 2.0, 3.0]
    trainer = AsynchronousTrainer({0: module}, make, 2, 3, 1)
    driver = partial(run_virtual, cost=lambda step, _: 10.0 if step.op == LOSS else 1.0)
    by_hand = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    optimizer = make([by_hand])
    for _ in range(2):
        run, start = trainer.run(map(square_instance, xs), driver), by_hand.detach().clone()
        assert run.staleness == {(0, 0): 1, (0, 1): 1, (0, 2): 1}
        assert (run.seconds, run.utilisation) == (38, [6 / 38, 36 / 38])
        assert run.losses == pytest.approx([(start.item() * x) ** 2 for x in xs], rel=1e-12)
        assert run.updates == {0: 3}
        for x in xs:
            by_hand.grad = 2 * by_hand.detach() * x**2
            optimizer.step()
        torch.testing.assert_close(module.w, by_hand, rtol=1e-12, atol=0)


@pytest.mark.parametrize("threads", [False, True])
def test_a_flush_updates_with_the_gradients_of_its_minibatch_and_nothing_is_stale(threads):
    module, xs = Square(), [1.0, 2.0, 3.0]
    trainer = AsynchronousTrainer({0: module}, partial(torch.optim.SGD, lr=0.01), 2, max_active_keys=3, flush_every=2)
    run = trainer.run(map(square_instance, xs), a_driver(threads, 0))
    w = 1.5 - 0.01 * 2 * 1.5 * (1 + 4)
    assert module.w.item() == pytest.approx(w - 0.01 * 2 * w * 9, rel=1e-12)
    assert run.updates == {0: 2}
    assert run.staleness == {(0, 0): 3}


class Fails(Square):
    """Acts in its third call, before it computes."""

    def __init__(self, action):
        super().__init__()
        self.action, self.count = action, 0

    def forward(self, x_G):
        self.count += 1
        if self.count == 3:
            self.action()
        return super().forward(x_G)


def fail() -> None:
    raise ArithmeticError


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("action", "error"), [(fail, ArithmeticError), (interrupt, KeyboardInterrupt)])
def test_a_worker_that_raises_and_ctrl_c_end_the_run_with_one_error(action, error):
    trainer = AsynchronousTrainer({0: Fails(action)}, partial(torch.optim.SGD, lr=0.1), 2, 2, 1)
    forever = itertools.repeat(square_instance(1.0))
    with pytest.raises(error):
        trainer.run(forever)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("worker ")]
    assert not trainer.in_flight


def test_an_instance_that_cannot_be_prepared_ends_the_run():
    def instances():
        yield square_instance(1.0)
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        AsynchronousTrainer({0: Square()}, partial(torch.optim.SGD, lr=0.1), 2, 2, 1).run(instances())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("worker ")]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_active_keys": 0}, "max_active_keys is 0, expected 1 or greater"),
        ({"num_workers": 3}, "a plan for 2 devices, expected one for 3 workers"),
    ],
)
def test_invalid_settings_are_errors(change: dict, words: str):
    given = {"modules": {0: Square()}, "num_workers": 2, "min_update_frequency": 1} | change
    with pytest.raises(ValueError, match=words):
        AsynchronousTrainer(make_optimizer=partial(torch.optim.SGD, lr=0.1), **given).run([square_instance(1.0)])


def test_moved_ops_and_shared_weights_are_errors():
    module, make = Square(), partial(torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="op 0 is on worker 1, but was on 0 before"):
        AsynchronousTrainer({0: module}, make, 2, 1, 1).run([square_instance(1.0, at=at) for at in range(2)])
    with pytest.raises(ValueError, match="ops 0 and 1 share a parameter"):
        AsynchronousTrainer({0: module, 1: module}, make, 1)
