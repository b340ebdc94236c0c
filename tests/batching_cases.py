"""Random prefix programs over a small vocabulary, their graphs, and the comparison of two runs of the same networks.

Token matrices are drawn by Hypothesis, deterministically. Any sequence of tokens is a program, so drawing sequences
draws trees: without leaves among the tokens they are large, with them small and often followed by ignored tokens.
"""

from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import settings
from torch import nn

from iep.batching.graph import Graph, graph_from_prefix
from iep.kernels.layers import Linear

PAD, SKIP, UNARY_END, UNARY_UNK, LEAF, OTHER_LEAF, UNARY_A, UNARY_B, BINARY_A, BINARY_B, TERNARY = range(11)
ARITY_V = np.array([1, 1, 1, 1, 0, 0, 1, 1, 2, 2, 3])
"""Special tokens count as unary, as in a program vocabulary; PAD and SKIP never run where they are named as such."""

MEANING = {"leaf": LEAF, "skip": SKIP, "pad": PAD}
"""The tokens that `graph_from_prefix` treats apart."""

quick = settings(deadline=None, derandomize=True, database=None)


def matrix(rows: Sequence[Sequence[int]], pad: int = PAD) -> np.ndarray:
    """Return rows of tokens as a matrix, padded on the right."""
    width = max((len(row) for row in rows), default=0)
    return np.array([[*row, *[pad] * (width - len(row))] for row in rows], dtype=np.int64).reshape(len(rows), width)


def tree_graph(rows: Sequence[Sequence[int]] | np.ndarray, leaf_is_input: bool = False, input_B=None) -> Graph:
    """Return the graph of toy programs; `input_B` says which input each reads."""
    tokens_BL = rows if isinstance(rows, np.ndarray) else matrix(rows)
    return graph_from_prefix(tokens_BL, ARITY_V, **MEANING, leaf_is_input=leaf_is_input, input_B=input_B)


def token_matrices(
    vocabulary: int,
    inner: Sequence[int],
    unary: Sequence[int],
    binary: Sequence[int],
    max_batch: int = 16,
    wide: int = 18,
) -> st.SearchStrategy[np.ndarray]:
    """Draw matrices of 1 to `max_batch` programs: any tokens, large trees, deep chains and lone leaves, side by side.

    The tokens `inner` are those with arguments and the skipped one.
    """
    anything = st.lists(st.integers(0, vocabulary - 1), max_size=2 * wide)
    large_tree = st.lists(st.sampled_from(inner), max_size=wide)
    chain = st.lists(st.sampled_from(unary), min_size=wide, max_size=2 * wide)
    bushy = st.lists(st.sampled_from(binary), min_size=2, max_size=wide)
    lone_leaf = st.just([])
    row = st.one_of(anything, large_tree, chain, bushy, lone_leaf)
    return st.lists(row, min_size=1, max_size=max_batch).map(matrix)


toy_programs = token_matrices(
    len(ARITY_V),
    max_batch=64,
    wide=30,
    inner=[SKIP, UNARY_END, UNARY_A, UNARY_B, BINARY_A, BINARY_B, TERNARY],
    unary=[UNARY_A, UNARY_B],
    binary=[BINARY_A, BINARY_B, UNARY_A],
)


class ToyModule(nn.Module):
    """tanh of a sum of linear maps, one for each argument: smooth, bounded, and no two arguments interchange."""

    def __init__(self, arity: int, dim: int):
        super().__init__()
        self.maps = nn.ModuleList(Linear(dim, dim, bias=place == 0) for place in range(max(1, arity)))
        self.scale = nn.Parameter(torch.rand(dim) + 0.5)

    def forward(self, *args_GD: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.scale * sum(linear(x_GD) for x_GD, linear in zip(args_GD, self.maps, strict=True)))


def toy_modules(dim: int = 3, dtype: torch.dtype = torch.float64) -> nn.ModuleList:
    """One seeded module per toy token."""
    torch.manual_seed(0)
    return nn.ModuleList(ToyModule(arity, dim) for arity in ARITY_V.tolist()).to(dtype)


def results(
    run: Callable[[torch.Tensor], torch.Tensor], network: nn.Module, inputs: torch.Tensor
) -> dict[str, torch.Tensor | None]:
    """Return the output of `run(inputs)`, and the gradients of the inputs and of every parameter."""
    inputs = inputs.clone().requires_grad_()
    return with_gradients({"output": run(inputs)}, {"the inputs": inputs, **dict(network.named_parameters())})


def with_gradients(outputs: dict[str, torch.Tensor], leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """Return the outputs, and the gradients of an uneven sum of them for every one of `leaves`."""
    for leaf in leaves.values():
        leaf.grad = None
    learnt = [output for output in outputs.values() if output.requires_grad]
    if learnt:
        uneven = [torch.linspace(0.5, 1.5, each.numel(), device=each.device).to(each.dtype) for each in learnt]
        sums = [(each.flatten() * weights).sum() for each, weights in zip(learnt, uneven, strict=True)]
        sum(n * each for n, each in enumerate(sums, 1)).backward()
    gradients = {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}
    return {name: output.detach() for name, output in outputs.items()} | {
        name: grad.to_dense() if grad is not None and grad.is_sparse else grad for name, grad in gradients.items()
    }


def assert_same(
    actual: dict, expected: dict, relative: float, none_is_zero: bool = False, rounding: float = 0.0
) -> None:
    """Assert that every result is within `relative` of the expected one's greatest element, or None like it.

    In float32, a gradient whose terms nearly cancel may differ by `rounding` besides. With
    `none_is_zero`, a gradient of zeros equals None: a path that leads to no output may have either.
    """
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        found = actual[name]
        if none_is_zero:
            found, value = (None if each is None or not each.any() else each for each in (found, value))
        if value is None:
            assert found is None, f"{name} is {found}, expected None"
        else:
            assert found is not None, f"{name} is None"
            assert found.shape == value.shape, f"{name} has shape {found.shape}, expected {value.shape}"
            error, scale = (found - value).abs().max().item(), value.abs().max().item()
            assert error <= relative * scale + rounding, f"{name} differs by {error}, its greatest element is {scale}"


class Twice(torch.autograd.Function):
    """Its backward pass is not the derivative of its forward pass."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3
