"""What `iep-bench plan` shows: which functions of which programs run in which call, as text and as a picture.

A node is named by its example and by its token's position in the example's program, from 0: `2.0` is the root of
example 2. A node that several examples, or several places of a program, share has the name of the first. Runs no module.
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
from iep.execution_engine.placement import NONE
from iep.execution_engine.plans import Plan, plan_programs
from iep.files import write_bytes, write_json
from iep.networks import build, engine_kwargs
from iep.pictures import save
from iep.placing import (
    Sample,
    check_options,
    costs_of,
    describe_moves,
    describe_placement,
    make_placement,
    share_of_time,
)
from iep.programs import SCENE, arity
from iep.vocab import Vocab

FULL_SIZE = (1024, 14, 14)
"""The features for which the engine's defaults are meant."""
COLUMN, LEVEL, WIDTH = 1.9, 0.45, 15.0
"""Inches: between leaves, between a node and its arguments, and of the picture, unless one program is wider."""


class Place(NamedTuple):
    """One token of an example's program."""

    name: str
    token: str
    depth: int
    parent: int | None
    """Position of the token that reads this one's result."""
    node: int | None
    """The node that runs for it; None for an image's stem."""
    is_first: bool
    """Whether no place before this one has the same node."""


def walk(plan: Plan) -> Iterator[list[Place]]:
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


def describe_schedule(name: str, plan: Plan, examples: Sequence[Sequence[Place]]) -> str:
    """Return a heading, a line for each call, and one for every move between devices that follows it."""
    names = {place.node: place.name for places in examples for place in places if place.is_first}
    shared = sum(place.node is not None and not place.is_first for places in examples for place in places)
    heading = f"{name}: {_counted(len(plan.schedule), 'call')} for {_counted(plan.graph.num_nodes, 'node')}"
    heading += f" ({shared} more shared)" * (shared > 0)
    heading += f"; no schedule has fewer than {_counted(lower_bound(plan.graph), 'call')}"
    placement = plan.placement
    lines = [["call", "function", *["device"] * (placement is not None), "rows", "nodes"]]
    for number, group in enumerate(plan.schedule, start=1):
        function = plan.program_tokens[group.op]
        device = [] if placement is None else [placement.labels[placement.parts[function]]]
        nodes = " ".join(names[node] for node in group.nodes.tolist())
        lines.append([str(number), function, *device, str(len(group.nodes)), nodes])
    table = format_table(lines, right=(0, len(lines[0]) - 2)).splitlines()
    for move in reversed(plan.layout.moves if placement is not None else ()):
        ends = " -> ".join(placement.labels[at] for at in (move.source, move.destination))
        table.insert(move.after + 1, f"      {ends}: {_counted(sum(move.rows), 'row')}")
    return "\n".join([heading, *table])


def draw_schedule(path: Path, title: str, plan: Plan, examples: Sequence[Sequence[Place]]) -> None:
    """Draw the programs' trees, every node with the number and colour of its call; hollow ones are shared with an
    earlier place."""
    call_of = {node: number for number, group in enumerate(plan.schedule, 1) for node in group.nodes.tolist()}
    figure = Figure()
    axis = figure.add_axes((0, 0, 1, 1))
    left = top = height = right = 0.0
    for number, places in enumerate(examples):
        columns = _columns(places)
        width = COLUMN * (max(columns) + 1)
        if left and left + width > WIDTH:
            left, top, height = 0.0, top + height, 0.0
        points = [
            (left + COLUMN * x, top + LEVEL * (1 + place.depth)) for place, x in zip(places, columns, strict=True)
        ]
        axis.text(*points[0], f"example {number}\n\n", ha="center", va="bottom", fontsize=8)
        for place, point in zip(places, points, strict=True):
            parent = None if place.parent is None else points[place.parent]
            _draw_node(axis, place, point, parent, call_of.get(place.node), len(plan.schedule))
        left, right = left + width, max(right, left + width)
        height = max(height, LEVEL * (max(place.depth for place in places) + 2.5))
    axis.set(xlim=(-0.4, right), ylim=(top + height, -LEVEL))
    axis.set_axis_off()
    axis.set_title(title, y=1.0, pad=-10, loc="left", fontsize=9)
    figure.set_size_inches(right + 0.4, top + height + LEVEL)
    save(figure, path)


Point = tuple[float, float]


