"""Program tokens as a network puts them out, well-formed or not -> the tree that the engine runs, and that as text.

The meaning of tokens is that of `batching/graph.py`: `<START>` is skipped, `<NULL>` and the end of the tokens stand for
`scene`, what follows the complete tree is ignored, other special tokens inside of it are functions of one argument.
Which values are of a kind that nothing takes is the engine's to say (`without`). Runs nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from iep.programs import SCENE, arity
from iep.vocab import END, NULL, SPECIAL_TOKENS, START


@dataclass(frozen=True)
class Node:
    """One function of a program."""

    token: str
    """What runs."""
    depth: int
    """Functions between it and the root, itself counted; the root has 0."""
    arguments: tuple[int, ...]
    """The nodes whose results it takes, in order, by their place in the tree's list."""
    is_filled_in: bool = False
    """`scene`, where the program has `<NULL>` or had ended."""
    unused: str = ""
    """Why its value is not taken, `scene`'s standing in its place; empty where it is."""


@dataclass(frozen=True)
class ProgramTree:
    """The tree that a program stands for.

    Attributes:
        nodes: in prefix order, the root first: a node comes before its arguments.
        ignored: tokens after the tree was complete, up to `<END>`.
    """

    nodes: tuple[Node, ...]
    ignored: tuple[str, ...]

    @property
    def post_order(self) -> list[int]:
        """The nodes in the order in which one after the other can run: arguments first, left before right."""
        order, waiting = [], [0]
        while waiting:
            number = waiting.pop()
            order.append(number)
            waiting += self.nodes[number].arguments
        return order[::-1]


def program_tree(tokens: Sequence[str]) -> ProgramTree:
    """The tree of prefix tokens, special ones among them or not."""
    kept = [token for token in tokens if token != SPECIAL_TOKENS[START]]
    found: list[tuple[str, int, bool]] = []
    arguments: list[list[int]] = []
    open_places: list[tuple[int, int | None]] = [(0, None)]
    while open_places:
        depth, taker = open_places.pop()
        token = kept[len(found)] if len(found) < len(kept) else SPECIAL_TOKENS[NULL]
        is_filled_in = token == SPECIAL_TOKENS[NULL]
        token = SCENE if is_filled_in else token
        if taker is not None:
            arguments[taker].append(len(found))
        open_places += [(depth + 1, len(found))] * arity(token)
        found.append((token, depth, is_filled_in))
        arguments.append([])
    nodes = (
        Node(token, depth, tuple(taken), is_filled_in)
        for (token, depth, is_filled_in), taken in zip(found, arguments, strict=True)
    )
    rest = kept[len(found) :]
    end = rest.index(SPECIAL_TOKENS[END]) if SPECIAL_TOKENS[END] in rest else len(rest)
    return ProgramTree(tuple(nodes), tuple(token for token in rest[:end] if token != SPECIAL_TOKENS[NULL]))


NOT_USED = "not used"


def without(tree: ProgramTree, reasons: Mapping[int, str]) -> ProgramTree:
    """The tree with nodes marked as unused, by their place in its list, and with them all below them."""
    why = dict(reasons)
    nodes = []
    for number, node in enumerate(tree.nodes):
        nodes.append(replace(node, unused=why.get(number, "")))
        if number in why:
            why |= dict.fromkeys(node.arguments, NOT_USED)
    return replace(tree, nodes=tuple(nodes))


def tokens_run(tree: ProgramTree) -> list[str]:
    """The prefix tokens of what runs: `scene` in the place of each subtree that is not used."""
    tokens, waiting = [], [0]
    while waiting:
        node = tree.nodes[waiting.pop()]
        tokens.append(SCENE if node.unused else node.token)
        waiting += [] if node.unused else reversed(node.arguments)
    return tokens


def tree_lines(tree: ProgramTree, label: Callable[[Node], str]) -> list[str]:
    """The tree drawn with lines, the root above, a line of text for each node, named by `label`."""
    lines = []
    waiting = [(0, "", "")]  # a node, what stands before it, and before what is below it
    while waiting:
        number, before, before_arguments = waiting.pop()
        node = tree.nodes[number]
        lines.append(before + label(node))
        for place, argument in reversed(list(enumerate(node.arguments))):
            is_last = place == len(node.arguments) - 1
            branch, below = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
            waiting.append((argument, before_arguments + branch, before_arguments + below))
    return lines


def named(node: Node) -> str:
    """A node's token, with words where it was not in the program, or is not used."""
    said = [*(["filled in"] if node.is_filled_in else []), *([node.unused] if node.unused else [])]
    return f"{node.token} ({'; '.join(said)})" if said else node.token
