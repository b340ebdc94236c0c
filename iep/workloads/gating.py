"""Inputs -> which experts each goes to and with which weight: noisy top-k gating and the losses that keep experts busy
alike (Shazeer et al. 2017, Outrageously Large Neural Networks, sections 2.1 and 4, appendix A).

Shapes: T tokens, D inputs, E experts, K of them for each token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from iep.errors import InputError


@dataclass(frozen=True, eq=False)
class Gates:
    """What the gating decided about a minibatch."""

    experts_TK: Tensor
    """int64, each token's experts, the weightiest first."""
    gates_TK: Tensor
    """Their weights, which add up to 1."""
    importance_E: Tensor
    """The sum of each expert's gates over the tokens (eq. 6)."""
    load_E: Tensor
    """A smooth estimate of how many tokens each expert gets (eq. 10); without noise, how many it does get."""

    @property
    def importance_loss(self) -> Tensor:
        """Squared coefficient of variation of the importance (eq. 7), to be weighted and added to the model's loss."""
        return squared_variation(self.importance_E)

    @property
    def load_loss(self) -> Tensor:
        """Squared coefficient of variation of the load (eq. 11); no gradient without noise."""
        return squared_variation(self.load_E)


class NoisyTopKGating(nn.Module):
    """G(x) = softmax(keep_top_k(H(x))), H(x) = x W_g + N(0, 1) softplus(x W_noise) (eqs. 3 to 5).

    The noise is there in training only.

    Both matrices begin as zeros, so that noise alone decides at first and experts get about as much each (appendix A).

    Raises:
        InputError: a number is less than one, or k is greater than the number of experts.
    """

    def __init__(self, inputs: int, experts: int, k: int):
        super().__init__()
        if min(inputs, experts, k) < 1:
            raise InputError(f"gating of {inputs} inputs to {k} of {experts} experts, expected at least 1 of each")
        if k > experts:
            raise InputError(f"k is {k}, expected at most the number of experts, {experts}")
        self.k = k
        self.gate_weight = nn.Parameter(torch.zeros(inputs, experts))
        self.noise_weight = nn.Parameter(torch.zeros(inputs, experts))

    def forward(self, x_TD: Tensor) -> Gates:
        """Route every token.

        Raises:
            InputError: x is not (T, inputs), or of another dtype than the weights, without autocast.
        """
        inputs, experts = self.gate_weight.shape
        if x_TD.dim() != 2 or x_TD.shape[1] != inputs:
            raise InputError(f"gating got {tuple(x_TD.shape)}, expected (tokens, {inputs})")
        if x_TD.dtype != self.gate_weight.dtype and not torch.is_autocast_enabled(x_TD.device.type):
            raise InputError(f"gating got {x_TD.dtype}, expected the weights' {self.gate_weight.dtype}")
        # What is summed over tokens needs more bits than a low-precision minibatch has.
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
            load_E = chosen_probability(clean_TE, noisy_TE, deviation_TE, self.k).sum(dim=0)
        return Gates(experts_TK, gates_TK.to(x_TD.dtype), importance_E, load_E)


def chosen_probability(clean_TE: Tensor, noisy_TE: Tensor, deviation_TE: Tensor, k: int) -> Tensor:
    """(T, E) how probable it is that a token would go to an expert with that expert's noise drawn anew and the others'
    kept: Phi((x W_g - kth greatest of the others' H) / softplus(x W_noise)) (eqs. 8 and 9); k is less than E."""
    greatest = noisy_TE.topk(k + 1, dim=1).values
    kth_T1, next_T1 = greatest[:, k - 1 : k], greatest[:, k:]
    # Among the other experts the kth greatest is the k+1st of all where this one is among the first k.
    threshold_TE = torch.where(noisy_TE > next_T1, next_T1, kth_T1)
    return torch.special.ndtr((clean_TE - threshold_TE) / deviation_TE)


def squared_variation(values_E: Tensor) -> Tensor:
    """Variance over squared mean, 0 where all values are 0."""
    mean = values_E.mean()
    return values_E.var(correction=0) / (mean * mean + torch.finfo(values_E.dtype).tiny)
