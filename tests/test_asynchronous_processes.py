"""Asynchronous training with a worker in each process: weights, gradients, results, bounds, and failures."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from batching_cases import quick
from hypothesis import Phase, given, settings
from processes import together
from test_asynchronous import (
    Collect,
    Fails,
    Square,
    by_op,
    check_one_instance_at_a_time,
    check_summed,
    fail,
    gradient_sums,
    interrupt,
    minibatches,
    square_instance,
    typed_modules,
)

from iep.asynchronous.processes import PeerError, Peers
from iep.asynchronous.trainer import AsynchronousTrainer
from iep.runtime.distributed import rank, total, world_size

same_in_all = settings(quick, max_examples=6, derandomize=True, database=None, phases=[Phase.generate])


def one_at_a_time() -> None:
    peers = Peers()

    @given(drawn=minibatches(workers=world_size()))
    @same_in_all
    def check(drawn):
        check_one_instance_at_a_time(drawn, peers=peers)

    check()


@pytest.mark.parametrize("size", [2, 3])
def test_one_instance_at_a_time_with_updates_when_drained_equals_execute_with_one_optimiser(size: int):
    assert together(one_at_a_time, world_size=size) == [None] * size


def several_in_flight() -> list[tuple]:
    peers, size, results = Peers(), world_size(), []

    drawn = minibatches(max_size=6, workers=size)

    @given(drawn=drawn, keys=st.integers(1, 5), frequency=st.integers(1, 4))
    @same_in_all
    def check(drawn, keys, frequency):
        (_, instances, plain), in_flight = drawn, []
        trainer = AsynchronousTrainer(by_op(typed_modules()), Collect, size, keys, frequency, peers=peers)
        run = trainer.run(instances, note=lambda _: in_flight.append([*trainer.in_flight]), update=True)
        assert all(max(numbers) - min(numbers) < keys for numbers in in_flight if numbers)
        sums = {name: total(each) for name, each in gradient_sums(trainer, rank()).items()}
        check_summed(trainer, run, sums, instances, plain)
        results.append((run.losses, run.staleness, run.updates))

    check()
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_with_several_in_flight_summed_gradients_are_those_of_the_minibatch_and_all_have_the_same_results(size: int):
    first, *others = together(several_in_flight, world_size=size)
    assert len(first) >= 6
    assert all(each == first for each in others)


def learn(flush_every: int | None) -> tuple[float, dict, list[float], dict[int, int]]:
    module, xs = Square(), [1.0, 2.0, 3.0, 0.5] * 5
    make = partial(torch.optim.AdamW, lr=0.01)
    trainer = AsynchronousTrainer({0: module}, make, 2, 3, 2, flush_every, peers=Peers())
    for _ in range(2):
        run = trainer.run(map(square_instance, xs))
    state = trainer.ops[0].optimizer.state_dict()["state"][0]
    return module.w.item(), {key: value.item() for key, value in state.items()}, run.losses, run.updates


@pytest.mark.parametrize("flush_every", [None, 3])
def test_all_processes_have_the_same_weights_and_optimiser_states_at_the_end(flush_every: int | None):
    one, two = together(learn, flush_every)
    assert one == two
    assert one[0] < 1.45
    assert len(one[2]) == 20


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Stop this process; another one continues it in three seconds."""
    if not os.fork():
        time.sleep(3)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def end_badly(answers: Path, action: Callable[[], None], timeout: float) -> None:
    """Write how a run ends in each process into a file named by its rank: the error, and threads that remain."""
    make = partial(torch.optim.SGD, lr=1e-6)
    trainer = AsynchronousTrainer({0: Fails(action)}, make, world_size(), 2, 1, peers=Peers(timeout))
    with pytest.raises((PeerError, ArithmeticError, KeyboardInterrupt)) as caught:
        trainer.run(square_instance(1.0, world_size(), at=1) for _ in iter(int, 1))
    remaining = [thread.name for thread in threading.enumerate() if thread.name.startswith("worker ")]
    (answers / str(rank())).write_text(f"{caught.type.__name__}: {caught.value} {remaining}")


@pytest.mark.parametrize(
    ("action", "own", "others"),
    [
        (fail, "ArithmeticError: the third\ncall fails []", "has failed: ArithmeticError: the third call fails []"),
        (interrupt, "KeyboardInterrupt:  []", "has failed: KeyboardInterrupt []"),
        (kill, None, "has ended []"),
    ],
)
@pytest.mark.parametrize("size", [2, 3])
def test_a_process_that_fails_or_is_killed_ends_the_run_in_all_with_an_error_that_names_it(
    tmp_path: Path, size: int, action: Callable[[], None], own: str | None, others: str
):
    killed = pytest.raises(AssertionError, match="process 1 ended without an answer")
    with nullcontext() if own else killed:
        together(end_badly, tmp_path, action, 60.0, world_size=size)
    expected = {str(number): f"PeerError: worker 1 of {size} {others}" for number in range(size)} | {"1": own}
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert {"1": None} | found == expected


def test_a_process_that_is_silent_for_too_long_ends_the_run_in_the_other(tmp_path: Path):
    together(end_badly, tmp_path, stop, 1.2)
    said = (tmp_path / "0").read_text()
    assert said.startswith("PeerError: worker 1 of 2 has been silent for 1.2 seconds; it has stopped, or waits for")
