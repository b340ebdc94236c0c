"""One program about one image -> the value of each of its functions, by one module call at a time.

Tests compare the batched engine with this slow twin, which traverses the tree of `iep/programs.py` and uses nothing of
`iep/batching/`. `iep/asking/` draws the values, to show how the engine arrives at an answer.

Shapes: L program tokens, C H W maps (C is 1 for an attention), A answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from iep.execution_engine.roles import result_kind
from iep.programs import SCENE, ProgramTree, program_tree


@dataclass(frozen=True)
class Trace:
    """The values of a program's functions."""

    tree: ProgramTree
    outputs: tuple[Tensor, ...]
    """The value of every node in the tree's order, (1, C, H, W). A function without a module has the value of its first
    argument, and a `scene` without a module is an attention if the engine has attentions. In place of a vector, this is
    the map whose maximum the vector is. If gradients are enabled, those of `logits` with respect to these values can be
    computed."""
    logits: Tensor
    """The answer logits, (1, A)."""


def trace(engine: nn.Module, features_1CHW: Tensor, program_L: Sequence[int]) -> Trace:
    """Run a program, well-formed or not, and return the value of every function.

    Args:
        engine: an `ExecutionEngine` on one device. Its answers are those of the batched engine in evaluation mode.
        features_1CHW: the features of the image.
        program_L: indices into the engine's program tokens.
    """
    tree = program_tree([engine.program_tokens[token] for token in program_L])
    maps: list[Tensor] = []
    pools = [part for part in (engine.shared or nn.Module()).children() if isinstance(part, nn.AdaptiveMaxPool2d)]
    hooks = [pool.register_forward_pre_hook(lambda _, inputs: maps.append(inputs[0])) for pool in pools]
    outputs, result_1CHW = run_tree(engine, tree, engine.stem(features_1CHW))
    for hook in hooks:
        hook.remove()
    for number, map_1CHW in zip(tree.post_order, maps, strict=False):  # without vectors, there are no such maps
        outputs[number] = map_1CHW
    return Trace(tree, tuple(outputs), engine.classifier(result_1CHW))


def run_tree(engine: nn.Module, tree: ProgramTree, stem_1CHW: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the value of every node of a program's tree, and what the classifier reads, (1, C, H, W)."""
    scene = engine.module_set.scene_values(stem_1CHW)
    kinds: list[int | None] = [None] * len(tree.nodes)  # None: any kind, such as that of `scene`
    values = [scene[max(scene)]] * len(tree.nodes)

    def value(number: int, kind: int) -> Tensor:
        return values[number] if kinds[number] == kind else scene[kind]

    for number in tree.post_order:
        node, role = tree.nodes[number], engine.module_set.role(tree.nodes[number].token)
        if role is not None:
            arguments = map(value, node.arguments, role.arguments)
            values[number] = getattr(engine, node.token)(*[stem_1CHW] * role.reads_stem, *arguments)
            kinds[number] = role.result
        elif node.arguments:
            kinds[number], values[number] = kinds[node.arguments[0]], values[node.arguments[0]]
    return values, value(0, result_kind(engine.module_set.role(SCENE)))
