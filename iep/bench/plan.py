"""What `iep-bench plan` shows: which functions of which programs run in which call, as text and as a picture.

A node is named by its example and by its token's position in the example's program, from 0: `2.0` is the root of
example 2. A node that several examples or places share has the name of the first. Runs no module.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from iep.batching.schedulers import lower_bound
from iep.bench.report import format_table, result_files
from iep.bench.workload import clevr_vocab, encode, programs_of
from iep.config import EngineConfig
from iep.data_files import open_split
from iep.errors import InputError, nearest
from iep.execution_engine.families import family
from iep.execution_engine.placement import (
    NONE,
    Sample,
    check_options,
    costs_of,
    describe_copies,
    describe_placement,
    make_placement,
)
from iep.execution_engine.program_plan import ProgramPlan, plan_programs
from iep.files import write_bytes
from iep.networks import build, engine_kwargs
from iep.pictures import save
from iep.programs import SCENE, arity
from iep.vocab import Vocab

FULL_SIZE = (1024, 14, 14)
"""The features for which the engine's defaults are meant."""
COLUMN, LEVEL, WIDTH = 1.9, 0.45, 15.0
"""Inches: between leaves, between a node and its arguments, and of the picture, unless one program is wider."""


class Place(NamedTuple):
    """One token of an example's program, whose result the token at `parent` reads; `node` runs for it, or, for None,
    an image's stem. Places `is_first` if none before it has the same node."""

    name: str
    token: str
    depth: int
    parent: int | None
    node: int | None
    is_first: bool


def walk(plan: ProgramPlan) -> Iterator[list[Place]]:
    """Yield every example's tokens in prefix order, whether or not their nodes are shared."""
    graph, takes = plan.graph, family(plan.modules).takes
    met: set[int | None] = {None}
    for example, root in enumerate(graph.roots.tolist()):
        places: list[Place] = []
        waiting: list[tuple[int, int, int | None]] = [(root, 0, None)]
        while waiting:
            slot, depth, parent = waiting.pop()
            node = slot - graph.num_inputs if slot >= graph.num_inputs else None
            token = SCENE if node is None else plan.program_tokens[graph.op[node]]
            position = len(places)
            places.append(Place(f"{example}.{position}", token, depth, parent, node, node not in met))
            met.add(node)
            if node is not None:
                # The function's arguments are the last of those of its module.
                taken = graph.args[node][: len(takes(token))].tolist()
                waiting += [(slot, depth + 1, position) for slot in reversed(taken[len(taken) - arity(token) :])]
        yield places


def describe_schedule(name: str, plan: ProgramPlan, examples: Sequence[Sequence[Place]]) -> str:
    """Return a heading, a line for each call, and one for every copy between devices."""
    names = {place.node: place.name for places in examples for place in places if place.is_first}
    shared = sum(map(len, examples)) - len(names) - sum(place.node is None for places in examples for place in places)
    counts = f"{_counted(len(plan.schedule), 'call')} for {_counted(plan.graph.num_nodes, 'node')}"
    more = f" ({shared} more shared)" if shared else ""
    placement, lines = plan.placement, []
    for number, group in enumerate(plan.schedule, start=1):
        token = plan.program_tokens[group.op]
        device = [] if placement is None else [placement.labels[placement.parts[token]]]
        nodes = " ".join(names[node] for node in group.nodes.tolist())
        lines.append([str(number), token, *device, str(len(group.nodes)), nodes])
    heading = ["call", "function", *["device"] * (placement is not None), "rows", "nodes"]
    table = format_table([heading, *lines], left=range(1, 5)).splitlines()
    for at, call in enumerate(plan.plan.calls, start=1):
        if call.op < 0:  # a copy to another device
            columns = call.arguments[0].column, call.results[0].column
            ends = " -> ".join(placement.labels[column % plan.plan.num_devices] for column in columns)
            table.insert(at, f"      {ends}: {_counted(call.size, 'row')}")
    bound = _counted(lower_bound(plan.graph), "call")
    return "\n".join([f"{name}: {counts}{more}; no schedule has fewer than {bound}", *table])


def draw_schedule(path: Path, title: str, plan: ProgramPlan, examples: Sequence[Sequence[Place]]) -> None:
    """Draw the programs' trees, every node with the number and colour of its call; hollow ones are shared with an
    earlier place."""
    call_of = {node: number for number, group in enumerate(plan.schedule, start=1) for node in group.nodes.tolist()}
    figure = Figure()
    axis = figure.add_axes((0, 0, 1, 1))
    left = top = height = right = 0.0
    for number, places in enumerate(examples):
        columns = _columns(places)
        width = COLUMN * (max(columns) + 1)
        if left and left + width > WIDTH:
            left, top, height = 0.0, top + height, 0.0
        points = [(left + COLUMN * x, top + LEVEL * (1 + each.depth)) for each, x in zip(places, columns, strict=True)]
        axis.text(*points[0], f"example {number}\n\n", ha="center", va="bottom", fontsize=8)
        for place, point in zip(places, points, strict=True):
            parent = point if place.parent is None else points[place.parent]
            axis.plot(*zip(parent, point, strict=True), color="0.7", linewidth=1, zorder=1)
            _draw_node(axis, place, point, call_of.get(place.node), len(plan.schedule))
        left, right = left + width, max(right, left + width)
        height = max(height, LEVEL * (max(place.depth for place in places) + 2.5))
    axis.set(xlim=(-0.4, right), ylim=(top + height, -LEVEL))
    axis.set_axis_off()
    axis.set_title(title, y=1.0, pad=-10, loc="left", fontsize=9)
    figure.set_size_inches(right + 0.4, top + height + LEVEL)
    save(figure, path)


