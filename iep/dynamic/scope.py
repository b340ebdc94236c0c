"""The lazy scope, by which code for one sample runs for many at once, with one added line.

    with iep.dynamic.scope(model.cell) as batch:
        losses = [model.loss(sample) for sample in samples]
    torch.stack(losses).mean().backward()

Inside the scope, a call is recorded and returns futures. At its end, all recorded calls whose results are still
referenced run in groups of similar calls (just-in-time dynamic batching: Zha et al. 2019, sections 3 and 4). The calls
become a graph (`recording.py`, `lowering.py`), which is scheduled, planned and executed like any in `iep.batching`.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps
from time import perf_counter
from typing import Any, Self

import torch
from torch import Tensor, nn

from iep.batching.execute import execute
from iep.batching.plan import Plan, make_plan
from iep.batching.schedulers import SCHEDULERS, make_schedule
from iep.dynamic.future import Future, current, recording_into
from iep.dynamic.kernels import is_autograd_function, run_group
from iep.dynamic.lowering import Lowered, lower
from iep.dynamic.recording import Recording
from iep.dynamic.remembered import key_of, remembered
from iep.dynamic.report import BatchingReport
from iep.dynamic.trial import has_backward_hooks

GRANULARITIES = ("module", "op")
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class scope:  # noqa: N801 - a context manager, used as a function is
    """Record calls of modules in the block, and run them batched at its end.

    Args:
        modules: the modules whose calls are recorded. If there are none, all layers that `torch.nn` itself defines.
        granularity: "module" records each call of a listed module as one node, and "op" each function of PyTorch that
            it calls. Both record functions on futures outside of these modules.
        scheduler: a name in `iep.batching.schedulers.SCHEDULERS`.
        share: run nodes of one op with the same arguments once. Not for modules that draw random numbers.
        defer_weight_grads: compute each weight's gradient once, over all calls (`DeferredWeightGrads`).

    Arguments of a recorded call are tensors, futures, nested lists, tuples and dicts of these, and static values, which
    distinguish calls. Parameters are shared by all calls, and other tensors belong to one sample. A call returns
    futures in the structure of the module's result. Reading a value (`Future.value`, `float(future)`, printing) runs
    all calls recorded so far. Side effects of a module, such as counting its calls, happen once for a group, and not at
    all if its results are no longer referenced; hooks that PyTorch registers for all modules may see a whole group.
    Scopes may be nested, and may be open in several threads, each for its own calls.

    All values that ran together belong to one autograd graph: with two losses, call `backward` on the sum, or on the
    first with `retain_graph=True`. Gradients cannot be differentiated again. A result that no loss uses has a gradient
    of zeros in its group's backward pass. Infinite derivatives there make gradients NaN (0 * inf), and parameters
    whose results are not used get gradients of zeros, which are None in plain code. Values that ran together with
    others that require a gradient may require one too.

    Raises:
        ValueError: the granularity or scheduler is unknown, or a listed object is not a module. In the block, or at its
            end: a call changes a tensor in place; the parameters, buffers, parts, hooks or training mode of a module,
            or a tensor, changed between a call and its run; `backward` of a future is called; a
            `torch.autograd.Function` is given a future; tensors are on several devices.
    """

    def __init__(
        self,
        *modules: nn.Module,
        granularity: str = "module",
        scheduler: str = "lookahead",
        share: bool = False,
        defer_weight_grads: bool = True,
    ):
        if granularity not in GRANULARITIES:
            raise ValueError(f"granularity {granularity!r}, expected one of {', '.join(GRANULARITIES)}")
        if scheduler not in SCHEDULERS:
            raise ValueError(f"scheduler {scheduler!r}, expected one of {', '.join(SCHEDULERS)}")
        self._listed = frozenset(_without_lists(modules))
        self._by_op = granularity == "op"
        self._scheduler, self._share, self._defer = scheduler, share, defer_weight_grads
        self._report, self._recording = BatchingReport(), None
        self._is_hooked = cache(_is_hooked)

    def __enter__(self) -> Self:
        if self._recording is not None:
            raise ValueError("a scope can be entered once: make another")
        buffers = [buffer for module in self._listed for buffer in module.buffers()]
        self._recording = Recording(self._run, self._report.ran_at_once, buffers)
        self.handles = self._listed.__contains__ if self._listed else _is_layer
        self.call = self._call_by_op if self._by_op else self._recording.record
        self._stack = ExitStack()
        self._stack.enter_context(_module_calls_recorded())
        self._stack.enter_context(recording_into(self))
        self._entered = perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            if kind is None:
                self._recording.run("the scope's end")
        finally:
            self._stack.close()
            self._recording.end()
            elsewhere = self._report.seconds_planning + self._report.seconds_executing
            self._report.seconds_recording = perf_counter() - self._entered - elsewhere

    def wrap(self, function: Callable) -> Callable:
        """Return a `function` whose calls are recorded like those of a module. Wrap it once, not for each sample."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.call(function, args, kwargs) if current.recorder is self else function(*args, **kwargs)

        return call

    def report(self) -> BatchingReport:
        """Return a report of the calls that were batched so far, and of the others. It prints as a table."""
        return self._report

    def _call_by_op(self, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Call a module or function now, on futures, and record the functions that it calls."""
        if is_autograd_function(function) or self._is_hooked(function):
            return self._recording.record(function, args, kwargs)
        futures = self._recording.futures_for
        function = partial(_original_call, function) if isinstance(function, nn.Module) else function
        return function(*futures(args), **futures(dict(kwargs)))

    def _run(self, recording: Recording, futures: list[Future], why: str) -> None:
        """Compute the values of `futures`."""
        began = perf_counter()
        lowered = lower(recording, futures, self._share)
        plan, was_there = _plan(lowered, self._scheduler)
        planned = perf_counter()
        inputs: dict[int, list[Tensor]] = {}
        for column, tensor in zip(lowered.types.inputs.tolist(), recording.unchanged(lowered.inputs), strict=True):
            inputs.setdefault(column, []).append(tensor)
        devices = sorted({str(tensors[0].device) for tensors in inputs.values()})
        if len(devices) > 1:
            raise ValueError(f"a scope's tensors are on {' and '.join(devices)}, expected one device")
        if devices != ["cpu"]:
            plan = plan.to(devices[0])
        ops = {index: recording.ops[index] for index in lowered.types.signatures}
        grad = any(op.grad for op in ops.values())
        with torch.inference_mode(torch.is_inference_mode_enabled() and not grad), torch.set_grad_enabled(grad):
            outs = execute(
                plan,
                {index: partial(run_group, op.call, op.kernel, op.grad, op.autocast) for index, op in ops.items()},
                {column: torch.stack(tensors) for column, tensors in inputs.items()},
                self._defer,
            )
            for futures_of_root, out in zip(lowered.roots, outs, strict=True):
                for (future, has_grad), value in zip(futures_of_root, out.unbind(0), strict=True):
                    future._value = value if has_grad else value.detach()
        for call in plan.calls:
            self._report.add(ops[call.op], call.size)
        self._report.flushes[why] += 1
        self._report.plans_reused += was_there
        self._report.seconds_planning += planned - began
        self._report.seconds_executing += perf_counter() - planned


def _plan(lowered: Lowered, scheduler: str) -> tuple[Plan, bool]:
    """Return the plan of a graph, and whether it was cached."""
    graph, types = lowered.graph, lowered.types
    name = f"{scheduler} {graph.num_inputs} {sorted(types.signatures.items())}"
    key = key_of(name, graph.op, graph.args, types.fields, types.inputs, *sum(types.roots, ()))
    return remembered(key, graph.num_nodes, lambda: make_plan(graph, make_schedule(graph, scheduler), types))


def _without_lists(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ValueError(f"{module!r} is not a module; the scope's wrap records the calls of a function")
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield from _without_lists(module.children())
        else:
            yield module


def _is_hooked(function: Callable) -> bool:
    """Return whether a module or a part of it has backward hooks, so that its calls must run one by one, undivided."""
    return isinstance(function, nn.Module) and any(map(has_backward_hooks, function.modules()))


def _is_layer(module: nn.Module) -> bool:
    """Return whether `torch.nn` itself defines the module's class, and it is not just a container."""
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, CONTAINERS)


_lock = threading.Lock()
_open_scopes = 0
_original_call = nn.Module.__call__


@contextmanager
def _module_calls_recorded() -> Iterator[None]:
    """Make `nn.Module.__call__` ask the scope of its thread, until the last scope of all threads ends."""
    global _open_scopes, _original_call
    with _lock:
        if not _open_scopes:
            _original_call, nn.Module.__call__ = nn.Module.__call__, _call
        _open_scopes += 1
    try:
        yield
    finally:
        with _lock:
            _open_scopes -= 1
            if not _open_scopes:
                nn.Module.__call__ = _original_call


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    recorder = current.recorder
    if recorder is None or not recorder.handles(module):
        return _original_call(module, *args, **kwargs)
    return recorder.call(module, args, kwargs)
