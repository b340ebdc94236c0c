"""What an engine of Transparency by Design's modules runs: the family `tbd`.

Programs -> a graph whose values are of two kinds, encodings and attentions (Mascharka et al. 2018, section 3); and the
same by plain recursion, for one example. The modules are `tbd_modules.py`'s.

`scene` is an attention of ones; `unique`, and special tokens inside a tree, hand on what they are given. Any program
runs: wherever a value of the other kind is found than is wanted, `scene` stands in its place: an attention of ones, or,
as an encoding, the features. What it would have been made of does not run.

Shapes: B programs, L tokens, V vocabulary, S stems, N nodes, C H W feature maps.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from iep.batching.graph import Graph, graph_from_prefix
from iep.batching.plan import Read, Signature, Types
from iep.execution_engine.family import ATTENTION, MAP, Family, scene_token
from iep.execution_engine.tbd_modules import role_of
from iep.programs import SCENE, arities, arity
from iep.vocab import NULL, START

NONE = -1
"""In the place of a column, or of a slot."""


class _Roles(NamedTuple):
    """Of every token of a vocabulary."""

    makes: np.ndarray
    """(V,) column of its result; NONE for what has no module."""
    wants: np.ndarray
    """(V, 2) column of each of its function's arguments; NONE after the last."""
    looks: np.ndarray
    """(V,) bool: its module takes the features first."""
    is_penalized: np.ndarray
    """(V,) bool"""


def make_module(token: str, dim: int, residual: bool, norm: str) -> nn.Module:
    """The module of a program token.

    Raises:
        ValueError: there is none, or something is asked for that only the family `iep` has.
    """
    if not residual or norm != "none":
        raise ValueError("module_residual and module_norm are settings of the modules iep; those of tbd have neither")
    return role_of(token).make(dim)


def modules_run(program_tokens: Sequence[str], scene: str) -> dict[int, str]:
    """Op -> token of every token that has a module.

    Raises:
        ValueError: `scene` is a setting that only the family `iep` has, or no token; no module is made for a token.
    """
    _check_scene(scene)
    scene_token(program_tokens)
    return {op: token for op, token in enumerate(program_tokens) if role_of(token) is not None}


def program_graph(
    programs_BL: np.ndarray | Tensor, program_tokens: Sequence[str], scene: str, input_B: np.ndarray | None
) -> Graph:
    """The graph of programs. Its inputs are a stem for each, and one more, the attention of ones, last."""
    _check_scene(scene)
    leaf = scene_token(program_tokens)
    plain = graph_from_prefix(
        programs_BL, arities(program_tokens), leaf, skip=START, pad=NULL, leaf_is_input=True, input_B=input_B
    )
    stem_B = np.arange(len(plain.roots)) if input_B is None else input_B
    return _typed(plain, _roles(tuple(program_tokens)), stem_B)


@lru_cache(maxsize=16)
def _roles(program_tokens: tuple[str, ...]) -> _Roles:
    roles = [role_of(token) for token in program_tokens]
    wants = [() if role is None else role.takes[role.looks :] for role in roles]
    return _Roles(
        makes=np.array([NONE if role is None else role.makes for role in roles]),
        wants=np.array([[*columns, *[NONE] * (2 - len(columns))] for columns in wants]),
        looks=np.array([role is not None and role.looks for role in roles]),
        is_penalized=np.array([role is not None and role.is_penalized for role in roles]),
    )


def _typed(plain: Graph, roles: _Roles, stem_B: np.ndarray) -> Graph:
    """A graph of functions, whose inputs are `scene`, as one of modules."""
    stems, count = plain.num_inputs, plain.num_nodes
    ones = stems + count  # its slot until they are numbered anew
    makes_N, wants_N2, stem_N = roles.makes[plain.op], roles.wants[plain.op], stem_B[plain.example]
    # What each slot stands for where what has no module is left out; the last entry is that of NONE.
    stands = np.append(np.arange(stems + count), NONE)
    idle = np.flatnonzero(makes_N == NONE)
    stands[stems + idle] = plain.args[idle, 0]
    while not np.array_equal(further := stands[stands], stands):
        stands = further
    found = np.concatenate([np.full(stems, NONE), makes_N, [NONE]])

    args_N2 = np.full((count, 2), NONE)
    args_N2[:, : plain.args.shape[1]] = stands[plain.args]
    scene_N2 = np.where(wants_N2 == ATTENTION, ones, stem_N[:, None])
    args_N2 = np.where(found[args_N2] == wants_N2, args_N2, scene_N2)
    looks_N = roles.looks[plain.op]
    args_N2[looks_N] = np.stack([stem_N[looks_N], args_N2[looks_N, 0]], axis=1)
    roots_B = stands[plain.roots]
    roots_B = np.where(found[roots_B] == MAP, roots_B, stem_B)

    kept = np.flatnonzero(_leads_to(roots_B - stems, args_N2 - stems, count))
    slot = np.append(np.arange(stems + count), stems)
    slot[stems + kept] = stems + 1 + np.arange(len(kept))
    return Graph(stems + 1, plain.op[kept], slot[args_N2[kept]], plain.example[kept], slot[roots_B])


