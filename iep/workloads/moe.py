"""A sparsely gated mixture of experts, with the losses of its gating (Shazeer et al. 2017, Outrageously Large Neural
Networks, sections 2.1 and 4, appendix A).

This file has the gating; `experts.py` computes the outputs of the experts.

Shapes: T tokens, D inputs, O outputs, E experts, K of them for each token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from iep.errors import InputError
from iep.workloads.experts import Experts


class MixtureOfExperts(nn.Module):
    """A mixture of experts, y = sum over a token's k experts of G(x)_i E_i(x) (eq. 1), with one hidden layer each.

        outputs_TO, gates = layer(x_TD)
        loss = task_loss + w_importance * gates.importance_loss + w_load * gates.load_loss     # both 0.1 in the paper

    Raises:
        InputError: a size is less than 1, or k is greater than the number of experts.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int, experts: int, k: int):
        super().__init__()
        self.gating = NoisyTopKGating(inputs, experts, k)
        self.experts = Experts(inputs, hidden, outputs, experts)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, "Gates"]:
        """Return the outputs, (T, O), and the result of the gating.

        Raises:
            InputError: x is not (T, inputs).
        """
        gates = self.gating(x_TD)
        return self.experts(x_TD, gates.experts_TK, gates.gates_TK), gates

    def one(self, x_D: Tensor) -> Tensor:
        """Return the layer's output for one token, (O,): the slow reference in plain PyTorch."""
        gates = self.gating(x_D[None])
        return self.experts.one_by_one(x_D[None], gates.experts_TK, gates.gates_TK)[0]


@dataclass(frozen=True, eq=False)
class Gates:
    """The result of the gating for a minibatch."""

    experts_TK: Tensor
    """The experts of each token, int64, the one with the greatest gate first."""
    gates_TK: Tensor
    """The gates of these experts, which add up to 1."""
    importance_E: Tensor
    """The sum of each expert's gates over the tokens (eq. 6)."""
    load_E: Tensor
    """A smooth estimate of each expert's number of tokens (eq. 10); without noise, the number itself."""

    @property
    def importance_loss(self) -> Tensor:
        """The squared coefficient of variation of the importance (eq. 7), to be weighted and added to the loss."""
        return squared_variation(self.importance_E)

    @property
    def load_loss(self) -> Tensor:
        """The squared coefficient of variation of the load (eq. 11), which has no gradient without noise."""
        return squared_variation(self.load_E)


class NoisyTopKGating(nn.Module):
    """The gating G(x) = softmax(keep_top_k(H(x))), H(x) = x W_g + N(0, 1) softplus(x W_noise) (eqs. 3 to 5).

    The noise is added in training only. Both matrices are initialised with zeros, so that at first only the noise
    decides, and all experts receive about the same number of tokens (appendix A).

    Raises:
        InputError: k is less than 1 or greater than the number of experts.
    """

    def __init__(self, inputs: int, experts: int, k: int):
        super().__init__()
        if not 1 <= k <= experts:
            raise InputError(f"k is {k}, expected 1 to {experts}, the number of experts")
        self.k = k
        self.gate_weight = nn.Parameter(torch.zeros(inputs, experts))
        self.noise_weight = nn.Parameter(torch.zeros(inputs, experts))

    def forward(self, x_TD: Tensor) -> Gates:
        """Choose the experts of every token.

        Raises:
            InputError: x is not (T, inputs).
        """
        inputs, experts = self.gate_weight.shape
        if x_TD.dim() != 2 or x_TD.shape[1] != inputs:
            raise InputError(f"gating got {tuple(x_TD.shape)}, expected (tokens, {inputs})")
        # Sums over tokens need more bits than a low-precision dtype has.
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        clean_TE = (x_TD @ self.gate_weight).to(wide)
        deviation_TE = functional.softplus((x_TD @ self.noise_weight).to(wide)) if self.training else None
        noisy_TE = clean_TE if deviation_TE is None else clean_TE + torch.randn_like(clean_TE) * deviation_TE
        kept_TK, experts_TK = noisy_TE.topk(self.k, dim=1)
        gates_TK = kept_TK.softmax(dim=1)
        importance_E = gates_TK.new_zeros(experts).index_add(0, experts_TK.flatten(), gates_TK.flatten())
        if deviation_TE is None or self.k == experts:
            load_E = torch.bincount(experts_TK.flatten(), minlength=experts).to(wide)
        else:
            greatest = noisy_TE.topk(self.k + 1, dim=1).values
            kth_T1, next_T1 = greatest[:, -2:-1], greatest[:, -1:]
            # If this expert is among the first k, the kth greatest of the other experts is the k+1st of all.
            threshold_TE = torch.where(noisy_TE > next_T1, next_T1, kth_T1)
            # The probability that each expert is chosen if only its own noise is drawn again (eqs. 8 and 9).
            load_E = torch.special.ndtr((clean_TE - threshold_TE) / deviation_TE).sum(dim=0)
        return Gates(experts_TK, gates_TK.to(x_TD.dtype), importance_E, load_E)


def squared_variation(values_E: Tensor) -> Tensor:
    """Return the variance divided by the squared mean, or 0 if all values are 0."""
    mean = values_E.mean()
    return values_E.var(correction=0) / (mean * mean + torch.finfo(values_E.dtype).tiny)
