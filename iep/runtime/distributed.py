"""The processes of one job: their ranks, what they exchange, and how an error of one ends all, reported once.

Without torchrun there is one process, of rank 0, and everything here returns at once. With it, commands run inside
`joined()` and exchange small objects on the CPU (gloo); `training/parallel.py` sums gradients. The
functions below `Trouble` must be called by every process at the same points; with one process they only raise.
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
from iep.runtime.signals import end_with_parent, unanswered

PATIENCE_SECONDS = 600
"""How long the first process waits for the others."""

T = TypeVar("T")


@contextmanager
def joined() -> Iterator[None]:
    """Within it, the processes that torchrun started are one group; gloo on CPUs and NCCL on GPUs.

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
        end_with_parent(signal.SIGTERM)  # torchrun itself may be killed: then this process stops and saves
    try:
        with unanswered():  # inside it no handler would be heard
            _join()
    except (ValueError, RuntimeError) as error:
        what = " ".join(str(error).split())[:300]
        raise InputError(f"WORLD_SIZE is set, as by torchrun, but the processes cannot meet: {what}") from None
    try:
        yield
    except InputError:
        if not is_main():
            time.sleep(3)  # the first process most often reports the same, and torchrun ends this one meanwhile
        raise
    except RuntimeError as error:
        if not _is_lost_peer(error):
            raise
        what = " ".join(str(error).split())[:200]
        raise InputError(
            f"process {rank()} of {world_size()}: stopped, most likely for another process of the job ended ({what})"
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
    # torchrun may keep its store over restarts, and with it the addresses of processes that are dead.
    store = dist.PrefixStore(_token(store, number, size), store)
    dist.init_process_group(backend, store=store, rank=number, world_size=size)


def _token(store: dist.Store, number: int, size: int) -> str:
    """A name for this meeting of `size` processes, made by the first: what earlier ones left in the store has others.

    A process says hello under its number with a word of its own, and waits for the answer to that word. The first
    answers every hello, those of dead processes too, until all have taken this meeting's name from it.
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
            raise RuntimeError(f"processes {sorted(waiting)} of {size} have not come in {PATIENCE_SECONDS} seconds")
        time.sleep(0.02)
    return mine


def _is_lost_peer(error: RuntimeError) -> bool:
    """Did a collective fail because another process is gone?"""
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket", "NCCL")
    return isinstance(error, dist.DistError) or ("gloo" in str(error) and any(sign in str(error) for sign in signs))


def rank() -> int:
    """Return this process's number in the job, 0 to `world_size()` - 1."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes of the job, on all machines."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Return whether this is the process that writes files and prints."""
    return rank() == 0


def local_rank() -> int:
    """Return this process's number among those on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0)) if dist.is_initialized() else 0


def local_world_size() -> int:
    """Return the number of processes of the job on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if dist.is_initialized() else 1


def torchrun_identity() -> str | None:
    """Return an identifier of the torchrun that started this process, the same over its restarts; None without it."""
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
    """Return every process's picklable `value` by rank, in rank 0; None in the others."""
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
"""The position in the work at which something failed, and the error."""


def first_trouble(trouble: Trouble | None) -> Trouble | None:
    """Return the earliest trouble of any process, in every process."""
    troubles = gather(trouble)
    return broadcast(min(filter(None, troubles), key=lambda each: each[0], default=None) if is_main() else None)


def end_with(error: Exception) -> None:
    """End this process: the main one by raising `error`, which is reported there, the others silently.

    Raises:
        Exception: `error`, in the main process.
        SystemExit: in the others.
    """
    if is_main():
        raise error
    sys.exit(1)


def attempt(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return what `make()` returns, or the `InputError` or `OSError` that it raises."""
    try:
        return make(), None
    except (InputError, OSError) as error:
        return None, error


def raise_any(error: Exception | None) -> None:
    """End every process where one has an error.

    Raises:
        Exception: that of the first such process, in the main one; the others exit.
    """
    if any_rank(error is not None):
        end_with(first_trouble(None if error is None else (0, error))[1])


def main_first(make: Callable[[], T]) -> T:
    """Return what `make()` returns; the main process calls it first, so that others find its files (a download).

    Raises:
        InputError: as `make` in any process.
        OSError: likewise.
    """
    made, error = attempt(make) if is_main() else (None, None)
    raise_any(error)
    if not is_main():
        made, error = attempt(make)
    raise_any(error)
    return made


def by_main(make: Callable[[], T]) -> T:
    """Return what `make()` returns in the main process, which alone calls it; the result must be picklable.

    Raises:
        InputError: as `make`.
        OSError: likewise.
    """
    made, error = attempt(make) if is_main() else (None, None)
    raise_any(error)
    return broadcast(made)
