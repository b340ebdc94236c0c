"""The states of LSTM cells and their gradients equal the equations."""

import itertools

import pytest
import torch
from batching_cases import quick
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from iep.workloads.lstm import by_columns, lstm_state


def by_equations(gates, bias, c_children):
    """Tai et al. 2015, equations 9 to 14."""
    i, o, *forget, u = (gates + bias).split(c_children.shape[2], dim=1)
    c = i.sigmoid() * u.tanh()
    for child, f in enumerate(forget):
        c = c + f.sigmoid() * c_children[:, child]
    return o.sigmoid() * c.tanh(), c


def results(function, gates, bias, c_children, uses):
    h, c = function(gates * 1, bias, c_children)  # a copy, since gates are overwritten
    weights = torch.linspace(-1, 1, h.numel(), dtype=h.dtype).view_as(h)
    total = sum((each * weights).sum() for each, used in zip((h, c), uses, strict=True) if used)
    return h, c, *torch.autograd.grad(total, [gates, bias, *([c_children] if c_children.shape[1] else [])])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@given(
    cells=st.sampled_from([0, 1, 5, 200]),
    children=st.integers(0, 4),
    width=st.integers(1, 40),
    uses=st.sampled_from([(1, 0), (0, 1), (1, 1)]),
    bias_of_each=st.booleans(),
)
@settings(quick, max_examples=40)
def test_states_and_gradients_are_those_of_the_equations(dtype, tolerance, cells, children, width, uses, bias_of_each):
    torch.manual_seed(0)
    gates = (3 * torch.randn(cells, (3 + children) * width, dtype=dtype)).requires_grad_()
    c_children = torch.randn(cells, children, width, dtype=dtype, requires_grad=True)
    bias = torch.randn(gates.shape if bias_of_each else gates.shape[1:], dtype=dtype, requires_grad=True)
    found = results(lstm_state, gates, bias, c_children, uses)
    for actual, expected in zip(found, results(by_equations, gates, bias, c_children, uses), strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        assert torch.equal(lstm_state(gates * 1, bias, c_children if children else None)[0], found[0])


@pytest.mark.parametrize("size", [100.0, 1e30])
@pytest.mark.parametrize("width", [1, 400])
def test_large_gates_saturate_and_nan_stays_in_its_cell(size, width):
    signs = torch.tensor(list(itertools.product([-size, size], repeat=4)))  # of i, o, f, u
    gates = signs.repeat_interleave(width, dim=1)
    gates[3] = float("nan")
    gates.requires_grad_()
    h, c = lstm_state(gates * 1, None, torch.ones(16, 1, width))
    (gradient,) = torch.autograd.grad(h.sum() + c.sum(), gates)
    kept = torch.arange(16) != 3
    i, o, f, u = (signs[kept] > 0).float().T
    torch.testing.assert_close(c[kept], (i * (2 * u - 1) + f)[:, None].expand(-1, width))
    torch.testing.assert_close(h[kept], o[:, None] * c[kept].tanh())
    assert gradient[kept].abs().max() < 1e-6
    assert h[3].isnan().all()


@pytest.mark.parametrize(("gates", "children"), [((4, 8), (4, 2, 2)), ((4, 8), (3, 1, 2)), ((4, 8), None)])
def test_shapes_that_do_not_fit_are_an_error(gates, children):
    with pytest.raises(ValueError, match=r"expected \(G, \(3 \+ A\) H\) and \(G, A, H\)"):
        lstm_state(torch.zeros(gates), None, children and torch.zeros(children))


def test_low_precision_and_tensors_without_memory_are_supported():
    low, _ = lstm_state(torch.full((2, 3), 0.01).bfloat16(), None, torch.ones(2, 0, 1))
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), lstm_state(torch.full((2, 3), 0.01), None)[0], rtol=0.02, atol=0)
    with FakeTensorMode():
        assert lstm_state(torch.zeros(2, 3), torch.zeros(3))[0].shape == (2, 1)


def test_a_weight_stored_by_columns_has_the_same_numbers():
    weight = torch.nn.Parameter(torch.randn(3, 5))
    assert torch.equal(by_columns(weight), weight)
    assert by_columns(weight).stride() == (1, 3)
