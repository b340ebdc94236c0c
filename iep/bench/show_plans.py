"""Print which functions of which programs run in which call: `iep-bench plan`.

A node is named by its example and by the position of its token in the example's program, both from 0: `2.0` is the root
of example 2. A node that several tokens share has the name of the first. No module is run.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from iep.batching.schedulers import lower_bound
from iep.bench.strategy import Strategy
from iep.bench.workload import encode
from iep.config import EngineConfig
from iep.data.question_file import load_vocab, open_split
from iep.errors import InputError, nearest
from iep.execution_engine.parts import NONE, ProgramSample, check_options, make_placement
from iep.execution_engine.program_plan import ProgramPlan
from iep.models.network import Network
from iep.programs import SCENE
from iep.runtime.tables import align_rows
from iep.vocab import Vocab

FEATURE_SHAPE = (1024, 14, 14)
"""The shape for which an engine is placed; its defaults are meant for it."""


class Token(NamedTuple):
    """One token of an example's program, which runs as `node` of the graph; None is the image's stem."""

    name: str
    node: int | None


def walk(plan: ProgramPlan) -> Iterator[list[Token]]:
    """Yield every example's tokens in prefix order; tokens that share a node are all listed."""
    graph = plan.graph
    for root in graph.roots.tolist():
        tokens: list[Token] = []
        waiting = [root]
        while waiting:
            slot = waiting.pop()
            if slot < graph.num_inputs:
                tokens.append(Token(SCENE, None))
                continue
            node = slot - graph.num_inputs
            role = plan.roles[graph.op[node]]
            waiting += graph.args[node][role.reads_stem :][: len(role.arguments)].tolist()[::-1]
            tokens.append(Token(plan.program_tokens[graph.op[node]], node))
        yield tokens


def describe_calls(plan: ProgramPlan) -> str:
    """Return a table with the functions and the nodes of every call."""
    names: dict[int | None, str] = {}
    for example, tokens in enumerate(walk(plan)):
        for position, token in enumerate(tokens):
            names.setdefault(token.node, f"{example}.{position}")
    rows = [["call", "functions", "rows", "nodes"]]
    for number, group in enumerate(plan.schedule):
        functions = [plan.program_tokens[op] for op in dict.fromkeys(plan.graph.op[group.nodes].tolist())]
        nodes = [names[node] for node in group.nodes.tolist()]
        rows.append([str(number), " ".join(functions), str(len(nodes)), " ".join(nodes)])
    return align_rows(rows, left=range(1, 4))


def show_plans(
    strategies: Sequence[Strategy],
    programs: Sequence[str],
    data: Path | None,
    split: str,
    num_samples: int,
    questions_per_image: int,
    modules: str,
    scene: str,
    placement: str,
    devices: Sequence[str],
) -> None:
    """Print programs, which are given as text or are the first of a preprocessed split, and each strategy's calls.

    Raises:
        InputError: a token is unknown (the nearest is suggested), the split is missing or has no programs, a placement
            does not fit, or the modules cannot run these functions or this setting of scene.
    """
    check_options(placement, devices)
    vocab = Vocab.clevr() if data is None else load_vocab(data)
    if data is None:
        programs_BL = encode([_tokens(number, text, vocab.program) for number, text in enumerate(programs)], vocab)
        image_idxs_B = np.arange(len(programs)) // questions_per_image
    else:
        questions = open_split(data, split, vocab, False, num_samples).questions
        if questions.programs is None:
            raise InputError(f"{questions.path}: has no programs; choose another --split")
        programs_BL, image_idxs_B = questions.programs, questions.image_idxs
    with torch.device("meta"):
        config = EngineConfig(modules=modules, scene=scene)
        engine = Network.new("engine", config, vocab, FEATURE_SHAPE).module
    if placement != NONE:
        sample = ProgramSample(programs_BL, image_idxs_B, "these programs")
        engine.placement, placed = make_placement(placement, devices, engine, sample)
    image_rows_B = np.unique(image_idxs_B, return_inverse=True)[1]
    for strategy in strategies:
        planner = engine.planner(strategy.batching, strategy.sharing, execution=strategy.execution)
        plan = planner(programs_BL, image_rows_B=image_rows_B)
        if strategy is strategies[0]:
            for number, tokens in enumerate(walk(plan)):
                print(f"example {number}: {' '.join(token.name for token in tokens)}")
        counts = f"{len(plan.schedule)} calls for {plan.graph.num_nodes} nodes"
        bound = f"no schedule by function has fewer than {lower_bound(plan.graph)} calls"
        print(f"\n{strategy.name}: {counts}; {bound}\n{describe_calls(plan)}")
        ops = ", ".join(f"{op} is {plan.program_tokens[op]}" for op in np.unique(plan.graph.op))
        print(f"\n{plan.plan}\nops: {ops}")
        if placement != NONE:
            copied = sum(call.size for call in plan.plan.calls if call.op < 0)
            copies = f"the forward pass copies {copied} values between devices, the backward pass as many gradients"
            print(f"\n{placed}\n  {copies}")


def _tokens(number: int, text: str, known: tuple[str, ...]) -> list[str]:
    tokens = text.split()
    if not tokens:  # perhaps a shell variable that is not set
        raise InputError(f"program {number} is empty, expected functions in prefix order, such as: count scene")
    for position, token in enumerate(tokens):
        if token not in known:
            raise InputError(f"program {number}, token {position}: unknown function {token!r}{nearest(token, known)}")
    return tokens
