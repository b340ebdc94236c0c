"""A placed layout's parts -> run at the same time: every device's calls by a thread of its own.

A thread runs its device's calls in the schedule's order, and waits only for rows that another hands on. On the CPU
results are the same in every bit however the threads come to run: each device's sums have an order of their own. On the
way back it is autograd that runs devices at the same time: one thread for each GPU, one for all CPUs.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from iep.batching.exchange import Module, Modules, Run, run_calls
from iep.batching.placed import Arrival, Departure, PlacedLayout


def run_devices(layout: PlacedLayout, modules: Modules, inputs: tuple[Tensor, ...], defer: bool) -> tuple[Tensor, ...]:
    """`execute` of a placed layout. What one device's thread raises ends the others, and is raised."""
    devices, modes = layout.homes.devices, _Modes.of_this_thread(inputs[0].device, layout.homes.devices)
    boxes: list[SimpleQueue] = [SimpleQueue() for _ in layout.moves]
    failures: list[BaseException] = []

    def stop() -> None:
        for box in boxes:
            box.put(None)

    def work(position: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        part, device = layout.layouts[position], devices[position]
        try:
            with modes.on(device):
                there = _modules_at(part.calls[1:-1], modules, boxes, device)
                return run_calls(Run(part, device), there, inputs if position == layout.homes.inputs else (), defer)
        except BaseException as failure:
            failures.append(failure)
            stop()
            raise

    with ThreadPoolExecutor(len(devices)) as pool:
        ends = [pool.submit(work, position) for position in range(len(devices))]
        try:
            wait(ends)
        except BaseException:  # the user's interruption
            stop()
            raise
    if failures:
        raise failures[0]
    tokens, departed = zip(*[end.result() for end in ends], strict=True)
    roots = departed[layout.homes.roots]
    return _Join.apply(len(roots), *roots, *tokens)


class _StoppedError(Exception):
    """Another device's thread has failed."""


def _modules_at(
    calls: Sequence[Any], modules: Modules, boxes: Sequence[SimpleQueue], device: torch.device
) -> dict[Any, Module]:
    """By op, what runs for a device's calls: modules, and what sends and receives rows."""

    def module(op: Any) -> Module:
        if isinstance(op, Departure):
            return partial(_send, boxes[op.move])
        if isinstance(op, Arrival):
            return partial(_receive, boxes[op.move], device)
        return modules[op]

    return {call.op: module(call.op) for call in calls}


def _send(box: SimpleQueue, *rows: Tensor) -> None:
    box.put(rows)


def _receive(box: SimpleQueue, device: torch.device) -> tuple[Tensor, ...]:
    rows = box.get()
    if rows is None:
        raise _StoppedError
    return tuple(move(values, device) for values in rows)


def move(rows: Tensor, device: torch.device) -> Tensor:
    """Rows on another device; the only thing that crosses. What a CPU receives is there when this returns."""
    return rows.to(device, non_blocking=device.type == "cuda")


class _Join(Function):
    """The roots as they are. On the way back every device's last exchange comes next, so that each goes through all of
    its calls, those that lead to no root too, and no gradient is read before it is written."""

    @staticmethod
    def forward(ctx: Any, num_roots: int, *roots_and_tokens: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        roots = roots_and_tokens[:num_roots]
        ctx.mark_dirty(*roots)
        ctx.mark_non_differentiable(*(x for x in roots if not (x.is_floating_point() or x.is_complex())))
        return roots

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *gradients, *[None] * (len(ctx.needs_input_grad) - 1 - len(gradients))


def autocast_like(here: torch.device, there: torch.device) -> torch.autocast:
    """A context in which autocast is for `there` as it now is for `here`."""
    dtype, enabled = torch.get_autocast_dtype(here.type), torch.is_autocast_enabled(here.type)
    return torch.autocast(there.type, dtype, enabled, torch.is_autocast_cache_enabled())


@dataclass(frozen=True)
class _Modes:
    """What PyTorch keeps for each thread: gradients or not, precision, streams. Other modes that the caller may be in,
    a profiler's for instance, do not reach the devices' threads."""

    inference: bool
    grad: bool
    autocast: tuple[bool, torch.dtype, bool]
    """Of the inputs' kind of device; holds on every other kind too."""
    streams: tuple[Any, ...]

    @classmethod
    def of_this_thread(cls, inputs: torch.device, devices: Sequence[torch.device]) -> "_Modes":
        kind = inputs.type
        return cls(
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()),
            tuple(torch.cuda.current_stream(device) for device in dict.fromkeys(devices) if device.type == "cuda"),
        )

    def on(self, device: torch.device) -> AbstractContextManager:
        """The same modes in the thread that works for `device`."""
        stack = ExitStack()
        for stream in self.streams:
            stack.enter_context(torch.cuda.stream(stream))
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.inference_mode(self.inference))
        stack.enter_context(torch.set_grad_enabled(self.grad))
        # Not by the context `torch.autocast`: at its end it would throw away what other threads' casts have kept.
        enabled, dtype, cache = self.autocast
        torch.set_autocast_enabled(device.type, enabled)
        torch.set_autocast_dtype(device.type, dtype)
        torch.set_autocast_cache_enabled(cache)
        return stack
