"""Front ends that batch other dynamic networks: the lazy scope and vertex functions.

Private names of PyTorch that are used here, and why:

    torch._subclasses.fake_tensor    trial.py, kernels.py  shapes and dtypes of a call's results without computing them
    torch._C._is_fwd_grad_enabled    future.py             tells a `torch.autograd.Function`'s forward from `no_grad`
    Tensor._version                  recording.py, ...     finds tensors that were changed in place
    nn.modules.module._has_any_global_hook  direct.py      such a hook must see one sample
"""

from iep.dynamic.future import Future
from iep.dynamic.scope import scope

__all__ = ["Future", "scope"]