def _leads_to(roots: np.ndarray, args: np.ndarray, count: int) -> np.ndarray:
    """(N,) bool: the nodes that `roots` depend on, and they; what is below 0, or `count`, is no node."""
    leads = np.zeros(count, dtype=bool)
    new = roots
    while len(new):
        new = np.unique(new[(new >= 0) & (new < count)])
        new = new[~leads[new]]
        leads[new] = True
        new = args[new].ravel()
    return leads


def types_of(graph: Graph, program_tokens: Sequence[str], num_programs: int) -> Types:
    """The columns of a graph's values."""
    makes = _roles(tuple(program_tokens)).makes
    results, attentions = graph.roots[:num_programs], graph.roots[num_programs:]
    return Types(
        inputs=np.array([*[MAP] * (graph.num_inputs - 1), ATTENTION]),
        signatures={op: Signature((Read(0), Read(1)), (int(makes[op]),)) for op in np.unique(graph.op).tolist()},
        roots=((results, 0), (attentions, 0)) if len(attentions) else ((results, 0),),
    )


def inputs_of(stems_NCHW: Tensor) -> dict[int, Tensor]:
    """By column: the stems; the attention of ones."""
    return {MAP: stems_NCHW, ATTENTION: ones_like(stems_NCHW[:1])}


def ones_like(stem_1CHW: Tensor) -> Tensor:
    """(1, 1, H, W) the attention to all of an image."""
    return stem_1CHW.new_ones(1, 1, *stem_1CHW.shape[2:])


def penalized(graph: Graph, program_tokens: Sequence[str]) -> np.ndarray:
    """Slots of the attentions that networks make: not those of ones, nor what is the lesser or greater of others."""
    return graph.num_inputs + np.flatnonzero(_roles(tuple(program_tokens)).is_penalized[graph.op])


def _check_scene(scene: str) -> None:
    if scene != "module":
        raise ValueError(f"scene is {scene!r}, a setting of the modules iep; that of tbd is an attention of ones")


class Seen(NamedTuple):
    """A value, and what made it."""

    column: int
    tensor: Tensor
    """(1, C, H, W) or (1, 1, H, W)"""
    attentions: tuple[Tensor, ...]
    """Those that a penalty counts."""


class OneProgram:
    """The slow twin of `program_graph`: one program about one image, one module at a time, by recursion."""

    def __init__(self, program_tokens: Sequence[str], modules: Mapping[int, Callable[..., Tensor]], stem_1CHW: Tensor):
        """`modules` by op."""
        self._tokens, self._modules, self._stem = program_tokens, modules, stem_1CHW

    def run(self, program_L: Sequence[int]) -> Seen:
        """The program's encoding."""
        return self._as(MAP, self._value(token for token in program_L if token != START))

    def _value(self, tokens: Iterator[int]) -> Seen | None:
        """That of the tree which begins with the next token; None for `scene`, which is of either kind."""
        token = next(tokens, NULL)
        name = self._tokens[token]
        if token == NULL or name == SCENE:
            return None
        given = [self._value(tokens) for _ in range(arity(name))]
        role = role_of(name)
        if role is None:
            return given[0]
        wanted = role.takes[1:] if role.looks else role.takes
        taken = [self._as(column, value) for column, value in zip(wanted, given, strict=True)]
        features = [self._stem] if role.looks else []
        result = self._modules[token](*features, *(value.tensor for value in taken))
        own = (result,) if role.is_penalized else ()
        return Seen(role.makes, result, (*(each for value in taken for each in value.attentions), *own))

    def _as(self, column: int, value: Seen | None) -> Seen:
        """A value of the wanted kind; `scene`'s in the place of another."""
        if value is not None and value.column == column:
            return value
        return Seen(column, self._stem if column == MAP else ones_like(self._stem), ())


def run_one(
    program_L: Sequence[int],
    program_tokens: Sequence[str],
    scene: str,
    modules: Mapping[int, Callable[..., Tensor]],
    stem_1CHW: Tensor,
) -> Tensor:
    """(1, C, H, W): one program, one module at a time."""
    _check_scene(scene)
    return OneProgram(program_tokens, modules, stem_1CHW).run(program_L).tensor


def _takes(token: str) -> tuple[int, ...]:
    return role_of(token).takes


def _makes(token: str) -> int:
    return role_of(token).makes


def _kinds(token: str) -> tuple[tuple[int, ...], int] | None:
    role = role_of(token)
    return None if role is None else (role.takes[role.looks :], role.makes)


TBD = Family(
    make=make_module,
    runs=modules_run,
    graph=program_graph,
    reference=run_one,
    types=types_of,
    inputs=inputs_of,
    takes=_takes,
    makes=_makes,
    kinds=_kinds,
    scene=ones_like,
    attentions=penalized,
)
