"""Tokens, the experts chosen for them, and gates -> gated sums of the experts' outputs.

All experts that a minibatch calls are known at once, so that batching them is the degenerate case of a topological sort
(Suarez & Zhu, section 3.2): sort the tokens by expert, run each layer of all experts once as a family of linear layers,
restore the order of the rows and add them up. `moe.py` chooses the experts.

Shapes: T tokens, K experts each, R = T K rows sorted by expert, D inputs, H hidden, O outputs, E experts.
"""

import torch
from torch import Tensor, nn

from iep.batching.grouped import LINEAR_EXECUTIONS, grouped_linear
from iep.errors import InputError


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