def _draw_node(axis: Axes, place: Place, point: tuple[float, float], call: int | None, calls: int) -> None:
    color = "0.7" if call is None else colormaps["viridis"]((call - 1) / max(1, calls - 1))
    axis.scatter(*point, s=190, facecolor=color if place.is_first else "white", edgecolor=color, zorder=2)
    dark = place.is_first and call is not None and call <= 0.6 * calls
    text = {"color": "white" if dark else "black", "ha": "center", "va": "center", "fontsize": 7}
    axis.text(*point, "" if call is None else str(call), **text)
    axis.text(point[0] + 0.15, point[1], place.token, va="center", fontsize=7)


def _columns(places: Sequence[Place]) -> list[float]:
    """Return where each place stands across: leaves side by side, all others in the middle of their arguments."""
    arguments: list[list[float]] = [[] for _ in places]
    columns, leaves = [0.0] * len(places), 0
    for position, place in reversed(list(enumerate(places))):
        leaves -= not arguments[position]
        columns[position] = float(np.mean(arguments[position])) if arguments[position] else float(leaves)
        if place.parent is not None:
            arguments[place.parent].append(columns[position])
    return [column - leaves for column in columns]


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def show_plans(
    schedulers: Sequence[str],
    programs: Sequence[str],
    data: Path | None,
    split: str,
    num_samples: int,
    questions_per_image: int,
    sharing: bool,
    modules: str,
    scene: str,
    placement: str,
    devices: Sequence[str],
    out: Path | None,
    say: Callable[[str], None] = print,
) -> None:
    """Show the programs, given token by token or the first of a preprocessed split, and each scheduler's calls.

    Raises:
        InputError: a token is unknown (the nearest is suggested), the split is missing or has no programs, a placement
            does not fit, or the modules cannot run these functions or this setting of scene.
    """
    check_options(placement, devices)
    table, *pictures = result_files(out, "plan", (".txt", *(f"-{name}.png" for name in schedulers))) or [None]
    vocab = clevr_vocab() if data is None else Vocab.load(data / "vocab.json")
    if programs:
        programs_BL = encode(
            [_tokens(number, text, vocab.program) for number, text in enumerate(programs)], vocab.program
        )
        image_idxs_B = np.arange(len(programs)) // questions_per_image
    else:
        questions = open_split(data, split, vocab, False, num_samples).questions
        programs_BL, image_idxs_B = programs_of(questions), questions.image_idxs
    texts, placed, costs = [], None, None
    if placement != NONE:
        with torch.device("meta"):
            config = EngineConfig(modules=modules, scene=scene)
            engine = build("engine", engine_kwargs(config, vocab, FULL_SIZE))
        costs = costs_of(engine, Sample(programs_BL, image_idxs_B, "these programs"))
        placed = make_placement(placement, devices, engine.parts, costs.work, "these programs")
        texts.append(describe_placement(placement, placed, costs.work))
    image_rows_B = np.unique(image_idxs_B, return_inverse=True)[1]
    for number, name in enumerate(schedulers):
        try:
            plan = plan_programs(programs_BL, vocab.program, image_rows_B, scene, name, sharing, placed, modules)
        except ValueError as error:  # the modules cannot run this vocabulary or this setting of scene
            raise InputError(f"these programs cannot be planned: {error}") from None
        examples = list(walk(plan))
        if number == 0:
            tokens = (" ".join(place.token for place in places) for places in examples)
            texts.append("\n".join(f"example {example}: {program}" for example, program in enumerate(tokens)))
        texts.append(describe_schedule(name, plan, examples))
        if pictures:
            draw_schedule(pictures[number], texts[-1].splitlines()[0], plan, examples)
        if placed is not None:
            texts[-1] += "\n" + describe_copies([plan.plan], costs, 4, "these programs at full size")
    say("\n\n".join(texts))
    if table is not None:
        write_bytes(table, ("\n\n".join(texts) + "\n").encode())
        say(f"\nWrote {', '.join(map(str, (table, *pictures)))}")


def _tokens(number: int, text: str, known: tuple[str, ...]) -> list[str]:
    tokens = text.split()
    if not tokens:
        raise InputError(f"program {number} is empty, expected functions in prefix order, such as: count scene")
    for position, token in enumerate(tokens):
        if token not in known:
            raise InputError(f"program {number}, token {position}: unknown function {token!r}{nearest(token, known)}")
    return tokens
