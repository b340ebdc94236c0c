"""Roles of functions: the kinds of values, such as maps and attentions, that each reads and returns.

A set of modules defines a role for every token. The roles determine the graph of a minibatch's module calls, the
traversal of one program (`trace.py`), and which functions of a program are not used because their values are of the
wrong kind.

If every value is a map, the graph is that of the programs' trees. Otherwise it has no nodes for functions without a
module, modules that read the stem get it as their first argument, and `scene` replaces every value of the wrong kind,
so that the nodes that would compute it do not run.

Shapes: B programs, L program tokens, V vocabulary, S stems, K kinds, N nodes, A arguments of a module; G rows of a
call, N images, C H W feature maps in the protocol of a set of modules.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor, nn

from iep.batching.graph import Graph
from iep.batching.plan import Read, Signature, Types
from iep.programs import NOT_USED, SCENE, ProgramTree, arities, program_graph, program_tree, scene_index, without
from iep.vocab import NULL, START

MAP, ATTENTION, VECTOR = 0, 1, 2
"""The kinds of values, which are the columns of a plan: (C, H, W), such as the stem's output; (1, H, W); (C, 1, 1)."""
KINDS = {MAP: "an encoding", ATTENTION: "an attention"}
"""The names of kinds in messages. A set may define `kinds` of its own; a kind without a name is shown by its number."""
NONE = -1
"""The mark for no kind or no slot."""


class Role(NamedTuple):
    """The kinds of values that the module of a function reads and returns."""

    arguments: tuple[int, ...]
    """The kind of each argument of the function."""
    result: int
    reads_stem: bool = False
    """The first argument of the module is the stem's output, which the function's arguments follow."""
    is_penalized: bool = False
    """The result is one of the attentions that `attention_penalty` counts."""

    @property
    def reads(self) -> tuple[int, ...]:
        """The kind of each argument of the module."""
        return (MAP,) * self.reads_stem + self.arguments

    @property
    def signature(self) -> Signature:
        """The columns that a call reads and writes."""
        return Signature(tuple(map(Read, range(len(self.reads)))), (self.result,))


Roles = tuple[Role | None, ...]
"""The role of every token of a vocabulary."""


class ModuleSet(Protocol):
    """A set of modules, which defines the module and the role of every function of an engine.

    It is created from the engine's settings of its modules, `dim`, `residual`, `norm` and `scene`, and from
    `module_settings`, and raises ValueError for settings that it does not support.
    """

    def role(self, token: str) -> Role | None:
        """Return the role of a program token.

        A function without a module has the role None. Its value is that of its first argument. A `scene` without a
        module represents the whole image, as a value of the kind that its reader expects.

        Raises:
            ValueError: the set does not support the function.
        """

    def make(self, token: str) -> nn.Module:
        """Return a new module for a token that has a role.

        The module maps (G, ...) arguments of the kinds in its role to a (G, ...) result. Row g of each belongs to the
        same node. If it has a method `adjust_initial_weights`, the engine calls it after its own `initialization`.
        """

    def scene_values(self, stems_NCHW: Tensor) -> dict[int, Tensor]:
        """Return the value of `scene` in each kind that occurs, in the order of the kinds.

        As a map, `scene` is the stem's output, (N, C, H, W). In every other kind it is one value, (1, ...), for all
        images. `scene` also replaces values of the wrong kind.
        """


def roles_of(program_tokens: Sequence[str], modules: ModuleSet) -> Roles:
    """Return the role of every token in a set of modules; `<NULL>` and `<START>` never run and have none.

    Raises:
        ValueError: the vocabulary has no `scene`, or the set has no module for a token, or one with another number of
            arguments.
    """
    scene_index(program_tokens)
    roles = tuple(None if op in (NULL, START) else modules.role(token) for op, token in enumerate(program_tokens))
    for token, role, arity in zip(program_tokens, roles, arities(program_tokens).tolist(), strict=True):
        if role is not None and len(role.arguments) != arity:
            raise ValueError(f"the role of {token!r} has {len(role.arguments)} arguments, expected {arity}, its arity")
    return roles


