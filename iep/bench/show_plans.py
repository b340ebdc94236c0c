"""Show which functions of which programs run in which call, as text and as an SVG: `iep-bench plan`.

A node is named by its example and by the position of its token in the example's program, both from 0: `2.0` is the root
of example 2. A node that several tokens share has the name of the first. No module is run.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from iep.batching.schedulers import lower_bound
from iep.bench.strategy import Strategy
from iep.bench.workload import encode
from iep.config import EngineConfig
from iep.data.question_file import load_vocab, open_split
from iep.errors import InputError, nearest
from iep.evaluation.json_report import align_rows
from iep.execution_engine.parts import NONE, Sample, check_options, make_placement
from iep.execution_engine.program_plan import ProgramPlan
from iep.models.build import build, network_kwargs
from iep.programs import SCENE
from iep.runtime.files import check_writable, write_bytes
from iep.vocab import Vocab

LEAF, BOX, ROW = 130, 120, 29
"""The width of a leaf, that of a token's box, and the height of a call in a picture, in pixels."""
GOLDEN = 0.618
"""The step from the hue of one function to that of the next: the golden ratio, whose multiples are far apart."""
FEATURE_SHAPE = (1024, 14, 14)
"""The shape for which an engine is placed; its defaults are meant for it."""


class Token(NamedTuple):
    """One token of an example's program, with the position of the token that reads its result.

    The token runs as `node` of the graph; None is the image's stem.
    """

    name: str
    parent: int | None
    node: int | None


def walk(plan: ProgramPlan) -> Iterator[list[Token]]:
    """Yield every example's tokens in prefix order; tokens that share a node are all listed."""
    graph = plan.graph
    for root in graph.roots.tolist():
        tokens: list[Token] = []
        waiting: list[tuple[int, int | None]] = [(root, None)]
        while waiting:
            slot, parent = waiting.pop()
            if slot < graph.num_inputs:
                tokens.append(Token(SCENE, parent, None))
                continue
            node = slot - graph.num_inputs
            role = plan.roles[graph.op[node]]
            arguments = graph.args[node][role.reads_stem :][: len(role.arguments)].tolist()
            waiting += [(each, len(tokens)) for each in arguments[::-1]]
            tokens.append(Token(plan.program_tokens[graph.op[node]], parent, node))
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


