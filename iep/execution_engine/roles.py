"""Roles of functions: the kinds of values, such as maps and attentions, that each reads and returns.

A set of modules defines a role for every token. The roles determine the graph of a minibatch's module calls
(`program_graph.py`), the traversal of one program (`trace.py`), and which functions of a program are not used because
their values are of the wrong kind (this file).

Shapes: G rows of a call, N images, C H W feature maps.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from iep.programs import NOT_USED, SCENE, ProgramTree, program_tree, without

MAP, ATTENTION, VECTOR = 0, 1, 2
"""The kinds of values, which are the columns of a plan: (C, H, W), such as the stem's output; (1, H, W); (C, 1, 1)."""
KINDS = {MAP: "an encoding", ATTENTION: "an attention"}
"""The kinds in words, unless a set of modules has other `kinds`; one that is not among them has only its number."""


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


def result_kind(scene: Role | None) -> int:
    """Return the kind of value that the classifier reads, given the role of `scene`: what `scene` is, or else a map."""
    return MAP if scene is None else scene.result


class Misfit(NamedTuple):
    """A node of a program's tree whose value is of another kind than its reader expects."""

    node: int
    """The position of the node in the tree's list."""
    reader: int | None
    """The node that reads the value; None for the root, whose value the classifier reads."""
    found: int
    expected: int

    def words(self, modules: ModuleSet) -> tuple[str, str]:
        """Return the two kinds in the words of a set of modules."""
        words = getattr(modules, "kinds", KINDS)
        return tuple(words.get(kind, f"a value of kind {kind}") for kind in (self.found, self.expected))


def misfits(tree: ProgramTree, modules: ModuleSet) -> list[Misfit]:
    """Return the nodes whose values are not used because they are of the wrong kind."""
    misfits = []
    kinds: list[int | None] = [None] * len(tree.nodes)  # None: any kind
    for number in tree.post_order:
        node, role = tree.nodes[number], modules.role(tree.nodes[number].token)
        if role is None:
            kinds[number] = kinds[node.arguments[0]] if node.arguments else None
            continue
        for argument, expected in zip(node.arguments, role.arguments, strict=True):
            if (found := kinds[argument]) not in (None, expected):
                misfits.append(Misfit(argument, number, found, expected))
        kinds[number] = None if node.token == SCENE else role.result  # `scene` is of the kind that its reader expects
    expected = result_kind(modules.role(SCENE))
    if kinds[0] not in (None, expected):
        misfits.append(Misfit(0, None, kinds[0], expected))
    return sorted(misfits)


def tree_run(tokens: Sequence[str], modules: ModuleSet) -> ProgramTree:
    """Return the tree of prefix tokens, in which the nodes that a set of modules does not use are marked."""
    tree = program_tree(tokens)
    words = {misfit.node: misfit.words(modules) for misfit in misfits(tree, modules)}
    return without(tree, {node: f"{NOT_USED}: {found}, not {expected}" for node, (found, expected) in words.items()})