def num_kinds(roles: Roles) -> int:
    """Return the number of kinds up to the greatest that a function reads or returns, at least 1."""
    return 1 + max((kind for role in roles if role is not None for kind in (role.result, *role.arguments)), default=MAP)


def result_kind(scene: Role | None) -> int:
    """Return the kind of value that the classifier reads: the result of `scene`, or `MAP` if `scene` has no module."""
    return MAP if scene is None else scene.result


def tree_run(tokens: Sequence[str], modules: ModuleSet) -> ProgramTree:
    """Return the tree of prefix tokens, in which the nodes that a set of modules does not use are marked with why."""
    tree, words = program_tree(tokens), getattr(modules, "kinds", KINDS)
    kinds: list[int | None] = [None] * len(tree.nodes)  # None: any kind
    reasons: dict[int, str] = {}

    def check(number: int, expected: int) -> None:
        if (kind := kinds[number]) not in (None, expected):
            found, wanted = (words.get(each, f"a value of kind {each}") for each in (kind, expected))
            reasons[number] = f"{NOT_USED}: {found}, not {wanted}"

    for number in tree.post_order:
        node, role = tree.nodes[number], modules.role(tree.nodes[number].token)
        if role is None:
            kinds[number] = kinds[node.arguments[0]] if node.arguments else None
            continue
        for argument, expected in zip(node.arguments, role.arguments, strict=True):
            check(argument, expected)
        kinds[number] = None if node.token == SCENE else role.result  # `scene` is of the kind that its reader expects
    check(0, result_kind(modules.role(SCENE)))
    return without(tree, reasons)


def module_graph(
    programs_BL: np.ndarray | Tensor, program_tokens: Sequence[str], roles: Roles, stem_B: np.ndarray | None = None
) -> Graph:
    """Return the graph of programs. Its inputs are the stems, then the value of `scene` in each kind except maps.

    Args:
        stem_B: the slot of each program's stem, counted from 0 without gaps; None if program b has stem b.
    """
    scene, kinds = scene_index(program_tokens), num_kinds(roles)
    plain = program_graph(programs_BL, program_tokens, roles[scene] is None, stem_B)
    functions = [role for op, role in enumerate(roles) if op not in (NULL, START, scene)]
    if kinds == 1 and all(role is not None and not role.reads_stem for role in functions):
        return plain
    stem_B = np.arange(len(plain.roots)) if stem_B is None else stem_B
    stems, count = plain.num_inputs, plain.num_nodes
    others = stems + count + np.arange(kinds - 1)  # slots of `scene` in other kinds, before renumbering
    wanted = [() if role is None else role.arguments for role in roles]
    width = max(plain.args.shape[1], *map(len, wanted))
    wanted_VA = np.array([[*each, *[NONE] * (width - len(each))] for each in wanted])
    result_V = np.array([NONE if role is None else role.result for role in roles])
    reads_stem_V = np.array([role is not None and role.reads_stem for role in roles])
    result_N, wanted_NA, stem_N1 = result_V[plain.op], wanted_VA[plain.op], stem_B[plain.example][:, None]

    # The slot whose value each slot has: a function without a module has the value of its argument.
    stands = np.append(np.arange(stems + count), NONE)
    idle = np.flatnonzero(result_N == NONE)
    stands[stems + idle] = plain.args[idle, 0]
    while not np.array_equal(further := stands[stands], stands):
        stands = further
    found = np.concatenate([np.full(stems, NONE), result_N, [NONE]])  # the kind of each slot's value; `scene` has none

    args_NA = np.full(wanted_NA.shape, NONE)
    args_NA[:, : plain.args.shape[1]] = stands[plain.args]
    scene_NA = np.where(wanted_NA == MAP, stem_N1, np.append(NONE, others)[np.maximum(wanted_NA, MAP)])
    args_NA = np.where((wanted_NA != NONE) & (found[args_NA] != wanted_NA), scene_NA, args_NA)
    args_NA = np.where(wanted_NA == NONE, NONE, args_NA)
    behind_NA, alone_NA = np.hstack([stem_N1, args_NA]), np.hstack([args_NA, np.full((count, 1), NONE)])
    args_NA = np.where(reads_stem_V[plain.op][:, None], behind_NA, alone_NA)
    roots_B, kind = stands[plain.roots], result_kind(roles[scene])
    roots_B = np.where(found[roots_B] == kind, roots_B, stem_B if kind == MAP else others[kind - 1])

    kept = np.flatnonzero(_is_needed(roots_B - stems, args_NA - stems, count))
    slot = np.append(np.arange(stems + count + kinds - 1), NONE)
    slot[others] = stems + np.arange(kinds - 1)
    slot[stems + kept] = stems + kinds - 1 + np.arange(len(kept))
    args_NA = slot[args_NA[kept]]
    args_NA = args_NA[:, : max(1, (args_NA >= 0).sum(axis=1).max(initial=1))]
    return Graph(stems + kinds - 1, plain.op[kept], args_NA, plain.example[kept], slot[roots_B])


