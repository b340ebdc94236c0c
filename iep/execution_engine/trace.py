"""One program about one image -> what each of its functions put out: to look inside of the engine.

Runs the family's one-example reference, so that the answer is the engine's own; not for speed. What the outputs are
made into pictures by is `iep/asking/`.

Shapes: L program tokens, C H W maps (C is 1 for an attention), A answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.families import family
from iep.programs import ProgramTree, program_tree


@dataclass(frozen=True)
class Trace:
    """What happened when a program was run.

    Attributes:
        tree: the program as it was run.
        outputs: of every node of the tree, in its order, (1, C, H, W), or (1, 1, H, W) for an attention; for one that
            runs no module, what it hands on, or what its family takes for the scene. With autograd on, gradients of
            `logits` by what modules put out can be taken.
        logits: (1, A).
    """

    tree: ProgramTree
    outputs: tuple[Tensor, ...]
    logits: Tensor


def trace(engine: ExecutionEngine, features_1CHW: Tensor, program_L: Sequence[int]) -> Trace:
    """Run a program, well-formed or not, one function at a time, and keep what each puts out.

    Args:
        engine: on one device; in evaluation mode for the answers that it gives elsewhere.
        features_1CHW: of the image.
        program_L: indices into the engine's program tokens.
    """
    tree = program_tree([engine.program_tokens[token] for token in program_L])
    calls: list[tuple[str, Tensor]] = []

    def recorded(token: str, module: nn.Module) -> Callable[..., Tensor]:
        def run(*arguments: Tensor) -> Tensor:
            calls.append((token, module(*arguments)))
            return calls[-1][1]

        return run

    own = family(engine.family_name)
    runs = own.runs(engine.program_tokens, engine.scene_kind)
    modules = {op: recorded(token, getattr(engine, token)) for op, token in runs.items()}
    stem_1CHW = engine.stem(features_1CHW)
    last_1CHW = own.reference(list(program_L), engine.program_tokens, engine.scene_kind, modules, stem_1CHW)
    outputs: list[Tensor] = [own.scene(stem_1CHW)] * len(tree.nodes)
    called = iter(calls)
    for number in tree.post_order:  # the order of the calls
        node = tree.nodes[number]
        if node.token in runs.values():
            token, outputs[number] = next(called)
            assert token == node.token, (token, node)
        elif node.arguments:
            outputs[number] = outputs[node.arguments[0]]
    assert next(called, None) is None
    return Trace(tree, tuple(outputs), engine.classifier(last_1CHW))
