"""Functions run in several processes of one group, as torchrun would start them, without its seconds of starting.

The processes come from multiprocessing's fork server, which has imported torch once and never run it.
"""

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

PATIENCE_SECONDS = 120

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["iep.training.run_training", "iep.evaluation.run_evaluation", "iep.preprocess.compute_features"]
)


def together(function: Callable[..., Any], *arguments: Any, world_size: int = 2) -> list[Any]:
    """What `function(*arguments)`, of a module's top level, returns in each of `world_size` joined processes, by rank.

    Raises:
        AssertionError: one of them fails (its traceback is the message), or they take too long.
    """
    port = free_port()
    pipes = [_context.Pipe(duplex=False) for _ in range(world_size)]
    workers = [
        _context.Process(target=_work, args=(rank, world_size, port, sender, function, arguments))
        for rank, (_, sender) in enumerate(pipes)
    ]
    for worker, (_, sender) in zip(workers, pipes, strict=True):
        worker.start()
        sender.close()  # so that a process that dies without a word is noticed at once
    try:
        answers = []
        for receiver, _ in pipes:
            assert receiver.poll(PATIENCE_SECONDS), "a process takes too long"
            answers.append(pickle.loads(receiver.recv_bytes()))
    finally:
        for worker in workers:
            worker.join(5)
            worker.kill()
    failures = [answer for kind, answer in answers if kind == "failed"]
    assert not failures, "\n".join(failures)
    return [answer for _, answer in answers]


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun tells a process."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    return {name: str(value) for name, value in (numbers | {"MASTER_PORT": port}).items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }


def _work(
    rank: int, world_size: int, port: int, sender: Connection, function: Callable[..., Any], arguments: tuple
) -> None:
    import torch

    from iep.runtime.distributed import joined

    torch.set_num_threads(1)
    os.environ.update(environment(rank, world_size, port))
    try:
        with joined():
            answer = ("done", function(*arguments))
    except BaseException:
        answer = ("failed", f"process {rank}:\n{traceback.format_exc()}")
    sender.send_bytes(pickle.dumps(answer))  # send() would share tensors' memory, which ends with this process
