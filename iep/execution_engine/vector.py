"""The modules of Vector-NMN: the set `vector`.

All functions share one residual block, which reads the stem's output. A function's embedding and the vectors of its
arguments modulate the block by FiLM (Perez et al. 2018, section 3.2), and the maximum over all positions is the
function's own vector (Bahdanau et al. 2019, CLOSURE: Assessing Systematic Generalization of CLEVR Models, where it
introduces Vector-NMN). As in FiLM, the block also reads the coordinates of each position. One call therefore runs any
functions of the same arity.

Shapes: F functions, G rows of a call, N images, C channels, H W grid of a map.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional

from iep.batching.plan import Functions
from iep.execution_engine.choices import check_fixed
from iep.execution_engine.roles import MAP, Role
from iep.kernels.layers import Conv2d, Linear
from iep.programs import arity

VECTOR = 1
"""The column of the vectors, (C, 1, 1). Columns are numbered from 0 without gaps. This set has no column of attentions,
so vectors are 1 here and 2 in other sets."""
MOST_ARGUMENTS = 2


class SharedBlock(nn.Module):
    """The residual block that all functions share.

    Args:
        dim: C.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.modulation = nn.Sequential(Linear((1 + MOST_ARGUMENTS) * dim, dim), nn.ReLU(), Linear(dim, 4 * dim))
        self.conv1 = Conv2d(dim + 2, dim, kernel_size=3, padding=1)
        self.conv2 = Conv2d(dim, dim, kernel_size=3, padding=1)
        self.pool = nn.AdaptiveMaxPool2d(1)

    def forward(self, features_GCHW: Tensor, embedding_GC: Tensor, *vectors_GC11: Tensor) -> Tensor:
        """Return the vectors of the functions with these embeddings, (G, C, 1, 1); missing arguments are zeros."""
        absent = [torch.zeros_like(embedding_GC)] * (MOST_ARGUMENTS - len(vectors_GC11))
        inputs = torch.cat([embedding_GC, *(each.flatten(1) for each in vectors_GC11), *absent], dim=1)
        modulation_GC11 = torch.tanh(self.modulation(inputs))[..., None, None].mul(2).chunk(4, dim=1)
        shift1, scale1, shift2, scale2 = modulation_GC11
        x_GCHW = torch.cat([(1 + scale1) * features_GCHW + shift1, coordinates(features_GCHW)], dim=1)
        x_GCHW = functional.relu(self.conv1(x_GCHW))
        return self.pool(functional.relu(self.conv2((1 + scale2) * x_GCHW + shift2) + features_GCHW))


def coordinates(maps_GCHW: Tensor) -> Tensor:
    """Return the coordinates of every position from -1 to 1, (G, 2, H, W), vertical and horizontal."""
    rows, height, width = len(maps_GCHW), *maps_GCHW.shape[2:]
    sides = (torch.linspace(-1, 1, side, device=maps_GCHW.device, dtype=maps_GCHW.dtype) for side in (height, width))
    return torch.stack(torch.meshgrid(*sides, indexing="ij")).expand(rows, 2, height, width)


class VectorModule(nn.Module):
    """A function: its embedding, with which it modulates the shared block.

    Args:
        shared: the block, which is not a part of the module; the engine has it once.
    """

    def __init__(self, shared: SharedBlock):
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(shared.conv2.in_channels))
        self._shared = (shared,)

    def forward(self, features_GCHW: Tensor, *vectors_GC11: Tensor) -> Tensor:
        """Run the shared block with this function's embedding in every row, (G, C, 1, 1)."""
        return self._shared[0](features_GCHW, self.embedding.expand(len(features_GCHW), -1), *vectors_GC11)

    @staticmethod
    def grouped(members: Sequence["VectorModule"]) -> Callable[..., Tensor]:
        """Return a callable that runs several functions at once, each row with the embedding of its function."""
        embedding_FC = torch.stack([each.embedding for each in members])
        (shared,) = members[0]._shared

        def run(functions: Functions, features_GCHW: Tensor, *vectors_GC11: Tensor) -> Tensor:
            return shared(features_GCHW, embedding_FC[functions.index], *vectors_GC11)

        return run


@dataclass(frozen=True)
class VectorModules:
    """The set `vector`, in which every function, `scene` too, returns a vector, which is what the classifier reads.

    Raises:
        ValueError: a setting has a value that only the set `iep` supports.
    """

    dim: int
    residual: bool
    norm: str
    scene: str

    def __post_init__(self) -> None:
        check_fixed("vector", self.residual, self.norm, self.scene)

    @cached_property
    def shared(self) -> SharedBlock:
        """The block of all functions that this set makes."""
        return SharedBlock(self.dim)

    def role(self, token: str) -> Role:
        """Return the role of a token, of which all arguments and the result are vectors."""
        return Role((VECTOR,) * arity(token), VECTOR, reads_stem=True)

    def make(self, token: str) -> nn.Module:
        """Return a new module, with a random embedding, for the function of a token."""
        return VectorModule(self.shared)

    def scene_values(self, stems_NCHW: Tensor) -> dict[int, Tensor]:
        """Return the stem's output; as a vector, `scene` is the result of its module, so that the zeros are unused."""
        return {MAP: stems_NCHW, VECTOR: stems_NCHW.new_zeros(1, self.dim, 1, 1)}
