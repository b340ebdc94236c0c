"""The lazy scope: code for one sample, run for many at once, with one line added.

    with iep.batching.scope(model.cell) as batch:
        losses = [model.loss(sample) for sample in samples]
    torch.stack(losses).mean().backward()

Inside, a call is recorded and returns futures; leaving the scope runs all that was recorded and that somebody still
holds, in groups of alike calls (just-in-time dynamic batching: Zha et al. 2019, sections 3 and 4). Calls become a
graph (`recording.py`, `lowering.py`), which is scheduled, laid out and executed as every other graph of this package.
"""

import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial, wraps
from time import perf_counter
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from iep.batching.execute import execute
from iep.batching.lazy.current import autocast_of_thread, current, recording_into
from iep.batching.lazy.future import Backward, values_of
from iep.batching.lazy.kernels import name_of, run, warn_singly
from iep.batching.lazy.lowering import Lowered, lower, needed_nodes, waiting_nodes, without_gradients
from iep.batching.lazy.own_gradients import patch_apply, unpatch_apply
from iep.batching.lazy.recorded import Op
from iep.batching.lazy.recording import Recording
from iep.batching.lazy.report import Report, Tally
from iep.batching.plans import plan
from iep.batching.schedulers import SCHEDULERS

GRANULARITIES = ("module", "op")
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class scope:  # noqa: N801 - a context manager, used as a function is
    """Within it, calls of modules are put off, and run batched at its end.

    Args:
        modules: whose calls are recorded. With none, those of all layers that `torch.nn` itself defines.
        granularity: "module" records each call of a listed module as one node; "op" each function of PyTorch that it
            calls. Functions on futures outside of these modules are recorded in both.
        scheduler: one of `iep.batching.SCHEDULERS`.
        share: nodes of one op with the same arguments run once. Not for modules that draw random numbers.
        defer_weight_grads: compute each weight's gradient once, over all calls (`DeferredWeightGrads`).

    A recorded call takes tensors, futures, nested lists, tuples and dicts of them, and static values, by which calls
    are told apart; parameters are shared by all calls, other tensors are a sample's own. It returns futures in the
    structure that the module returns. `Future.value`, `float(future)`, printing and all else that needs numbers runs
    what this one value needs. What a module does besides returning tensors (counting its calls, say) it does once for
    a group. Scopes may be nested, and open in several threads; each records the calls of its own thread.

    What recorded calls depend on besides tensors has to stay as it is until they run. A module whose parameters,
    buffers, hooks or `training` have changed by then is refused, and so is a tensor that was changed in place. Other
    attributes, and objects among the arguments, are taken as they are by then. `h += 1`, and functions and layers with
    `inplace=True`, change a future as they do a tensor, but not a part of it that was taken before; all other changes
    in place of futures and by futures are refused.

    While any scope of the process is open, Python's garbage collection is off, for all its threads: what is recorded is
    no garbage, and looking through it would take as long as recording. When the last one is left, by an exception
    too, collection is as it was. So do not keep a scope open for longer than a minibatch.

    Gradients of what a scope computes cannot be differentiated again. All its values are of one graph: of two losses,
    call `backward` on the sum, or on the first with `retain_graph=True`. A result that a loss does not use takes part
    in its group's way back with a gradient of zeros: infinite derivatives there make gradients that are not numbers
    (0 * inf), and parameters of which no result is used get zeros for gradients, where plain code leaves None.

    Raises:
        ValueError: an unknown granularity or scheduler, or what is listed is no module. Within it, or at its end:
            what calls depend on was changed before they ran, a tensor is changed in place, or tensors are on several
            devices.
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
            raise ValueError(f"no scheduler is called {scheduler!r}, expected one of {', '.join(SCHEDULERS)}")
        self._listed = frozenset(_without_lists(modules))
        self._by_op = granularity == "op"
        self._scheduler, self._share, self._defer = scheduler, share, defer_weight_grads
        self._tally = Tally()
        self._recording: Recording | None = None

    def __enter__(self) -> Self:
        if self._recording is not None:
            raise ValueError("a scope is entered once; make another")
        buffers = [buffer for module in self._listed for buffer in module.buffers()]
        self._recording = Recording(self._run, buffers)
        self._recording.takes = self._listed.__contains__ if self._listed else _is_layer
        self._recording.call = self._call_by_op if self._by_op else self._recording.record
        _patch()
        self._outer = current.recording
        current.recording = self._recording
        self._entered = perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        current.recording = self._outer
        recording = self._recording
        try:
            if kind is None:
                with recording_into(None):
                    self._finish(recording)
        finally:
            recording.forget()
            _unpatch()
            self._tally.seconds_in_all = perf_counter() - self._entered

    def wrap(self, function: Callable) -> Callable:
        """`function`, whose calls are recorded as a listed module's are. Wrap it once, not once a sample."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if current.recording is not self._recording or self._recording is None:
                return function(*args, **kwargs)
            return self._recording.call(function, args, kwargs)

        return call

    def report(self) -> Report:
        """What was batched so far, what was not, and why. Printed, it is a table.

        Raises:
            ValueError: the scope has not been entered.
        """
        if self._recording is None:
            raise ValueError("a scope's report is of what was recorded in it: enter it first")
        return self._tally.report(self._recording)

    def _call_by_op(self, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Call it now, on futures: what it calls in turn is recorded."""
        futures = self._recording.futures_for
        if isinstance(function, nn.Module):
            function = partial(_original_call, function)
        return function(*futures(args), **futures(dict(kwargs)))

    def _finish(self, recording: Recording) -> None:
        """Run what somebody waits for, hand it out, and do the backward calls that were put off."""
        waiting = [future for reference in recording.futures if (future := reference()) is not None]
        addresses = {future._address for future in waiting if future._value is None and future._address >= 0}
        wanted = sorted(addresses - recording.computed.keys())
        if wanted:
            nodes = waiting_nodes(recording, wanted)
            recording.check(nodes)
            self._execute(lower(recording, nodes, np.array(wanted), self._share), "the scope's end")
        for future in waiting:
            if future._value is None:
                future._value = recording.read(future._address)
        _run_backward(recording.backwards)

    def _run(self, recording: Recording, addresses: list[int], why: str) -> None:
        """Run what values at `addresses` need, and keep all of it: what is recorded later may take it."""
        with recording_into(None):
            nodes = needed_nodes(recording, addresses)
            recording.check(nodes)
            self._execute(lower(recording, nodes, recording.results_of(nodes), self._share), why)
            recording.look_anew()

    def _execute(self, lowered: Lowered, why: str) -> None:
        recording, began = self._recording, perf_counter()
        layout, was_there = plan(lowered.graph, lowered.types, self._scheduler)
        planned = perf_counter()
        inputs = recording.values_at(lowered.inputs, lowered.types.inputs)
        devices = sorted({str(rows.device) for rows in inputs.values()})
        if len(devices) > 1:
            raise ValueError(f"a scope's tensors are on {' and '.join(devices)}, expected one device")
        if devices != ["cpu"]:
            layout = layout.map(lambda index: index.to(devices[0]))
        grad = any(op.modes.grad for op in recording.ops)
        with (
            recording_into(None),
            torch.inference_mode(torch.is_inference_mode_enabled() and not grad),
            torch.set_grad_enabled(grad),
        ):
            outs = execute(
                layout,
                {index: partial(_run_op, recording.ops[index]) for index in lowered.types.signatures},
                inputs,
                self._defer,
            )
            free = without_gradients(recording, lowered) if grad else None
            for n, (addresses, out) in enumerate(zip(lowered.wanted, outs, strict=True)):
                recording.computed.update(zip(addresses.tolist(), out.unbind(0), strict=True))
                for address in addresses[free[n]].tolist() if free else ():
                    recording.computed[address] = recording.computed[address].detach()
        self._tally.add(lowered, layout, why, was_there, planned - began, perf_counter() - planned)


def _run_backward(backwards: list[Backward]) -> None:
    """The calls of `backward` that were put off, those of the same `inputs` together."""
    for one in backwards:
        one.check()
    for n, first in enumerate(backwards):
        if any(first.is_with(earlier) for earlier in backwards[:n]):
            continue
        together = [one for one in backwards[n:] if first.is_with(one)]
        torch.autograd.backward(
            [one.future.value for one in together],
            [values_of(one.gradient) for one in together],
            retain_graph=len(together) < len(backwards) or any(one.retain_graph for one in together),
            inputs=values_of(first.inputs),
        )


def _run_op(op: Op, *leaves: Tensor) -> tuple[Tensor, ...]:
    """An op's results on a group; what fails says where."""
    try:
        return _run_in_modes(op, leaves)
    except Exception as failure:
        failure.add_note(
            f"raised by {name_of(op.call.function)} on {len(leaves[0])} calls recorded in a lazy scope, whose "
            f"arguments have shapes {[tuple(leaf.shape[1:]) for leaf in leaves]}"
        )
        raise


def _run_in_modes(op: Op, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """An op's results on a group, in the modes in which its calls were recorded."""
    if op.modes.grad == torch.is_grad_enabled() and op.modes.autocast == autocast_of_thread():
        return run(op.kernel, op.call, leaves, partial(warn_singly, op.call.function))
    kinds = dict(op.modes.autocast)
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(op.modes.grad))
        for kind in ("cpu", "cuda"):
            if kind in kinds or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, kinds.get(kind), kind in kinds))
        return run(op.kernel, op.call, leaves, partial(warn_singly, op.call.function))