def _is_needed(roots: np.ndarray, args: np.ndarray, count: int) -> np.ndarray:
    """Return which of `count` nodes are `roots` or inputs of them, (N,) bool. Other numbers than nodes' are ignored."""
    needed = np.zeros(count, dtype=bool)
    new = roots
    while len(new):
        new = np.unique(new[(new >= 0) & (new < count)])
        new = new[~needed[new]]
        needed[new] = True
        new = args[new].ravel()
    return needed


def penalized(graph: Graph, roles: Roles) -> np.ndarray:
    """Return the slots of the attentions that a penalty counts."""
    is_penalized_V = np.array([role is not None and role.is_penalized for role in roles])
    return graph.num_inputs + np.flatnonzero(is_penalized_V[graph.op])


def types_of(graph: Graph, roles: Roles, num_programs: int) -> Types:
    """Return the kinds of the values of a graph. Its roots are the programs' results, then any attentions."""
    others = np.arange(1, num_kinds(roles))
    results, attentions = graph.roots[:num_programs], graph.roots[num_programs:]
    return Types(
        inputs=np.concatenate([np.full(graph.num_inputs - len(others), MAP), others]),
        signatures={op: role.signature for op in graph.kinds[0].tolist() if (role := roles[op]) is not None},
        roots=((results, 0), (attentions, 0)) if len(attentions) else ((results, 0),),
    )


def whole_graph(graph: Graph, types: Types, roles: Roles) -> tuple[Graph, Types]:
    """Return a graph in which the stem and the classifier are ops as well, and the kinds of its values.

    With V roles, the stem is op V and the classifier op V + 1. The inputs are the images' features instead of the
    stems, and the first roots are the scores of the answers instead of the programs' results. With K kinds, features
    are column K and scores column K + 1.

    Args:
        graph: the graph of programs.
        types: the kinds of its values, as `types_of` returns them.
    """
    kinds, inputs, nodes = num_kinds(roles), graph.num_inputs, graph.num_nodes
    (results, _), *attentions = types.roots
    stems, programs = inputs - (kinds - 1), len(results)
    first = inputs + stems  # the slot of the first function
    slot = np.concatenate([inputs + np.arange(stems), np.arange(stems, inputs), first + np.arange(nodes), [NONE]])
    args = np.full((stems + nodes + programs, graph.args.shape[1]), NONE)
    args[:stems, 0], args[stems : stems + nodes] = np.arange(stems), slot[graph.args]
    args[stems + nodes :, 0] = slot[results]
    stem, classifier = len(roles), len(roles) + 1
    roots = ((first + nodes + np.arange(programs), 0), *((slot[slots], field) for slots, field in attentions))
    whole = Graph(
        inputs,
        np.concatenate([np.full(stems, stem), graph.op, np.full(programs, classifier)]),
        args,
        np.concatenate([np.zeros(stems, dtype=np.int64), graph.example, np.arange(programs)]),
        np.concatenate([slots for slots, _ in roots]),
    )
    ends = {stem: Signature((Read(0),), (MAP,)), classifier: Signature((Read(0),), (kinds + 1,))}
    return whole, Types(np.where(types.inputs == MAP, kinds, types.inputs), {**types.signatures, **ends}, roots)