def draw_plan(title: str, plan: ProgramPlan, labels: Sequence[str]) -> str:
    """Return an SVG of the programs' trees, in which each call is a row with an outline around the nodes that it runs.

    The calls follow each other from top to bottom, as in the printed plan. A root lies below all nodes that it reads,
    with its example's label under it.
    """
    row_of = {node: row for row, group in enumerate(plan.schedule) for node in group.nodes.tolist()}
    leaves, spans = 0, defaultdict(list)
    hue_of, edges, boxes = {SCENE: "hsl(0 0%"}, [], []

    def text(x: float, row: float, content: str, look: str = 'text-anchor="middle"') -> str:
        return f'<text x="{x:g}" y="{ROW * row + 4:g}" {look}>{escape(content)}</text>'

    def rect(x: float, y: float, width: float, height: float, look: str) -> str:
        return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" {look}/>'

    for tokens, label in reversed(list(zip(walk(plan), labels, strict=True))):
        x: dict[int, float] = {}
        for position in reversed(range(len(tokens))):  # arguments come after what reads them
            arguments = [x[other] for other in x if tokens[other].parent == position]
            leaves += not arguments
            x[position] = float(np.mean(arguments)) if arguments else -float(LEAF * leaves)
        for position, token in enumerate(tokens):
            row, at = row_of.get(token.node, -1), x[position]  # the stems are above the first call
            spans[row].append(at)
            if token.parent is not None:
                below = ROW * row_of[tokens[token.parent].node]
                edges.append(f"M{at:g} {ROW * row}V{below - 0.8 * ROW:g}L{x[token.parent]:g} {below}")
            hue = hue_of.setdefault(token.name, f"hsl({360 * GOLDEN * len(hue_of) % 360:.0f} 60%")
            boxes.append(rect(at - BOX / 2, ROW * row - 9, BOX, 18, f'rx="4" fill="{hue} 92%)" stroke="{hue} 45%)"'))
            boxes.append(text(at, row, token.name))
        boxes += [text(x[0], len(plan.schedule) + n / 2, line) for n, line in enumerate(label.splitlines())]
    for row, xs in spans.items():
        outline = min(xs) - LEAF / 2 + 2, ROW * row - 12, max(xs) - min(xs) + LEAF - 4, 24
        boxes.append(rect(*outline, 'rx="4" fill="none" stroke="#666" stroke-dasharray="4 2"'))
        boxes.append(text(-LEAF * (leaves + 0.6), row, "stems" if row < 0 else f"call {row}", 'text-anchor="end"'))
    left, top = -LEAF * (leaves + 1), ROW * (min(spans) - 1.5)
    width, height = LEAF * (leaves + 0.5), ROW * (len(plan.schedule) + 1.5) - top
    background = rect(left, top, width, height, 'fill="white"')
    heading = text(left + 4, min(spans) - 1, title, 'font-size="13"')
    lines = f'<path d="{"".join(edges)}" fill="none" stroke="#b3b3b3" stroke-width="1.5"/>'
    frame = f'width="{width:g}" height="{height:g}" viewBox="{left:g} {top:g} {width:g} {height:g}"'
    look = f'xmlns="http://www.w3.org/2000/svg" {frame} font-family="sans-serif" font-size="10"'
    return "\n".join([f"<svg {look}>", background, heading, lines, *boxes, "</svg>\n"])


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
    out: Path | None,
) -> None:
    """Show programs, which are given as text or are the first of a preprocessed split, and each strategy's calls.

    The picture shows the calls of the first strategy.

    Raises:
        InputError: a token is unknown (the nearest is suggested), the split is missing or has no programs, a placement
            does not fit, or the modules cannot run these functions or this setting of scene.
    """
    check_options(placement, devices)
    text_file, picture = files = [(out or Path()) / f"plan{ending}" for ending in (".txt", ".svg")]
    if out is not None:
        check_writable(files)
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
        engine: Any = build("engine", network_kwargs("engine", config, vocab, FEATURE_SHAPE))
    if placement != NONE:
        sample = Sample(programs_BL, image_idxs_B, "these programs")
        engine.placement, placed = make_placement(placement, devices, engine, sample)
    image_rows_B, plans = np.unique(image_idxs_B, return_inverse=True)[1], {}
    for strategy in strategies:
        planner = engine.planner(strategy.batching, strategy.sharing, execution=strategy.execution)
        plan = planner(programs_BL, image_rows_B=image_rows_B)
        plans[f"{strategy.name}: {len(plan.schedule)} calls for {plan.graph.num_nodes} nodes"] = plan
    title, first = next(iter(plans.items()))
    labels = [f"example {number}" for number in range(len(programs_BL))]
    words = [" ".join(token.name for token in tokens) for tokens in walk(first)]
    texts = ["\n".join(map("{}: {}".format, labels, words))]
    for heading, plan in plans.items():
        bound = f"no schedule by function has fewer than {lower_bound(plan.graph)} calls"
        ops = ", ".join(f"{op} is {plan.program_tokens[op]}" for op in np.unique(plan.graph.op))
        texts += [f"{heading}; {bound}\n{describe_calls(plan)}", f"{plan.plan}\nops: {ops}"]
        if placement != NONE:
            copied = sum(call.size for call in plan.plan.calls if call.op < 0)
            copies = f"the forward pass copies {copied} values between devices, the backward pass as many gradients"
            texts.append(f"{placed}\n  {copies}")
    text = "\n\n".join(texts)
    print(text)
    if out is not None:
        write_bytes(text_file, f"{text}\n".encode())
        write_bytes(picture, draw_plan(title, first, labels).encode())
        print(f"\nWrote {', '.join(map(str, files))}")


def _tokens(number: int, text: str, known: tuple[str, ...]) -> list[str]:
    tokens = text.split()
    if not tokens:
        raise InputError(f"program {number} is empty, expected functions in prefix order, such as: count scene")
    for position, token in enumerate(tokens):
        if token not in known:
            raise InputError(f"program {number}, token {position}: unknown function {token!r}{nearest(token, known)}")
    return tokens
