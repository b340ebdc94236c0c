"""The processes of one job: their ranks, the objects that they exchange, and errors that end all of them.

Without torchrun there is one process, of rank 0, and every function here returns at once. With torchrun, commands run
inside `joined()` and exchange small objects on the CPU (gloo); `training/parallel.py` sums gradients. All processes
must call the collective functions, from `barrier` on, at the same points.
"""

import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from iep.errors import InputError
from iep.runtime.signals import default_signals, end_with_parent

PATIENCE_SECONDS = 600
"""The time for which the first process waits for the others to connect."""

T = TypeVar("T")


@contextmanager
def joined() -> Iterator[None]:
    """Connect the processes that torchrun started, by gloo on CPUs and NCCL on GPUs, until the block ends.

    Raises:
        InputError: torchrun's environment is incomplete or invalid, or the processes cannot reach each other.
    """
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        if not os.environ.get(name, "0").isdecimal():
            raise InputError(f"{name} is {os.environ[name]!r}, expected a whole number, as torchrun sets it")
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or dist.is_initialized():
        yield
        return
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGTERM)  # if torchrun itself is killed, this process stops and saves
    try:
        with default_signals():  # Python cannot run a handler while the C++ code waits for other processes
            _join()
    except (ValueError, RuntimeError) as error:
        what = " ".join(str(error).split())[:300]
        raise InputError(f"WORLD_SIZE is set, as by torchrun, but the processes cannot connect: {what}") from None
    try:
        yield
    except InputError:
        if not is_main():
            time.sleep(3)  # the first process usually reports the same error, and torchrun ends this one meanwhile
        raise
    except RuntimeError as error:
        if not _is_lost_peer(error):
            raise
        what = " ".join(str(error).split())[:200]
        raise InputError(
            f"process {rank()} of {world_size()}: stopped, probably because another process of the job ended ({what})"
        ) from None
    finally:
        dist.destroy_process_group()


def _join() -> None:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    number, size = int(os.environ.get("RANK", "-1")), int(os.environ["WORLD_SIZE"])
    if not 0 <= number < size:
        given = os.environ.get("RANK", "not set")
        raise ValueError(f"RANK is {given}, expected a number below WORLD_SIZE, which is {size}")
    store, number, size = next(dist.rendezvous("env://"))
    # torchrun may keep its store over restarts, and with it the addresses of processes that have ended.
    store = dist.PrefixStore(_token(store, number, size), store)
    dist.init_process_group(backend, store=store, rank=number, world_size=size)


def _token(store: dist.Store, number: int, size: int) -> str:
    """Return a random prefix on which `size` processes agree, so that keys of earlier processes are not read.

    The first process chooses the prefix. Each other process sends a random token under its rank, and waits for the
    answer to that token. The first answers every token, also those of processes that have ended, until all have
    acknowledged its prefix.
    """
    mine = uuid.uuid4().hex
    if number:
        store.set(f"hello {number}", mine)
        token = store.get(f"answer to {mine}").decode()
        store.set(f"taken {token} {number}", "")
        return token
    waiting, deadline = set(range(1, size)), time.monotonic() + PATIENCE_SECONDS
    while waiting:
        for other in sorted(waiting):
            if store.check([f"hello {other}"]):
                store.set(f"answer to {store.get(f'hello {other}').decode()}", mine)
            if store.check([f"taken {mine} {other}"]):
                waiting.remove(other)
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {sorted(waiting)} of {size} did not connect in {PATIENCE_SECONDS} seconds")
        time.sleep(0.02)
    return mine


def _is_lost_peer(error: RuntimeError) -> bool:
    """Return whether a collective failed because another process has ended."""
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket", "NCCL")
    return isinstance(error, dist.DistError) or ("gloo" in str(error) and any(sign in str(error) for sign in signs))


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


def torchrun_identity() -> str | None:
    """Return an identifier of the torchrun that started this process, None without one; restarts do not change it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    started = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{boot} {os.getppid()} {started}"


def barrier() -> None:
    """Wait until all processes call this."""
    any_rank(False)


def any_rank(flag: bool) -> bool:
    """Return whether `flag` is set in any process; all processes get the same answer."""
    return bool(total(torch.tensor(int(flag))))


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


Trouble = tuple[int, Exception]
"""The position in the work at which a process failed, and the error."""


def first_trouble(trouble: Trouble | None) -> Trouble | None:
    """Return the trouble with the lowest position in any process, in every process; None if there is none."""
    troubles = gather(trouble)
    return broadcast(min(filter(None, troubles), key=lambda each: each[0], default=None) if is_main() else None)


def end_with(error: Exception) -> None:
    """End this process; only the main process reports `error`.

    Raises:
        Exception: `error`, in the main process.
        SystemExit: in the others.
    """
    if is_main():
        raise error
    sys.exit(1)


def attempt(make: Callable[[], T], here: bool = True) -> T | None:
    """Return what `make()` returns in the processes where `here` is set, and None in the others.

    Raises:
        InputError: `make` raised it in some process. It is raised in the main process, and the others exit.
        OSError: likewise.
    """
    made = error = None
    if here:
        try:
            made = make()
        except (InputError, OSError) as caught:
            error = caught
    if any_rank(error is not None):
        number, first = first_trouble(None if error is None else (rank(), error))
        end_with(InputError(f"process {number}: {first}") if number and isinstance(first, InputError) else first)
    return made


def main_first(make: Callable[[], T]) -> T:
    """Return what `make()` returns; the main process calls it first, so that the others find the files that it wrote.

    Raises:
        InputError: as `attempt`.
        OSError: likewise.
    """
    by_first, by_others = attempt(make, is_main()), attempt(make, not is_main())
    return by_first if is_main() else by_others


def by_main(make: Callable[[], T]) -> T:
    """Return what `make()` returns in the main process, the only one that calls it; the result must be picklable.

    Raises:
        InputError: as `attempt`.
        OSError: likewise.
    """
    return broadcast(attempt(make, is_main()))
