"""Inputs -> a sparsely gated mixture of experts' outputs and the losses of its gating (Shazeer et al. 2017,
Outrageously Large Neural Networks): `gating.py` chooses, `experts.py` computes.

Shapes: T tokens, D inputs, O outputs.
"""

from torch import Tensor, nn

from iep.workloads.experts import Experts
from iep.workloads.gating import Gates, NoisyTopKGating


class MixtureOfExperts(nn.Module):
    """y = sum over a token's k experts of G(x)_i E_i(x) (eq. 1), every expert a network of one hidden layer.

        outputs_TO, gates = layer(x_TD)
        loss = task_loss + w_importance * gates.importance_loss + w_load * gates.load_loss     # both 0.1 in the paper

    Args:
        execution: `vanilla`, `batched` or `grouped`, all the same to the last digits; `Experts` says what they are.

    Raises:
        InputError: a size is less than 1, k is greater than the number of experts, or there is no such execution.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int, experts: int, k: int, execution: str = "batched"):
        super().__init__()
        self.gating = NoisyTopKGating(inputs, experts, k)
        self.experts = Experts(inputs, hidden, outputs, experts, execution)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Gates]:
        """(T, O) the outputs, and what the gating decided.

        Raises:
            InputError: x is not (T, inputs), or of another dtype than the weights.
        """
        gates = self.gating(x_TD)
        return self.experts(x_TD, gates.experts_TK, gates.gates_TK), gates

    def one(self, x_D: Tensor) -> Tensor:
        """(O,) what the layer makes of one token: the reference, in plain PyTorch."""
        gates = self.gating(x_D[None])
        return self.experts.one(x_D, gates.experts_TK[0].tolist(), gates.gates_TK[0])