def _draw_node(axis: Axes, place: Place, point: Point, parent: Point | None, call: int | None, calls: int) -> None:
    if parent is not None:
        axis.plot(*zip(parent, point, strict=True), color="0.7", linewidth=1, zorder=1)
    color = "0.7" if call is None else colormaps["viridis"]((call - 1) / max(1, calls - 1))
    filled = place.is_first or call is None
    axis.scatter(*point, s=190, facecolor=color if filled else "white", edgecolor=color, zorder=2)
    dark = place.is_first and call is not None and call <= 0.6 * calls
    ink = "white" if dark else "black"
    axis.text(*point, "" if call is None else str(call), color=ink, ha="center", va="center", fontsize=7)
    axis.text(point[0] + 0.15, point[1], place.token, va="center", fontsize=7)


def _columns(places: Sequence[Place]) -> list[float]:
    """Return where each place stands across: leaves side by side, all others in the middle of their arguments."""
    arguments: list[list[float]] = [[] for _ in places]
    columns = [0.0] * len(places)
    parents = {place.parent for place in places}
    leaves = len(places) - len(parents - {None})
    for position in reversed(range(len(places))):
        leaves -= position not in parents
        columns[position] = np.mean(arguments[position]) if arguments[position] else float(leaves)
        if places[position].parent is not None:
            arguments[places[position].parent].append(columns[position])
    return columns


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


def show_plans(
    schedulers: Sequence[str],
    programs: Sequence[str] = (),
    data: Path | None = None,
    split: str = "val",
    num_samples: int = 8,
    questions_per_image: int = 1,
    sharing: bool = True,
    modules: str = EngineConfig.modules,
    scene: str = EngineConfig.scene,
    placement: str = NONE,
    devices: Sequence[str] = (),
    out: Path | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Show the programs, given token by token or the first of a preprocessed split, and each scheduler's calls.

    Raises:
        InputError: a token is unknown (the nearest is suggested), the split is missing or has no programs, a placement
            does not fit, or the modules cannot run these functions or this setting of scene.
    """
    check_options(placement, devices)
    files = result_files(out, "plan", (".json", ".txt", *(f"-{name}.png" for name in schedulers)))
    vocab = clevr_vocab() if data is None else Vocab.load(data / "vocab.json")
    if programs:
        split_programs = [_tokens(number, text, vocab.program) for number, text in enumerate(programs)]
        programs_BL, image_idxs_B = (
            encode(split_programs, vocab.program),
            np.arange(len(programs)) // questions_per_image,
        )
    else:
        questions = open_split(data, split, vocab, False, num_samples).questions
        programs_BL, image_idxs_B = programs_of(questions), questions.image_idxs
    texts, placed, costs = [], None, None
    if placement != NONE:
        with torch.device("meta"):
            kwargs = engine_kwargs(EngineConfig(modules=modules, scene=scene), vocab, FULL_SIZE)
            engine = build("engine", kwargs)
        costs = costs_of(engine, Sample(programs_BL, image_idxs_B, "these programs"))
        placed = make_placement(placement, devices, engine.parts, costs.work, "these programs")
        texts.append(describe_placement(placement, placed, costs.work))
    image_rows_B = np.unique(image_idxs_B, return_inverse=True)[1]
    shown: dict[str, list] = {}
    for number, name in enumerate(schedulers):
        try:
            plan = plan_programs(programs_BL, vocab.program, image_rows_B, scene, name, sharing, placed, modules)
        except ValueError as error:  # the modules cannot run this vocabulary or this setting of scene
            raise InputError(f"these programs cannot be planned: {error}") from None
        examples = list(walk(plan))
        if number == 0:
            tokens = [" ".join(place.token for place in places) for places in examples]
            texts.append("\n".join(f"example {example}: {program}" for example, program in enumerate(tokens)))
        texts.append(describe_schedule(name, plan, examples))
        title = texts[-1].splitlines()[0]
        if placed is not None:
            texts[-1] += "\n" + describe_moves([plan.layout], costs, 4, share_of_time(plan, costs), "at full size")
        shown[name] = [[plan.program_tokens[group.op], group.nodes.tolist()] for group in plan.schedule]
        if files:
            draw_schedule(files[2 + number], title, plan, examples)
    say("\n\n".join(texts))
    if files:
        write_json(files[0], {"programs": tokens, "calls": shown}, indent=2)
        write_bytes(files[1], ("\n\n".join(texts) + "\n").encode())


def _tokens(number: int, text: str, known: tuple[str, ...]) -> list[str]:
    tokens = text.split()
    if not tokens:
        raise InputError(f"program {number} is empty, expected functions in prefix order, such as: count scene")
    for position, token in enumerate(tokens):
        if token not in known:
            raise InputError(f"program {number}, token {position}: unknown function {token!r}{nearest(token, known)}")
    return tokens
