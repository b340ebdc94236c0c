"""Show which functions of which programs run in which call, as text and as a picture: `iep-bench plan`.

A node is named by its example and by the position of its token in the example's program, both from 0: `2.0` is the root
of example 2. A node that several tokens share has the name of the first. No module is run.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import hsv_to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from iep.batching.plan import Plan
from iep.batching.schedulers import lower_bound
from iep.bench.strategy import Strategy
from iep.bench.workload import encode, programs_of
from iep.config import EngineConfig
from iep.data.question_file import load_vocab, open_split
from iep.errors import InputError, nearest
from iep.evaluation.json_report import align_rows
from iep.execution_engine.placement import (
    NONE,
    Costs,
    Sample,
    check_options,
    costs_of,
    describe_placement,
    make_placement,
)
from iep.execution_engine.program_plan import ProgramPlan
from iep.execution_engine.roles import MAP
from iep.models.build import build, network_kwargs
from iep.programs import SCENE
from iep.runtime.files import check_writable, write_bytes, write_json
from iep.runtime.pictures import save
from iep.vocab import Vocab

LEAF, ROW = 1.6, 0.4
"""The width of a leaf and the height of a call in a picture, in inches."""
GOLDEN = 0.618
"""The step from the hue of one function to that of the next: the golden ratio, whose multiples are far apart."""
FEATURE_SHAPE = (1024, 14, 14)
"""The shape for which an engine is placed; its defaults are meant for it."""
FLOAT32_BYTES = 4


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
            node = slot - graph.num_inputs if slot >= graph.num_inputs else None
            token = SCENE if node is None else plan.program_tokens[graph.op[node]]
            if node is not None:
                role = plan.roles[graph.op[node]]
                arguments = graph.args[node][role.reads_stem :][: len(role.arguments)].tolist()
                waiting += [(each, len(tokens)) for each in arguments[::-1]]
            tokens.append(Token(token, parent, node))
        yield tokens


def calls_of(plan: ProgramPlan, examples: Sequence[Sequence[Token]]) -> list[dict[str, list[str]]]:
    """Return the names of the functions and of the nodes of every call."""
    names: dict[int | None, str] = {}
    for example, tokens in enumerate(examples):
        for position, token in enumerate(tokens):
            names.setdefault(token.node, f"{example}.{position}")
    calls = [(plan.graph.op[group.nodes].tolist(), group.nodes.tolist()) for group in plan.schedule]
    return [
        {"functions": [plan.program_tokens[op] for op in dict.fromkeys(ops)], "nodes": [names[node] for node in nodes]}
        for ops, nodes in calls
    ]


def draw_plan(
    axis: Axes, title: str, plan: ProgramPlan, examples: Sequence[Sequence[Token]], labels: Sequence[str]
) -> None:
    """Draw the programs' trees side by side: each call is a row, with one outline around the nodes that it runs.

    The calls follow each other from top to bottom, as in the printed plan. A root lies below all nodes that it reads,
    with its example's label under it. Outlines never overlap, since each has a row of its own.
    """
    row_of = {node: row for row, group in enumerate(plan.schedule) for node in group.nodes.tolist()}
    leaves, spans = 0, defaultdict(list)
    color_of: dict[str, tuple[float, ...]] = {SCENE: (0.0, 0.0, 0.0)}
    for tokens, label in reversed(list(zip(examples, labels, strict=True))):
        x: dict[int, float] = {}
        for position in reversed(range(len(tokens))):  # arguments come after what reads them
            arguments = [x[other] for other in x if tokens[other].parent == position]
            leaves += not arguments
            x[position] = float(np.mean(arguments)) if arguments else -float(leaves)
        for position, token in enumerate(tokens):
            row = row_of.get(token.node, -1)  # the stems are above the first call
            spans[row].append(x[position])
            if token.parent is not None:
                below = row_of[tokens[token.parent].node]
                axis.plot([x[position], x[position], x[token.parent]], [row, below - 0.8, below], color="0.7", zorder=1)
            if token.name not in color_of:
                color_of[token.name] = tuple(hsv_to_rgb((GOLDEN * len(color_of) % 1, 0.75, 0.8)))
            face = [0.75 + 0.25 * part for part in color_of[token.name]]
            box = {"boxstyle": "round", "facecolor": face, "edgecolor": color_of[token.name]}
            axis.text(x[position], row, token.name, ha="center", va="center", fontsize=8, bbox=box)
        axis.text(x[0], len(plan.schedule), label, ha="center", va="center", fontsize=8, style="italic")
    for row, xs in spans.items():
        corner, size = (min(xs) - 0.47, row - 0.36), (max(xs) - min(xs) + 0.94, 0.72)
        shape = {"boxstyle": "round,pad=0,rounding_size=0.06", "mutation_aspect": LEAF / ROW}
        axis.add_patch(FancyBboxPatch(corner, *size, **shape, fill=False, edgecolor="0.4", linestyle="dashed"))
        name = "stems" if row < 0 else f"call {row}"
        axis.text(-leaves - 0.6, row, name, ha="right", va="center", fontsize=8, color="0.3")
    axis.set_title(title, loc="left", fontsize=10)
    axis.set(xlim=(-leaves - 1.1, -0.5), ylim=(len(plan.schedule) + 0.5, min(spans) - 0.5))
    axis.set_axis_off()


def draw_plans(plans: Sequence[tuple[str, ProgramPlan, Sequence[Sequence[Token]]]], labels: Sequence[str]) -> Figure:
    """Draw plans of the same programs below each other; each has a title, and examples as `walk` yields them."""
    rows = [len(plan.schedule) + 3 for _, plan, _ in plans]
    figure = Figure(layout="constrained")
    axes = figure.subplots(len(plans), squeeze=False, height_ratios=rows)[:, 0]
    for axis, shown in zip(axes, plans, strict=True):
        draw_plan(axis, *shown, labels)
    figure.set_size_inches(min(200, LEAF * np.ptp(axes[0].get_xlim())), min(200, ROW * sum(rows)))
    return figure


def rows_copied(plan: Plan, column: int) -> int:
    """Return the number of values of a column that the forward pass copies, or of gradients that the backward does."""
    results = (result for call in plan.calls if call.op < 0 for result in call.results)
    return sum(each.rows.stop - each.rows.start for each in results if each.column // plan.num_devices == column)


def least_time(plan: Plan, cost_of_row: Mapping[int, float]) -> float:
    """Return a lower bound of the time of a placed plan, in the unit of `cost_of_row`.

    A call takes the cost of its rows, a device runs one call at a time, and copies take no time.
    """
    clocks = [0.0] * plan.num_devices
    ready = [np.zeros(column.num_rows) for column in plan.columns]
    for call in plan.calls:
        time = max([0.0, *(ready[each.column][plan.rows(each)].max() for each in call.arguments)])
        if call.op >= 0:
            device = call.results[0].column % plan.num_devices
            time = clocks[device] = max(clocks[device], time) + call.size * cost_of_row[call.op]
        for result in call.results:
            ready[result.column][result.rows] = time
    return max(clocks)


def describe_copies(plan: ProgramPlan, costs: Costs, sizes: Sequence[int]) -> str:
    """Return a description of the copies between the devices of a placed plan in float32, and of its least time.

    Args:
        sizes: the numbers of elements of a map and, if there are any, of an attention.
    """
    kinds, total = [], 0
    for column, (name, size) in enumerate(zip(("maps", "attentions"), sizes, strict=False)):
        if (copied := rows_copied(plan.plan, column)) or column == MAP:
            kinds.append(f"{copied} {name} of {size * FLOAT32_BYTES:,} bytes")
        total += copied * size * FLOAT32_BYTES
    flops = {op: costs.flops[token] for op, token in enumerate(plan.program_tokens) if token in costs.flops}
    alone = sum(call.size * flops[call.op] for call in plan.plan.calls if call.op >= 0)
    share = least_time(plan.plan, flops) / alone if alone else 1
    return (
        f"  the forward pass copies {' and '.join(kinds)} between devices ({total / 1e6:.4g} MB), and the backward "
        "pass as many gradients\n"
        f"  together, the devices take at least {share:.0%} of one device's time for the modules"
    )


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

    Raises:
        InputError: a token is unknown (the nearest is suggested), the split is missing or has no programs, a placement
            does not fit, or the modules cannot run these functions or this setting of scene.
    """
    check_options(placement, devices)
    text_file, calls_file, picture = files = [(out or Path()) / f"plan{ending}" for ending in (".txt", ".json", ".png")]
    if out is not None:
        check_writable(files)
    vocab = Vocab.clevr() if data is None else load_vocab(data)
    if programs:
        programs_BL = encode([_tokens(number, text, vocab.program) for number, text in enumerate(programs)], vocab)
        image_idxs_B = np.arange(len(programs)) // questions_per_image
    else:
        questions = open_split(data, split, vocab, False, num_samples).questions
        programs_BL, image_idxs_B = programs_of(questions), questions.image_idxs
    with torch.device("meta"):
        engine = build(
            "engine", network_kwargs("engine", EngineConfig(modules=modules, scene=scene), vocab, FEATURE_SHAPE)
        )
    if placement != NONE:
        sample = Sample(programs_BL, image_idxs_B, "these programs")
        costs = costs_of(engine, sample)
        engine.placement = make_placement(placement, devices, engine.parts, costs.work, sample.source)
    image_rows_B, texts, calls, shown = np.unique(image_idxs_B, return_inverse=True)[1], [], {}, []
    for strategy in strategies:
        planner = engine.planner(strategy.batching, strategy.sharing, execution=strategy.execution)
        plan = planner(programs_BL, image_rows_B=image_rows_B)
        examples = list(walk(plan))
        if not texts:
            words = (" ".join(token.name for token in tokens) for tokens in examples)
            texts.append("\n".join(f"example {example}: {program}" for example, program in enumerate(words)))
        calls[strategy.name] = found = calls_of(plan, examples)
        title = f"{strategy.name}: {len(found)} calls for {plan.graph.num_nodes} nodes"
        rows = [
            [str(number), " ".join(call["functions"]), str(len(call["nodes"])), " ".join(call["nodes"])]
            for number, call in enumerate(found)
        ]
        table = align_rows([["call", "functions", "rows", "nodes"], *rows], left=range(1, 4))
        bound = f"no schedule by function has fewer than {lower_bound(plan.graph)} calls"
        ops = ", ".join(f"{op} is {plan.program_tokens[op]}" for op in np.unique(plan.graph.op))
        texts += [f"{title}; {bound}\n{table}", f"{plan.plan}\nops: {ops}"]
        if placement != NONE:
            placed = describe_placement(placement, engine.placement, costs.work)
            map_1CHW = torch.empty(1, engine.kwargs["module_dim"], *engine.grid, device="meta")
            sizes = [value.numel() for value in engine.module_set.scene_values(map_1CHW).values()]
            texts.append(f"{placed}\n{describe_copies(plan, costs, sizes)}")
        shown.append((title, plan, examples))
    text = "\n\n".join(texts)
    print(text)
    if out is not None:
        write_json(calls_file, calls, indent=2)
        write_bytes(text_file, f"{text}\n".encode())
        save(draw_plans(shown, [f"example {example}" for example in range(len(programs_BL))]), picture)
        print(f"\nWrote {', '.join(map(str, files))}")


def _tokens(number: int, text: str, known: tuple[str, ...]) -> list[str]:
    tokens = text.split()
    if not tokens:
        raise InputError(f"program {number} is empty, expected functions in prefix order, such as: count scene")
    for position, token in enumerate(tokens):
        if token not in known:
            raise InputError(f"program {number}, token {position}: unknown function {token!r}{nearest(token, known)}")
    return tokens
