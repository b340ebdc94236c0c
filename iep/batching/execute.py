"""Layout, modules and inputs -> results: one module call per group of the schedule.

Arguments are gathered by place, so nothing depends on the order in which results arrive. What the modules compute is
theirs, and so is how; every result has the shape of an input, and a call's row g is the result of its node g.

Shapes: G rows of a call, B examples.
"""

from torch import Tensor

from iep.batching.exchange import Modules, Run, run_calls
from iep.batching.layout import Layout
from iep.batching.placed import PlacedLayout
from iep.batching.threads import run_devices


def execute(
    layout: Layout | PlacedLayout, modules: Modules, inputs: Tensor, defer_weight_grads: bool = False
) -> Tensor:
    """Run the schedule that `layout` was made for; returns the roots' values, (B, ...) in the order of the examples.

    Args:
        layout: where everything lies, its indices on the device of `inputs`. A placed one has each part's on its own
            device; inputs are given, and results returned, where it says that they are.
        modules: by op, what maps a call's arguments, (G, ...) each in their order, to its results (G, ...).
        inputs: (num_inputs, ...), one row per input slot; results are kept in their dtype and memory format.
        defer_weight_grads: compute each weight's gradient once, over all calls (`deferred.py`).

    Gradients cannot be differentiated again.

    Raises:
        ValueError: there are not as many inputs as the graph has, it has no roots, or a module returns another shape
            than its arguments have, or numbers that their dtype cannot hold (floating-point ones, where it is whole).
    """
    arrival, departure = layout.calls[0], layout.calls[-1]
    if len(inputs) != arrival.rows or not departure.rows:
        raise ValueError(
            f"{len(inputs)} inputs for a graph of {arrival.rows} inputs and {departure.rows} roots, "
            "expected as many inputs as the graph has, and at least one root"
        )
    if isinstance(layout, PlacedLayout):
        return run_devices(layout, modules, inputs, defer_weight_grads)
    return run_calls(Run(layout, inputs, inputs.device), modules, inputs, defer_weight_grads)[1]
