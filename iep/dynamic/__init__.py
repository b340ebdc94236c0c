"""Front ends that batch other dynamic networks: the lazy scope and vertex functions.

Private names of PyTorch that are used here, and why:

    torch._subclasses.fake_tensor        trial.py, kernels.py  what a call returns, without computing it
    torch._C._is_fwd_grad_enabled        future.py             tells the forward of an autograd.Function from no_grad
    torch._C._is_any_autocast_enabled    recording.py          asking for each kind of device takes 0.2 us a call more
    Tensor._version                      recording.py, ...     finds tensors that were changed in place
"""

from iep.dynamic.future import Future
from iep.dynamic.scope import scope

__all__ = ["Future", "scope"]
