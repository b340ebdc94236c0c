"""The loader: memory shared with workers, signals, the death of the parent, features in memory, the way to a GPU."""

import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from device_cases import ONE_GPU
from evaluate_cases import iep_eval
from processes import is_running, together
from tiny_data import IMAGES, TRAIN, assert_one_error, features, open_train, tiny, tiny_config, write_data, write_h5
from torch.utils.data import get_worker_info
from train_cases import iep_train

from iep.data.datasets import sequential_batches
from iep.data.features import Features
from iep.data.loader import Loading, Slots, on_device
from iep.errors import InputError
from iep.models.checkpoint import read_checkpoint
from iep.runtime.signals import handled
from iep.training.run_training import train

# Slots


def test_batches_that_are_kept_keep_their_features_however_many_they_are(data: Path):
    """There are three slots for each worker; features without a free slot are sent."""
    dataset = open_train(data)
    kept = list(sequential_batches(dataset, 2, Loading(workers=2, prefetch=1)))
    assert len(kept) == TRAIN // 2 + 1
    for ours, theirs in zip(kept, sequential_batches(dataset, 2), strict=True):
        assert torch.equal(ours.features, theirs.features)


def test_a_slot_is_free_again_when_the_last_tensor_of_it_is_gone(monkeypatch):
    monkeypatch.setattr("iep.data.loader.get_worker_info", lambda: SimpleNamespace(id=1, num_workers=2))
    slots, shape, dtype = Slots(count=2, size=100), (5, 5), np.dtype(np.float32)
    sent = torch.from_numpy(slots.allocate(shape, dtype)).fill_(7)
    receive, arguments = slots.reduce(sent)
    tensor = receive(*arguments)
    assert tensor.data_ptr() == sent.data_ptr()
    part = tensor[2]
    del tensor
    assert torch.from_numpy(slots.allocate(shape, dtype)).data_ptr() != sent.data_ptr()
    assert part.tolist() == [7] * 5
    del part
    assert torch.from_numpy(slots.allocate(shape, dtype)).data_ptr() == sent.data_ptr()


# Signals and deaths


def workers_of_this_process() -> list[int]:
    return [int(number) for number in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def load_and_signal_workers(data: Path) -> int:
    """Return the number of questions read, although workers receive signals after their first batch."""
    count = 0
    with handled():
        for batch in sequential_batches(open_train(data), 1, Loading(workers=2)):
            for worker in workers_of_this_process() if count == 1 else ():
                subprocess.run(["sh", "-c", f"kill -INT {worker}; kill -TERM {worker}"], check=True)
            count += len(batch.index)
    return count


def load_and_die(data: Path, note: Path) -> None:
    for _ in sequential_batches(open_train(data), 1, Loading(workers=2)):
        note.write_text(" ".join(map(str, workers_of_this_process())))
        os.kill(os.getpid(), signal.SIGKILL)


def test_workers_that_are_told_to_stop_leave_it_to_their_parent(data: Path):
    assert together(load_and_signal_workers, data, world_size=1) == [TRAIN]


def test_a_loader_that_is_closed_ends_its_workers_and_no_other_process(data: Path):
    other = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    other.start()
    before = workers_of_this_process()
    batches = iter(sequential_batches(open_train(data), 1, Loading(workers=2)))
    next(batches)
    assert len(workers_of_this_process()) == len(before) + 2
    batches.close()
    assert workers_of_this_process() == before
    other.kill()


def test_workers_end_with_a_parent_that_is_killed(data: Path, tmp_path: Path):
    with pytest.raises(AssertionError, match="process 0 ended without an answer"):
        together(load_and_die, data, tmp_path / "note", world_size=1)
    workers = [int(number) for number in (tmp_path / "note").read_text().split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 20
    while any(map(is_running, workers)):
        assert time.monotonic() < deadline, "orphans are left"
        time.sleep(0.01)


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_worker_that_the_system_kills_is_one_line(
    data: Path, runs: dict[str, Path], tmp_path: Path, monkeypatch, command
):
    def die_of_hunger(self: Features, *_: object) -> None:
        assert get_worker_info() is not None
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Features, "read", die_of_hunger)
    where = ("--data", data, "--out", tmp_path / "out")
    if command == "train":
        result = iep_train("--model", "ee", *where, *tiny("ee"), "workers=1")
    else:
        result = iep_eval("--ee", runs["ee"], *where, "--workers", 1)
    assert_one_error(result, "a process that loads data was lost", "(DataLoader worker (pid", "lower workers")


# In memory


def fail_in_memory(path: Path) -> str:
    try:
        return str(Features(path).in_memory())
    except InputError as error:
        return str(error)
    except SystemExit as stop:
        return f"exit {stop.code}"


def test_damaged_features_are_found_at_the_start_and_end_all_processes(tmp_path: Path):
    damaged = write_h5(tmp_path / "f.h5", {"features": features(0), "checksums": np.zeros(IMAGES, np.uint32)})
    first, second = together(fail_in_memory, damaged)
    assert first.startswith(f"{damaged}: features, row 0 is damaged")
    assert second == "exit 1"


def test_a_run_is_the_same_with_features_in_memory_and_however_they_are_loaded(data: Path, runs, tmp_path: Path):
    settings = ("features_in_memory=true", "workers=2", "prefetch=1")
    assert train(tiny_config(data, "ee", *settings), tmp_path / "ee", resume=False)
    ours, theirs = (read_checkpoint(run).networks["engine"] for run in (tmp_path / "ee", runs["ee"]))
    assert all(torch.equal(ours.weights[name], value) for name, value in theirs.weights.items())


# To a device


@ONE_GPU
def test_on_a_gpu_batches_arrive_whole_while_it_computes(tmp_path: Path):
    device = torch.device("cuda")
    dataset = open_train(write_data(tmp_path, "float16"))
    busy = torch.rand(4000, 4000, device=device)
    arrived = []
    for batch in on_device(sequential_batches(dataset, 8, Loading(1, pin=True)), device):
        for _ in range(20):
            busy = busy @ busy / 2000
        arrived.append(batch.features * 2)
    for ours, batch in zip(arrived, sequential_batches(dataset, 8), strict=True):
        assert torch.equal(ours.cpu(), batch.features.float() * 2)
