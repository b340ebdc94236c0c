"""Random prefix programs over a small vocabulary, and the comparison of two ways to run the same networks.

Token matrices are drawn by Hypothesis, deterministically. Any sequence of tokens is a program, so drawing sequences
draws trees: without leaves among the tokens they are large, with them small and often followed by ignored tokens.
"""

from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import settings
from torch import nn

PAD, SKIP, UNARY_END, UNARY_UNK, LEAF, OTHER_LEAF, UNARY_A, UNARY_B, BINARY_A, BINARY_B, TERNARY = range(11)
ARITY_V = np.array([1, 1, 1, 1, 0, 0, 1, 1, 2, 2, 3])
"""Special tokens count as unary, as in a program vocabulary; PAD and SKIP never run where they are named as such."""

MEANING = {"leaf": LEAF, "skip": SKIP, "pad": PAD}
"""Which tokens `graph_from_prefix` treats apart."""

quick = settings(deadline=None, derandomize=True, database=None)


def matrix(rows: Sequence[Sequence[int]], pad: int = PAD) -> np.ndarray:
    """Rows of tokens as a matrix, padded on the right."""
    width = max((len(row) for row in rows), default=0)
    return np.array([[*row, *[pad] * (width - len(row))] for row in rows], dtype=np.int64).reshape(len(rows), width)


def token_matrices(
    vocabulary: int,
    inner: Sequence[int],
    unary: Sequence[int],
    binary: Sequence[int],
    max_batch: int = 16,
    wide: int = 18,
) -> st.SearchStrategy[np.ndarray]:
    """Matrices of 1 to `max_batch` programs: any tokens, large trees, deep chains and lone leaves, side by side.

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
        self.maps = nn.ModuleList(nn.Linear(dim, dim, bias=place == 0) for place in range(max(1, arity)))
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


def assert_same(actual: dict, expected: dict, relative: float, none_is_zero: bool = False) -> None:
    """Assert that every result is within `relative` of the expected one's greatest element, or None like it.

    With `none_is_zero`, a gradient of zeros equals None: a path that leads to no output may have either.
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
            assert error <= relative * scale, f"{name} differs by {error}, its greatest element is {scale}"


def in_bfloat16(engine, features_BCHW, programs_BL, defer):
    """The `results` of an engine's reference and of the engine, computed in bfloat16."""
    plan = engine.plan(programs_BL)
    with torch.autocast("cpu", torch.bfloat16):
        return (
            results(lambda x: engine.reference(x, programs_BL).float(), engine, features_BCHW),
            results(lambda x: engine(x, plan, defer).float(), engine, features_BCHW),
        )


def in_memory_formats(engine, features_NCHW, programs_BL, rows_B, defer):
    """The `results` of an engine's reference and of the engine, channels first and then last."""
    for memory_format in (torch.contiguous_format, torch.channels_last):
        engine.to(memory_format=memory_format)
        plan = engine.plan(programs_BL, rows_B)
        yield (
            results(lambda x: engine.reference(x[rows_B], programs_BL), engine, features_NCHW),
            results(lambda x, plan=plan: engine(x, plan, defer), engine, features_NCHW),
        )


FULL_SIZE = {"feature_dim": 1024, "feature_height": 14, "feature_width": 14}
"""Of the features of ResNet-101."""
PUBLISHED_LAYERS = {
    "stem.0": (128, 1024, 3, 3),
    "stem.2": (128, 128, 3, 3),
    "classifier.0": (512, 128, 1, 1),
    "classifier.4": (1024, 512 * 7 * 7),
    "classifier.6": (28, 1024),
}
"""Of the stem and the classifier of an engine as both papers have it (Johnson et al. 2017; Mascharka et al. 2018)."""


class Twice(torch.autograd.Function):
    """Its backward pass is not the derivative of its forward pass."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3
