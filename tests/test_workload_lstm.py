"""The LSTM cell's state and its gradients, by C and by PyTorch, against the equations."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from batching_cases import quick
from hypothesis import given, settings
from hypothesis import strategies as st

from iep.workloads import lstm, native


@contextmanager
def only(kernel):
    """The C kernel alone, or PyTorch alone."""
    with pytest.MonkeyPatch.context() as patch:
        if kernel == "PyTorch":
            patch.setattr(lstm, "_kernel", lambda *_: None)
        else:
            patch.setattr(lstm, "state_in_torch", None)
            patch.setattr(lstm, "state_back_in_torch", None)
        yield


KERNELS = [
    pytest.param("C", marks=pytest.mark.skipif(native.library("lstm") is None, reason="there is no C compiler")),
    "PyTorch",
]


def by_equations(gates, c_children, bias=0):
    """Tai et al. 2015, equations 9 to 14."""
    i, o, *forget, u = (gates + bias).split(c_children.shape[2], dim=1)
    c = i.sigmoid() * u.tanh()
    for place, f in enumerate(forget):
        c = c + f.sigmoid() * c_children[:, place]
    return o.sigmoid() * c.tanh(), c


class LSTMState(torch.autograd.Function):
    """`lstm_state` with `lstm_gradients` for its way back."""

    @staticmethod
    def forward(ctx, gates, c_children, bias):
        h, c = lstm.lstm_state(gates, c_children, bias)
        ctx.save_for_backward(gates, c_children, bias, c)
        ctx.set_materialize_grads(False)
        return h, c

    @staticmethod
    def backward(ctx, dh, dc):
        d_gates, d_children = lstm.lstm_gradients(*ctx.saved_tensors, dh, dc)
        return d_gates, d_children, d_gates if ctx.saved_tensors[2].dim() == 2 else d_gates.sum(0)


def results(function, gates, c_children, bias, uses):
    h, c = function(gates, c_children, bias)
    weights = torch.linspace(-1, 1, h.numel(), dtype=h.dtype).view_as(h)
    total = sum((each * weights).sum() for each, used in zip((h, c), uses, strict=True) if used)
    return h, c, *torch.autograd.grad(total, [gates, bias, c_children] if c_children.shape[1] else [gates, bias])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@given(
    cells=st.integers(0, 5),
    children=st.integers(0, 4),
    width=st.integers(1, 40),
    uses=st.sampled_from([(1, 0), (0, 1), (1, 1)]),
    bias_of_each=st.booleans(),
)
@settings(quick, max_examples=40)
def test_states_and_gradients_are_those_of_the_equations(
    kernel, dtype, tolerance, cells, children, width, uses, bias_of_each
):
    torch.manual_seed(0)
    gates = (3 * torch.randn(cells, (3 + children) * width, dtype=dtype)).requires_grad_()
    c_children = torch.randn(cells, children, width, dtype=dtype, requires_grad=True)
    bias = torch.randn(gates.shape if bias_of_each else gates.shape[1:], dtype=dtype, requires_grad=True)
    with only(kernel):
        actual = results(LSTMState.apply, gates, c_children, bias, uses)
    for ours, theirs in zip(actual, results(by_equations, gates, c_children, bias, uses), strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gates_without_bounds_saturate_and_what_is_not_a_number_stays_so(kernel):
    gates = torch.tensor(
        [[-1e30, 1e30, 1e30], [200.0, -200.0, 200.0], [float("nan"), 1.0, 1.0], [1.0, 1.0, float("nan")]]
    )
    with only(kernel):
        h, c = lstm.lstm_state(gates, gates.new_empty(4, 0, 1), gates.new_zeros(3))
    assert c[:2].flatten().tolist() == [0, 1]
    assert h[:2].flatten().tolist() == [0, 0]
    assert c[2:].isnan().all()
    assert h[2:].isnan().all()


def test_gradients_need_not_lie_in_one_piece():
    torch.manual_seed(0)
    gates, children, bias = torch.randn(4, 20, requires_grad=True), torch.randn(4, 2, 4), torch.randn(20)
    upstream = torch.randn(4, 8)[:, ::2]
    h, _ = LSTMState.apply(gates, children, bias)
    (ours,) = torch.autograd.grad(h, gates, upstream)
    (theirs,) = torch.autograd.grad(by_equations(gates, children, bias)[0], gates, upstream)
    torch.testing.assert_close(ours, theirs)


def test_many_rows_are_shared_among_threads():
    gates, children = torch.randn(2000, 5 * 64), torch.randn(2000, 2, 64)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        many = lstm.lstm_state(gates, children, torch.zeros(5 * 64))
        torch.set_num_threads(1)
        one = lstm.lstm_state(gates, children, torch.zeros(5 * 64))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(many, one, strict=True))


@pytest.mark.parametrize(
    "environment", [{"IEP_NATIVE": "0"}, {"CC": "/nonexistent/cc", "XDG_CACHE_HOME": "/nonexistent"}]
)
def test_without_a_compiler_pytorch_does_it(environment):
    imports = "import torch; from iep.workloads import lstm, native"
    state = "lstm.lstm_state(torch.zeros(1, 6), torch.empty(1, 0, 2), torch.zeros(6))"
    code = f"{imports}; print(native.library('lstm'), {state}[0].tolist())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "None [[0.0, 0.0]]\n"


@pytest.mark.skipif(native.library("lstm") is None, reason="there is no C compiler")
def test_the_kernel_is_compiled_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    assert native.library("lstm") is not None
    (built,) = (tmp_path / "iep").iterdir()
    written = built.stat().st_mtime_ns
    native.library.cache_clear()
    assert native.library("lstm") is not None
    assert built.stat().st_mtime_ns == written
