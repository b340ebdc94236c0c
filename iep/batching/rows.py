"""Inside `torch.vmap`, a function on the rows themselves: what is the same for rows and for samples needs no rule.

Custom autograd functions run in `torch.vmap` only by way of a slow detour, and a linear layer on samples of one axis
as one product for each. Both leave vmap for the length of a call.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

functorch = torch._C._functorch
is_batched = functorch.is_batchedtensor


def on_rows(function: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    """`function`, which maps (G, ...) rows to rows, of what is a batched tensor of the innermost vmap."""
    level, axis = functorch.maybe_get_level(input), functorch.maybe_get_bdim(input)
    with temporarily_pop_interpreter_stack():
        rows = function(functorch.get_unwrapped(input).movedim(axis, 0))
    return functorch._add_batch_dim(rows, 0, level)
