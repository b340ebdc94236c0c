"""Tokens, the experts chosen for them, and gates -> gated sums of the experts' outputs.

All experts that a minibatch calls are known at once, so that batching them is the degenerate case of a topological sort
(Suarez & Zhu, section 3.2): sort the tokens by expert, run each layer of all experts once as a group of linear layers,
restore the order of the rows and add them up. `moe.py` chooses the experts.

Shapes: T tokens, K experts each, R = T K rows sorted by expert, D or I inputs, H hidden, O outputs, E experts.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from iep.errors import InputError

LINEAR_EXECUTIONS = ("auto", "grouped", "loop")


class Experts(nn.Module):
    """A layer of E experts with one hidden layer each, relu(x W_hidden) W_output (Shazeer et al. 2017, without biases).

    The weights of one layer of all experts are one parameter. Experts that a minibatch does not call have gradients of
    zero. Gradients cannot be differentiated again.

    Attributes:
        hidden_weights: (E, D, H).
        output_weights: (E, H, O).
        execution: `grouped` for PyTorch's grouped matrix product, `loop` for one product for each expert that has
            tokens, or `auto` for `grouped` if `grouped_refusal` returns None, and `loop` otherwise.

    Raises:
        InputError: a size is less than 1, or the execution is unknown.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int, experts: int, execution: str = "auto"):
        super().__init__()
        if min(inputs, hidden, outputs, experts) < 1:
            raise InputError(f"{experts} experts of {inputs}-{hidden}-{outputs}, expected at least 1 of each")
        if execution not in LINEAR_EXECUTIONS:
            raise InputError(f"execution {execution!r}, expected one of {', '.join(LINEAR_EXECUTIONS)}")
        self.execution = execution
        self.hidden_weights = nn.Parameter(torch.empty(experts, inputs, hidden))
        self.output_weights = nn.Parameter(torch.empty(experts, hidden, outputs))
        for weights in (self.hidden_weights, self.output_weights):  # the initialisation of PyTorch's linear layers
            nn.init.uniform_(weights, -(weights.shape[1] ** -0.5), weights.shape[1] ** -0.5)

    def forward(self, x_TD: Tensor, experts_TK: Tensor, gates_TK: Tensor) -> Tensor:
        """Return the sum of each token's expert outputs, weighted by their gates, (T, O).

        Under autocast, all products are computed in the dtype of autocast.

        Args:
            experts_TK: the experts of each token, int64.
            gates_TK: the gate of each of these experts.

        Raises:
            InputError: a shape or dtype is wrong, or the number of an expert is out of range (checked on CPUs; on GPUs
                it is a device-side assertion).
            ValueError: the execution is `grouped` and PyTorch has no such product here.
        """
        inputs = self.hidden_weights.shape[1]
        if x_TD.dim() != 2 or x_TD.shape[1] != inputs:
            raise InputError(f"experts got inputs {tuple(x_TD.shape)}, expected (tokens, {inputs})")
        if experts_TK.dim() != 2 or experts_TK.shape != gates_TK.shape or len(experts_TK) != len(x_TD):
            given = f"experts {tuple(experts_TK.shape)} and gates {tuple(gates_TK.shape)}"
            raise InputError(f"{given} for {len(x_TD)} tokens, expected ({len(x_TD)}, k) of both")
        device = self.hidden_weights.device.type
        if not torch.is_autocast_enabled(device):
            return self._sums(x_TD, experts_TK, gates_TK, self.hidden_weights.dtype)
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return self._sums(x_TD.to(dtype), experts_TK, gates_TK.to(dtype), dtype)

    def one_by_one(self, x_TD: Tensor, experts_TK: Tensor, gates_TK: Tensor) -> Tensor:
        """Return the results of `forward` for T >= 1, one token after the other: the slow reference in plain PyTorch.

        The weights are divided into those of each expert once, since the backward pass of an index has the size of all.
        """
        hidden, output = (weights.to(x_TD.dtype).unbind() for weights in (self.hidden_weights, self.output_weights))
        results = []
        for x_D, experts_K, gates_K in zip(x_TD, experts_TK.tolist(), gates_TK, strict=True):
            of_expert = [(x_D @ hidden[expert]).relu() @ output[expert] for expert in experts_K]
            results.append(sum(gate * result for gate, result in zip(gates_K, of_expert, strict=True)))
        return torch.stack(results)

    def _sums(self, x_TD: Tensor, experts_TK: Tensor, gates_TK: Tensor, dtype: torch.dtype) -> Tensor:
        if x_TD.dtype != dtype or gates_TK.dtype != dtype or experts_TK.dtype != torch.int64:
            given = f"inputs {x_TD.dtype}, gates {gates_TK.dtype} and experts {experts_TK.dtype}"
            raise InputError(f"{given}, expected the weights' {dtype} and torch.int64")
        count, k = len(self.hidden_weights), experts_TK.shape[1]
        if not experts_TK.numel():
            hidden_TH = x_TD @ self.hidden_weights[0].to(dtype)  # so that the weights have gradients of zero
            return hidden_TH @ self.output_weights[0].to(dtype) * 0
        expert_R, order_R = experts_TK.flatten().sort(stable=True)
        if expert_R.is_cpu and not 0 <= expert_R[0].item() <= expert_R[-1].item() < count:
            raise InputError(f"experts {expert_R[0]} to {expert_R[-1]}, expected 0 to {count - 1}")
        numbers_E = torch.arange(count, device=order_R.device)
        ends_E = torch.searchsorted(expert_R, numbers_E, right=True, out_int32=True)
        x_RD = x_TD.index_select(0, order_R if k == 1 else order_R // k)
        hidden_RH = grouped_linear(x_RD, self.hidden_weights.to(dtype), ends_E, self.execution).relu_()
        output_RO = grouped_linear(hidden_RH, self.output_weights.to(dtype), ends_E, self.execution)
        output_TKO = output_RO.index_select(0, order_R.argsort()).view(*experts_TK.shape, -1)
        output_TKO = output_TKO * gates_TK.unsqueeze(2)
        return output_TKO.squeeze(1) if k == 1 else output_TKO.sum(1)


def grouped_linear(x_RI: Tensor, weight_EIO: Tensor, ends_E: Tensor, execution: str = "auto") -> Tensor:
    """Return the products of each row of `x_RI` and the (I, O) weight of its expert, (R, O).

    The gradient of `weight_EIO` is zero for experts without rows.

    Args:
        x_RI: rows sorted by expert; expert 0 has the first rows.
        ends_E: int32, the end of the rows of each expert, on the device of the rows.
        execution: `grouped` for PyTorch's grouped matrix product, `loop` for one product for each expert that has
            rows, or `auto` for `grouped` if `grouped_refusal` returns None, and `loop` otherwise.

    Raises:
        ValueError: `execution` has another value, or it is `grouped` and PyTorch has no such product here.
    """
    if execution not in LINEAR_EXECUTIONS:
        raise ValueError(f"execution {execution!r}, expected one of {', '.join(LINEAR_EXECUTIONS)}")
    refusal = None
    if execution != "loop":
        refusal = grouped_refusal(x_RI.device, x_RI.dtype, weight_EIO.shape[1:])
    if execution == "grouped" and refusal is not None:
        raise ValueError(f"execution 'grouped' is not available: {refusal}")
    if execution != "loop" and refusal is None and len(x_RI):
        return (_Grouped.apply if torch.is_grad_enabled() else product)(x_RI, weight_EIO, ends_E)
    sizes = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    parts = zip(x_RI.split(sizes), weight_EIO.unbind(0), sizes, strict=True)
    return torch.cat([x_GI @ weight_IO for x_GI, weight_IO, size in parts if size] or [x_RI @ weight_EIO[0]])


@cache
def grouped_refusal(device: torch.device, dtype: torch.dtype, widths: Sequence[int] = ()) -> str | None:
    """Return the reason why PyTorch has no grouped matrix product for this device, dtype and row widths, or None.

    On a CPU, where the grouped product is a loop in C++, it was measured to be 1.0 to 1.6 times as fast as the loop
    here. It needs rows whose size is a multiple of 16 bytes. The answer is cached, so that it comes from a trial with
    real tensors even if modes such as `FakeTensorMode` are active later.

    Raises:
        torch.OutOfMemoryError: there is not enough memory for the trial.
    """
    for width in widths:
        if width * dtype.itemsize % 16:
            return f"rows of {width} numbers ({dtype}) are {width * dtype.itemsize} bytes, expected a multiple of 16"
    wide = 16 // dtype.itemsize
    try:
        with torch.utils._python_dispatch._disable_current_modes():
            rows = torch.zeros(3, wide, dtype=dtype, device=device)
            weights = torch.zeros(2, wide, wide, dtype=dtype, device=device)
            ends = torch.tensor([1, 3], dtype=torch.int32, device=device)
            # The products of a layer, of its input gradient and of its weight gradient.
            for left, right in ((rows, weights), (rows, weights.mT), (rows.T, rows)):
                product(left, right, ends)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, RuntimeError) as error:
        return f"torch {torch.__version__} on {device}, {dtype}: {str(error).splitlines()[0][:200]}"
    return None


def product(left: Tensor, right: Tensor, ends_E: Tensor) -> Tensor:
    """Call PyTorch's grouped matrix product by the name that it has in this release."""
    public = getattr(functional, "grouped_mm", None)
    return (public or torch._grouped_mm)(left, right, offs=ends_E)


class _Grouped(Function):
    """The grouped matrix product with its gradients."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_RI, weight_EIO, ends_E)
        return product(x_RI, weight_EIO, ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_RI, weight_EIO, ends_E = ctx.saved_tensors
        gradient_RO = gradient_RO.contiguous()
        of_x = product(gradient_RO, weight_EIO.mT, ends_E) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_x, None, None
        of_weight = product(x_RI.T, gradient_RO, ends_E)
        if not x_RI.is_cpu:  # some GPUs' kernels leave the gradients of experts without rows unwritten
            of_weight.masked_fill_((ends_E.diff(prepend=ends_E.new_zeros(1)) == 0)[:, None, None], 0)
        return of_x, of_weight, None
