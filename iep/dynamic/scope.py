"""The lazy scope, by which code for one sample runs for many at once, with one added line.

    with iep.dynamic.scope(model.cell) as batch:
        losses = [model.loss(sample) for sample in samples]
    torch.stack(losses).mean().backward()

Inside the scope, a call is recorded and returns futures. At its end, all recorded calls whose results are still
referenced run in groups of similar calls (just-in-time dynamic batching: Zha et al. 2019, sections 3 and 4). The calls
become a graph (`recording.py`), which is scheduled, planned and executed like any in `iep.batching`.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from iep.batching.execute import execute
from iep.batching.plan import make_plan
from iep.batching.schedulers import make_schedule
from iep.dynamic.future import Future, current_recorder, recording_into
from iep.dynamic.kernels import is_autograd_function, run_group
from iep.dynamic.plan_cache import cached_plan
from iep.dynamic.recording import Recording, lower
from iep.dynamic.report import BatchingReport
from iep.dynamic.rowwise import CELLS, SEQUENCES
from iep.kernels.deferred import weight_grad_context

LISTS = (nn.ModuleList, nn.ModuleDict)
CONTAINERS = (*LISTS, nn.Sequential, nn.ParameterList, nn.ParameterDict)


class scope:  # noqa: N801 - a context manager, used as a function is
    """Record calls of modules in the block, and run them batched at its end.

    Args:
        modules: the modules whose calls are recorded. If there are none, all layers that `torch.nn` itself defines.
        granularity: "module" records each call of a listed module as one node, and "op" each function of PyTorch that
            it calls. Both record functions on futures outside of these modules.
        scheduler: a name in `iep.batching.schedulers.SCHEDULERS`.
        share: run nodes of one op with the same arguments once. Not for modules that draw random numbers.
        defer_weight_grads: compute each weight's gradient once, over all calls (`iep.kernels.deferred`).

    The first call of a kind runs at once and is observed; later calls are recorded. Arguments of a recorded call are
    tensors, futures, nested lists, tuples and dicts of these, and plain values, which distinguish calls. Parameters and
    buffers are shared by all calls, and other tensors belong to one sample. A call returns futures in the structure of
    the module's result. Reading a value (`Future.value`, `float(future)`, printing) runs all calls recorded so far.
    Calls that change their module or read values run at once. Calls with other arguments or results are entered: their
    code runs at once, and the calls that it makes are recorded. Scopes may be nested, and open in several threads.

    All values that ran together belong to one autograd graph, which has no second derivatives. A result that no loss
    uses has a gradient of zeros in its group's backward pass; infinite derivatives there make gradients NaN (0 * inf).

    Raises:
        ValueError: the granularity is unknown, or a listed object is not a module. In the block, or at its end: a call
            changes a tensor in place; a tensor, or a container of a module, changed between a call and its run; a call
            keeps a tensor or reads a future where the scope does not look; `backward` of a future is called; a
            `torch.autograd.Function` is given a future; the scheduler is unknown.
    """

    def __init__(
        self,
        *modules: nn.Module,
        granularity: str = "module",
        scheduler: str = "lookahead",
        share: bool = False,
        defer_weight_grads: bool = True,
    ):
        if granularity not in ("module", "op"):
            raise ValueError(f"granularity {granularity!r}, expected one of module, op")
        for module in modules:
            if not isinstance(module, nn.Module):
                raise ValueError(f"{module!r} is not a module; the scope's wrap records the calls of a function")
        self._listed = frozenset().union(*(each.modules() if isinstance(each, LISTS) else [each] for each in modules))
        self._by_op, self._scheduler = granularity == "op", scheduler
        self._share, self._defer = share, defer_weight_grads
        self._report, self._is_entered, self._num_entered = BatchingReport(), False, 0

    def __enter__(self) -> Self:
        if self._is_entered:
            raise ValueError("a scope can be entered once: make another")
        self._is_entered = True
        buffers = [buffer for module in self._listed for buffer in module.buffers()]
        self._recording = Recording(self._run, self._enter, self._report, buffers)
        self._handled = self._listed.__contains__ if self._listed else _is_layer
        self.call = self._call_by_op if self._by_op else self._recording.record
        self.changes = self._recording.changes
        self._stack = ExitStack()
        self._stack.enter_context(_modules_observed())
        self._stack.enter_context(recording_into(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            if kind is None:
                self._recording.run("the scope's end")
        finally:
            self._stack.close()
            self._recording.end()

    def wrap(self, function: Callable) -> Callable:
        """Return a `function` whose calls are recorded like those of a module. Wrap it once, not for each sample."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.call(function, args, kwargs) if current_recorder.get() is self else function(*args, **kwargs)

        return call

    def report(self) -> BatchingReport:
        """Return a report of the calls that were batched so far, and of the others. It prints as a table."""
        return self._report

    records = True

    def handles(self, module: nn.Module) -> bool:
        """Return whether the calls of a module are recorded."""
        return self._handled(module) or (self._num_entered > 0 and _is_layer(module)) or _is_compiled(module)

    def _call_by_op(self, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Record the calls that a module or function makes, or its own call if that cannot be divided."""
        _, state = self._recording.state(function)
        is_whole = is_autograd_function(function) or type(function) in CELLS + SEQUENCES or _is_compiled(function)
        if is_whole or state.has_backward_hooks:
            return self._recording.record(function, args, kwargs)
        return self._enter(function, args, kwargs)

    def note(self, reason: str) -> None:
        """Ignore the reason why a call runs at once: futures are read as in plain code."""

    def _enter(self, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Call a module or function now, on futures, and record the calls that it makes."""
        function = partial(_originals[0], function) if isinstance(function, nn.Module) else function
        # Containers are not copied, as the function may change them.
        future_for = self._recording.future_for
        tensors = [future_for(value) if isinstance(value, Tensor | tuple) else value for value in args]
        self._num_entered += not self._by_op
        try:
            return function(*tensors, **{k: future_for(v) if isinstance(v, Tensor) else v for k, v in kwargs.items()})
        finally:
            self._num_entered -= not self._by_op

    def _run(self, recording: Recording, futures: list[Future], why: str) -> None:
        """Compute the values of `futures`."""
        graph, types, tensors, roots = lower(recording, futures, self._share)
        plan, was_cached = cached_plan(
            lambda: make_plan(graph, make_schedule(graph, self._scheduler), types),
            graph.num_nodes,
            f"{self._scheduler} {graph.num_inputs} {sorted(types.signatures.items())}",
            *(graph.op, graph.args, types.fields, types.inputs, *sum(types.roots, ())),
        )
        inputs: dict[int, list[Tensor]] = {}
        for column, tensor in zip(types.inputs.tolist(), tensors, strict=True):
            inputs.setdefault(column, []).append(tensor)
        plan = plan.to(tensors[0].device)
        ops = {index: recording.ops[index] for index in types.signatures}
        grad = any(op.grad for op in ops.values())
        with torch.inference_mode(torch.is_inference_mode_enabled() and not grad), torch.set_grad_enabled(grad):
            outs = execute(
                plan,
                {index: partial(run_group, op) for index, op in ops.items()},
                {column: torch.stack(tensors) for column, tensors in inputs.items()},
                weight_grad_context(self._defer),
            )
            for futures_of_root, out in zip(roots, outs, strict=True):
                for future, value in zip(futures_of_root, out.unbind(0), strict=True):
                    future._value = value if future._carries_grad else value.detach()
        for call in plan.calls:
            self._report.add(ops[call.op].function, ops[call.op].kernel, call.size)
        self._report.flushes[why] += 1
        self._report.plans_reused += was_cached


def _is_layer(module: nn.Module) -> bool:
    """Return whether `torch.nn` itself defines the module's class, and it is not just a container."""
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, CONTAINERS)


