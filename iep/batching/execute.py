"""Layout, modules and inputs -> results: one module call per group of the schedule.

Arguments are gathered by place, so nothing depends on the order in which results arrive. What the modules compute is
theirs, and so is how; a call's row g is the result of its node g. All values of a column have one shape and dtype:
those of its inputs, or of the first results.

Shapes: G rows of a call, B examples.
"""

from collections.abc import Mapping

from torch import Tensor

from iep.batching.exchange import Modules, Run, run_calls
from iep.batching.layout import Call, Layout
from iep.batching.placed import PlacedLayout
from iep.batching.threads import run_devices


def execute(
    layout: Layout | PlacedLayout,
    modules: Modules,
    inputs: Tensor | Mapping[int, Tensor],
    defer_weight_grads: bool = False,
    read_only: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Run the schedule that `layout` was made for; returns the roots' values, (B, ...) in the order of the examples.

    Args:
        layout: where everything lies, its indices on the device of `inputs`. A placed one has each part's on its own
            device; inputs are given, and results returned, where it says that they are.
        modules: by op, what maps a call's arguments, (G, ...) each in their order, to its results (G, ...): a tensor,
            or as many as the op's signature says.
        inputs: (num_inputs, ...), one row per input slot, for a graph without types; results are kept in their dtype
            and memory format. Otherwise one such tensor for each column that has inputs, and a tuple is returned: a
            tensor for each of the types' roots.
        defer_weight_grads: compute each weight's gradient once, over all calls (`deferred.py`).
        read_only: modules change no argument in place, so that not all of them need be copies. Not of a placed layout.

    Gradients cannot be differentiated again.

    Raises:
        ValueError: there are not as many inputs as the graph has, it has no roots, or a module returns another shape
            than its column holds, or numbers that the column's dtype cannot hold (floating-point ones, where it is
            whole).
    """
    given = {0: inputs} if isinstance(inputs, Tensor) else inputs
    arrival, departure = layout.calls[0], layout.calls[-1]
    results = _arriving(arrival, departure, given)
    if isinstance(layout, PlacedLayout):
        roots = run_devices(layout, modules, results, defer_weight_grads)
    else:
        roots = run_calls(Run(layout, results[0].device, read_only), modules, results, defer_weight_grads)[1]
    return roots[0] if isinstance(inputs, Tensor) else roots


def _arriving(arrival: Call, departure: Call, inputs: Mapping[int, Tensor]) -> tuple[Tensor, ...]:
    """The inputs in the order in which they arrive."""
    expected = {made.column: made.results.stop - made.results.start for made in arrival.results}
    found = {column: len(tensor) for column, tensor in inputs.items() if len(tensor)}
    if found != expected or not departure.rows:
        raise ValueError(
            f"{sum(found.values())} inputs for a graph of {arrival.rows} inputs and {departure.rows} roots, "
            "expected as many inputs of each column as the graph has, and at least one root"
        )
    return tuple(inputs[made.column] for made in arrival.results)
