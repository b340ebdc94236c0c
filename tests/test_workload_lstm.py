"""The LSTM cell's state and its gradients, by C and by PyTorch, against the equations."""

import itertools
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from batching_cases import quick
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from iep.batching import native
from iep.workloads import lstm_state as lstm


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [100.0, 1e4, 1e30])
@pytest.mark.parametrize("width", [1, 16, 33])
def test_gates_without_bounds_saturate(kernel, dtype, size, width):
    signs = torch.tensor(list(itertools.product([-size, size], repeat=4)), dtype=dtype)  # of i, o, f, u
    gates, children = signs.repeat_interleave(width, dim=1), torch.ones(16, 1, width, dtype=dtype)
    with only(kernel):
        h, c = lstm.lstm_state(gates, children, gates.new_zeros(4 * width))
        d_gates, d_children = lstm.lstm_gradients(gates, children, gates.new_zeros(4 * width), c, h + 1, c + 1)
    i, o, f, u = (signs > 0).to(dtype).T
    torch.testing.assert_close(c, (i * (2 * u - 1) + f)[:, None].expand_as(c))
    torch.testing.assert_close(h, o[:, None] * c.tanh())
    assert d_gates.isfinite().all()
    assert d_gates.abs().max() < 1e-6
    assert d_children.isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("width", [1, 16, 33])
def test_what_is_not_a_number_stays_so(kernel, width):
    gates = torch.ones(2, 3 * width)
    gates[0, 0] = gates[1, -1] = float("nan")
    with only(kernel):
        h, c = lstm.lstm_state(gates, gates.new_empty(2, 0, width), gates.new_zeros(3 * width))
    expected = torch.zeros(2, width, dtype=torch.bool)
    expected[0, 0] = expected[1, -1] = True
    assert torch.equal(c.isnan(), expected)
    assert torch.equal(h.isnan(), expected)


@pytest.mark.parametrize(
    ("gates", "children", "bias"),
    [((4, 8), (4, 2, 2), (8,)), ((4, 8), (3, 1, 2), (8,)), ((4, 8), (4, 1, 2), (6,)), ((4, 8), (4, 2), (8,))],
)
def test_shapes_that_do_not_fit_are_refused_before_memory_is_read(gates, children, bias):
    with pytest.raises(ValueError, match=r"expected \(G, \(3 \+ A\) H\), \(G, A, H\)"):
        lstm.lstm_state(torch.zeros(gates), torch.zeros(children), torch.zeros(bias))
    with pytest.raises(ValueError, match=r"c and the gradients of h and c are .*, expected \(4, 2\) each"):
        lstm.lstm_gradients(torch.zeros(4, 8), torch.zeros(4, 1, 2), torch.zeros(8), torch.zeros(4, 3), None, None)


def test_tensors_without_memory_are_left_to_pytorch():
    with FakeTensorMode():
        h, _ = lstm.lstm_state(torch.zeros(2, 3), torch.zeros(2, 0, 1), torch.zeros(3))
    assert h.shape == (2, 1)


def test_gradients_need_not_lie_in_one_piece():
    torch.manual_seed(0)
    gates, children, bias = torch.randn(4, 20, requires_grad=True), torch.randn(4, 2, 4), torch.randn(20)
    upstream = torch.randn(4, 8)[:, ::2]
    h, _ = LSTMState.apply(gates, children, bias)
    (ours,) = torch.autograd.grad(h, gates, upstream)
    (theirs,) = torch.autograd.grad(by_equations(gates, children, bias)[0], gates, upstream)
    torch.testing.assert_close(ours, theirs)


def test_many_rows_are_shared_among_threads(monkeypatch):
    gates, children, bias = torch.randn(2000, 5 * 64), torch.randn(2000, 2, 64), torch.zeros(5 * 64)
    threads, kernel = [], lstm.kernel("state", torch.float32)
    if kernel is None:
        pytest.skip("there is no C compiler")

    def noted(*arguments):
        threads.append(threading.get_ident())
        time.sleep(0.05)  # so that no thread has done before another begins
        kernel(*arguments)

    one = lstm.lstm_state(gates, children, bias)
    monkeypatch.setattr(lstm, "_kernel", lambda *_: noted)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    many = lstm.lstm_state(gates, children, bias)
    assert all(torch.equal(a, b) for a, b in zip(many, one, strict=True))
    assert len(threads) == len(set(threads)) == 3


@pytest.mark.parametrize(
    "environment", [{"IEP_NATIVE": "0"}, {"CC": "/nonexistent/cc", "XDG_CACHE_HOME": "/nonexistent"}]
)
def test_without_a_compiler_pytorch_does_it(environment):
    imports = "import torch; from iep.batching import native; from iep.workloads import lstm_state"
    state = "lstm_state.lstm_state(torch.zeros(1, 6), torch.empty(1, 0, 2), torch.zeros(6))"
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