def _is_compiled(function: Any) -> bool:
    """Return whether `torch.compile` has compiled a module, whose calls cannot be divided."""
    return type(function).__module__.startswith("torch._dynamo") or bool(getattr(function, "_compiled_call_impl", None))


def _call(original: Callable) -> Callable:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder = current_recorder.get()
        if recorder is None or not recorder.handles(module):
            return original(module, *args, **kwargs)
        return recorder.call(module, args, kwargs)

    return call


def _change(original: Callable) -> Callable:
    """Replace a method that sets or deletes an attribute of a module, or adds or removes one of its hooks."""

    def change(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (recorder := current_recorder.get()) is not None:
            recorder.changes(self, *args)
        return original(self, *args, **kwargs)

    return change


SEAMS = (
    (nn.Module, "__call__", _call),
    (nn.Module, "__setattr__", _change),
    (nn.Module, "__delattr__", _change),
    (RemovableHandle, "__init__", _change),
    (RemovableHandle, "remove", _change),
)
"""The methods of PyTorch that tell of calls and changes of modules, and the functions that replace them."""
_lock = threading.Lock()
_open_scopes = 0
_originals: list[Callable] = []


@contextmanager
def _modules_observed() -> Iterator[None]:
    """Make modules report calls and changes to the recorder of their thread, until all threads' scopes have ended."""
    global _open_scopes
    with _lock:
        if not _open_scopes:
            _originals[:] = [getattr(owner, name) for owner, name, _ in SEAMS]
            for (owner, name, replacement), original in zip(SEAMS, _originals, strict=True):
                setattr(owner, name, replacement(original))
        _open_scopes += 1
    try:
        yield
    finally:
        with _lock:
            _open_scopes -= 1
            if not _open_scopes:
                for (owner, name, _), original in zip(SEAMS, _originals, strict=True):
                    setattr(owner, name, original)
