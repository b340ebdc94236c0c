"""Programs of a minibatch and the roles of their functions -> the graph of the module calls, by array code.

If every value is a map, this is the graph of the programs' trees. Otherwise the graph has no nodes for functions
without a module, modules that read the stem get it as their first argument, and `scene` replaces every value of the
wrong kind, so that the nodes that would compute it do not run.

Shapes: B programs, L program tokens, V vocabulary, S stems, K kinds, N nodes, A arguments of a module.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from iep.batching.graph import Graph
from iep.batching.plan import Read, Signature, Types
from iep.execution_engine.roles import MAP, ModuleSet, Role, result_kind
from iep.programs import arities, program_graph, scene_index
from iep.vocab import NULL, START

Roles = tuple[Role | None, ...]
"""The role of every token of a vocabulary."""
NONE = -1
"""The mark for no kind or no slot."""


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


def is_of_maps(roles: Roles) -> bool:
    """Return whether every value is a map. A plan then needs no types."""
    return num_kinds(roles) == 1


def module_graph(
    programs_BL: np.ndarray | Tensor, program_tokens: Sequence[str], roles: Roles, stem_B: np.ndarray | None = None
) -> Graph:
    """Return the graph of programs. Its inputs are the stems, then the value of `scene` in each kind except maps.

    Args:
        stem_B: the slot of each program's stem, counted from 0 without gaps; None if program b has stem b.
    """
    scene = scene_index(program_tokens)
    plain = program_graph(programs_BL, program_tokens, roles[scene] is None, stem_B)
    functions = [role for op, role in enumerate(roles) if op not in (NULL, START, scene)]
    if is_of_maps(roles) and all(role is not None and not role.reads_stem for role in functions):
        return plain
    stem_B = np.arange(len(plain.roots)) if stem_B is None else stem_B
    stems, count, kinds = plain.num_inputs, plain.num_nodes, num_kinds(roles)
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


def types_of(graph: Graph, roles: Roles, num_programs: int) -> Types | None:
    """Return the kinds of the values of a graph. Its roots are the programs' results, then any attentions."""
    if is_of_maps(roles):
        return None
    others = np.arange(1, num_kinds(roles))
    results, attentions = graph.roots[:num_programs], graph.roots[num_programs:]
    return Types(
        inputs=np.concatenate([np.full(graph.num_inputs - len(others), MAP), others]),
        signatures={op: _signature(roles[op]) for op in np.unique(graph.op).tolist()},
        roots=((results, 0), (attentions, 0)) if len(attentions) else ((results, 0),),
    )


def whole_graph(graph: Graph, roles: Roles, num_programs: int) -> tuple[Graph, Types]:
    """Return a graph in which the stem and the classifier are ops as well, and the kinds of its values.

    With V roles, the stem is op V and the classifier op V + 1. The inputs are the images' features instead of the
    stems, and the first roots are the scores of the answers instead of the programs' results. With K kinds, features
    are column K and scores column K + 1.

    Args:
        graph: the graph of programs.
        num_programs: B, the number of roots that are the programs' results.
    """
    kinds, inputs, nodes = num_kinds(roles), graph.num_inputs, graph.num_nodes
    stems = inputs - (kinds - 1)
    first = inputs + stems  # the slot of the first function
    slot = np.concatenate([inputs + np.arange(stems), np.arange(stems, inputs), first + np.arange(nodes), [NONE]])
    results = slot[graph.roots[:num_programs]]
    args = np.full((stems + nodes + num_programs, max(1, graph.args.shape[1])), NONE)
    args[:stems, 0], args[stems : stems + nodes], args[stems + nodes :, 0] = np.arange(stems), slot[graph.args], results
    ops = np.repeat([len(roles), len(roles) + 1], [stems, num_programs])
    scores, attentions = first + nodes + np.arange(num_programs), slot[graph.roots[num_programs:]]
    whole = Graph(
        inputs,
        np.concatenate([ops[:stems], graph.op, ops[stems:]]),
        args,
        np.concatenate([np.zeros(stems, dtype=np.int64), graph.example, np.arange(num_programs)]),
        np.concatenate([scores, attentions]),
    )
    signatures = {op: _signature(roles[op]) for op in np.unique(graph.op).tolist()}
    signatures |= {len(roles): Signature((Read(0),), (MAP,)), len(roles) + 1: Signature((Read(0),), (kinds + 1,))}
    return whole, Types(
        inputs=np.concatenate([np.full(stems, kinds), np.arange(1, kinds)]),
        signatures=signatures,
        roots=((scores, 0), (attentions, 0)) if len(attentions) else ((scores, 0),),
    )


def penalized(graph: Graph, roles: Roles) -> np.ndarray:
    """Return the slots of the attentions that a penalty counts."""
    is_penalized_V = np.array([role is not None and role.is_penalized for role in roles])
    return graph.num_inputs + np.flatnonzero(is_penalized_V[graph.op])


def _signature(role: Role) -> Signature:
    return Signature(tuple(map(Read, range(len(role.reads)))), (role.result,))


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
