"""The processes of one job: their ranks, the objects that they exchange, and errors that end all of them.

Without torchrun there is one process, of rank 0, and every function here returns at once. With torchrun, commands run
inside `joined()` and exchange small objects on the CPU (gloo); `training/parallel.py` averages gradients. All processes
must call the collective functions, from `barrier` on, at the same points.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from iep.errors import InputError
from iep.runtime.signals import PARENT, end_with_parent

T = TypeVar("T")


@contextmanager
def joined() -> Iterator[None]:
    """Connect the processes that torchrun started, by gloo on CPUs and NCCL on GPUs, until the block ends.

    Raises:
        InputError: torchrun's environment is incomplete or invalid, or the processes cannot reach each other.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" or dist.is_initialized():
        yield
        return
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGTERM, PARENT)  # if torchrun itself is killed, this process stops and saves
    try:
        _connect()
    except (ValueError, RuntimeError) as error:
        what = " ".join(str(error).split())[:300]
        raise InputError(f"WORLD_SIZE is set, as by torchrun, but the processes cannot connect: {what}") from None
    try:
        yield
    finally:
        dist.destroy_process_group()


def _connect() -> None:
    store, number, size = next(dist.rendezvous("env://"))
    # torchrun keeps its store when it restarts processes, and with it the addresses of those that have ended. Several
    # machines do not agree on the number of restarts; scripts/train_nodes.sh makes torchrun start new stores instead.
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_nccl else "gloo", store=store, rank=number, world_size=size)


def rank() -> int:
    """Return this process's rank in the job, 0 to `world_size()` - 1."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes of the job, on all machines."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Return whether this is the process that writes files and prints."""
    return rank() == 0


def local_rank() -> int:
    """Return this process's rank among those on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0)) if dist.is_initialized() else 0


def local_world_size() -> int:
    """Return the number of processes of the job on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if dist.is_initialized() else 1


def barrier() -> None:
    """Wait until all processes call this."""
    total(torch.zeros(()))


def total(values: torch.Tensor) -> torch.Tensor:
    """Return the sum over all processes of `values`, which have the same shape and dtype in each."""
    if world_size() == 1:
        return values
    values = values.detach().clone()
    dist.all_reduce(values)
    return values


def gather(value: T) -> list[T] | None:
    """Return the picklable values of all processes by rank, in rank 0; None in the others."""
    if world_size() == 1:
        return [value]
    values: list[Any] | None = [None] * world_size() if is_main() else None
    dist.gather_object(value, values)
    return values


def broadcast(value: T) -> T:
    """Return rank 0's picklable `value`, in every process."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def attempt(make: Callable[[], T], here: bool = True) -> T | Any:
    """Return what `make()` returns in the processes where `here` is set, and None in the others.

    Raises:
        InputError: `make` raised it in some process. It is raised in the main process, and the others exit.
        OSError: `make` raised it in some process, which is handled in the same way.
    """
    made = mine = None
    try:
        made = make() if here else None
    except (InputError, OSError) as error:
        mine = error
    errors = [mine]
    if world_size() > 1:
        errors *= world_size()
        dist.all_gather_object(errors, mine)
    for number, first in enumerate(errors):
        if first is not None:
            if not is_main():
                sys.exit(1)
            raise InputError(f"process {number}: {first}") if number and isinstance(first, InputError) else first
    return made


def main_first(make: Callable[[], T]) -> T:
    """Return what `make()` returns; the main process calls it first, so that the others find the files that it wrote.

    Raises:
        InputError: `make` raised it in some process. It is raised in the main process, and the others exit.
        OSError: `make` raised it in some process, which is handled in the same way.
    """
    by_first, by_others = attempt(make, is_main()), attempt(make, not is_main())
    return by_first if is_main() else by_others


def by_main(make: Callable[[], T]) -> T:
    """Return what `make()` returns in the main process, the only one that calls it; the result must be picklable.

    Raises:
        InputError: `make` raised it. It is raised in the main process, and the others exit.
        OSError: `make` raised it, which is handled in the same way.
    """
    return broadcast(attempt(make, is_main()))