def _without_lists(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ValueError(f"{module!r} is no module; a function's calls are recorded by the scope's wrap")
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield from _without_lists(module.children())
        else:
            yield module


def _is_layer(module: nn.Module) -> bool:
    """Whether `torch.nn` itself defines it, and it is no mere container."""
    return _is_kind_of_layer(type(module))


@cache
def _is_kind_of_layer(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.") and not issubclass(kind, CONTAINERS)


_lock = threading.Lock()
_open = 0
_original_call: Callable | None = None
_collects = True


def _patch() -> None:
    """Let `nn.Module.__call__` ask the scope of its thread, without garbage collection; undone when the last scope of
    all threads is left."""
    global _open, _original_call, _collects
    with _lock:
        if not _open:
            original = _original_call = nn.Module.__call__

            def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                recording = current.recording
                if recording is None or not recording.takes(module):
                    return original(module, *args, **kwargs)
                return recording.call(module, args, kwargs)

            nn.Module.__call__ = call
            patch_apply()
            # What is recorded is no garbage, and looking through all of it for some would take as long as recording.
            _collects = gc.isenabled()
            gc.disable()
        _open += 1


def _unpatch() -> None:
    global _open
    with _lock:
        _open -= 1
        if not _open:
            nn.Module.__call__ = _original_call
            unpatch_apply()
            if _collects:
                gc.enable()
