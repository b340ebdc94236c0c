"""A traced program -> where each of its functions looked: a map over the image for every node.

Shapes: C H W maps, A answers.
"""

import torch
from torch import Tensor

from iep.execution_engine.trace import Trace


def look_maps(trace: Trace, look: str) -> list[Tensor]:
    """(H, W) numbers from 0 up for every node of the tree, in its order.

    Args:
        trace: made with autograd on, for `gradient`.
        look: `norm`, the norm over the channels of what a module put out, which for an attention is the attention
            itself (Mascharka et al. 2018, Transparency by Design, figure 1); or `gradient`, that of the gradient of
            the likeliest answer's score (its logit) by it (Johnson et al. 2017, section 4.2 and figure 3, which take
            all answers' sum and the last map alone), and 0 for what no module put out, or has no part in the score.
    """
    values = trace.outputs
    if look == "gradient":
        learnt = {
            id(output): output for output in trace.outputs if output.requires_grad
        }  # each once; not a scene of ones
        found = torch.autograd.grad(trace.logits.max(), [*learnt.values()], allow_unused=True) if learnt else ()
        by_output = dict(zip(learnt, found, strict=True))
        gradients = [by_output.get(id(output)) for output in values]
        values = [
            torch.zeros_like(output) if gradient is None else gradient
            for output, gradient in zip(values, gradients, strict=True)
        ]
    return [value[0].detach().float().norm(dim=0).cpu() for value in values]


def to_unit(map_HW: Tensor, is_attention: bool) -> Tensor:
    """A map scaled to 0 to 1: an attention as it is, another from its least value to its greatest; 0 where all are
    the same."""
    if is_attention:
        return map_HW.clamp(0, 1)
    low, high = map_HW.aminmax()
    return (map_HW - low) / (high - low) if high > low else torch.zeros_like(map_HW)
