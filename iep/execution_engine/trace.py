"""One program about one image -> the value of each of its functions, by one module call at a time.

Tests compare the batched engine with this slow twin, which traverses the tree of `iep/programs.py` and uses nothing of
`iep/batching/`. Maps of the values are drawn, to show how the engine arrives at an answer.

Shapes: L program tokens, C H W maps (C is 1 for an attention), A answers.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from iep.execution_engine.choices import DEFAULT_SALIENCY
from iep.execution_engine.roles import result_kind
from iep.programs import SCENE, ProgramTree, program_tree


@dataclass(frozen=True)
class Trace:
    """The values of a program's functions."""

    tree: ProgramTree
    outputs: tuple[Tensor, ...]
    """The value of every node in the tree's order, (1, C, H, W). A function without a module has the value of its first
    argument, and a `scene` without a module is an attention if the engine has attentions. In place of a vector that is
    the maximum of a map, it is this map. If gradients are enabled, those of `logits` with respect to these values can
    be computed."""
    logits: Tensor
    """The answer logits, (1, A)."""


def trace(engine: Any, features_1CHW: Tensor, program_L: Sequence[int]) -> Trace:
    """Run a program, well-formed or not, and return the value of every function.

    Args:
        engine: an `ExecutionEngine` on one device. Its answers are those of the batched engine in evaluation mode.
        features_1CHW: the features of the image.
        program_L: indices into the engine's program tokens.
    """
    tree = program_tree([engine.program_tokens[token] for token in program_L])
    maps: list[Tensor] = []
    pools = [part for part in (engine.shared or nn.Module()).children() if isinstance(part, nn.AdaptiveMaxPool2d)]
    with ExitStack() as hooks:
        for pool in pools:
            hooks.callback(pool.register_forward_pre_hook(lambda _, inputs: maps.append(inputs[0])).remove)
        outputs, result_1CHW = run_tree(engine, tree, engine.stem(features_1CHW))
    for number, map_1CHW in zip(tree.post_order, maps, strict=False):  # without vectors, there are no such maps
        outputs[number] = map_1CHW
    return Trace(tree, tuple(outputs), engine.classifier(result_1CHW))


def run_tree(engine: Any, tree: ProgramTree, stem_1CHW: Tensor) -> tuple[list[Tensor], Tensor]:
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


def saliency_maps(trace: Trace, saliency: str) -> list[Tensor]:
    """Return a map (H, W) of numbers from 0 for every node of the tree, in its order.

    Args:
        trace: made with autograd on, for `gradient`.
        saliency: `norm`, the norm over the channels of a module's output, which for an attention is the attention
            itself (Mascharka et al. 2018, Transparency by Design, figure 1); or `gradient`, the norm of the gradient of
            the likeliest answer's logit by that output (Johnson et al. 2017, section 4.2 and figure 3, which take the
            sum of all logits and the last map alone), 0 where the logit does not depend on it.
    """
    values: Sequence[Tensor] = trace.outputs
    if saliency == "gradient":
        learnt = [output for output in values if output.requires_grad]  # a scene of ones has no gradient
        found = torch.autograd.grad(trace.logits.max(), learnt, materialize_grads=True) if learnt else ()
        gradients = iter(found)
        values = [next(gradients) if output.requires_grad else torch.zeros_like(output) for output in values]
    return [value[0].detach().float().norm(dim=0).cpu() for value in values]


def to_unit(map_HW: Tensor, is_attention: bool) -> Tensor:
    """Scale a map to 0 to 1: an attention stays as it is, another map is scaled from its minimum to its maximum, and a
    constant one, such as the attention of `scene`, becomes 0."""
    low, high = map_HW.aminmax()
    if low == high:
        return torch.zeros_like(map_HW)
    return map_HW.clamp(0, 1) if is_attention else (map_HW - low) / (high - low)


def unit_maps(traced: Trace, saliency: str = DEFAULT_SALIENCY) -> list[Tensor]:
    """Return what is drawn for every node of the tree, in its order: a map (H, W) from 0 to 1.

    For `norm`, it is the attention that the function returns, or else the one that it reads: what `count` counts. All
    other maps are those of `saliency_maps`, scaled.
    """
    maps = saliency_maps(traced, saliency)
    are_attentions = [saliency == "norm" and output.shape[1] == 1 for output in traced.outputs]
    shown = []
    for number, node in enumerate(traced.tree.nodes):
        shown.append(next((each for each in (number, *node.arguments) if are_attentions[each]), number))
    return [to_unit(maps[each], are_attentions[each]) for each in shown]
