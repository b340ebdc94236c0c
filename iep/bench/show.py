"""Programs and their plan -> the schedule as text and as a picture: which functions run in which call.

A node is named by its example and by its token's place in the example's program, from 0: `2.0` is the root of example
2. A node that several examples, or several places of a program, share has the name of the first. Runs no module.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from iep.batching.schedulers import Schedule, lower_bound
from iep.execution_engine.families import family
from iep.execution_engine.plans import Plan
from iep.pictures import save
from iep.programs import SCENE, arity

COLUMN, LEVEL, WIDTH = 1.9, 0.45, 15.0
"""Inches: between leaves, between a node and its arguments, and of the picture, unless one program is wider."""


@dataclass(frozen=True)
class Place:
    """One token of an example's program."""

    example: int
    position: int
    """Of the token in the program, from 0."""
    token: str
    depth: int
    parent: int | None
    """Position of the token that takes this one's result."""
    node: int | None
    """What runs for it; None for an image's stem."""
    is_first: bool
    """No place before this one has the same node."""

    @property
    def name(self) -> str:
        return f"{self.example}.{self.position}"


def walk(plan: Plan) -> list[list[Place]]:
    """Every example's tokens in prefix order, whether or not their nodes are shared."""
    graph, takes = plan.graph, family(plan.modules).takes
    met: set[int] = set()
    examples = []
    for example, root in enumerate(graph.roots.tolist()):
        places: list[Place] = []
        waiting: list[tuple[int, int, int | None]] = [(root, 0, None)]
        while waiting:
            slot, depth, parent = waiting.pop()
            node = slot - graph.num_inputs if slot >= graph.num_inputs else None
            token = SCENE if node is None else plan.program_tokens[graph.op[node]]
            position = len(places)
            places.append(Place(example, position, token, depth, parent, node, node is not None and node not in met))
            met.add(node)
            if node is not None:
                # The function's arguments come last of what its module takes.
                taken = graph.args[node][: len(takes(token))].tolist()
                arguments = taken[len(taken) - arity(token) :]
                waiting += [(argument, depth + 1, position) for argument in reversed(arguments)]
        examples.append(places)
    return examples


def describe_programs(examples: Sequence[Sequence[Place]]) -> str:
    """One line a program, as the graph has it: completed where it ended early, without what it ignores."""
    return "\n".join(f"example {places[0].example}: {' '.join(place.token for place in places)}" for places in examples)


def describe_schedule(name: str, plan: Plan, examples: Sequence[Sequence[Place]]) -> str:
    """A heading and one line a call: its number, function, device where there are several, rows and nodes; and one
    for every move that follows it."""
    graph, schedule = plan.graph, plan.schedule
    names = {place.node: place.name for places in examples for place in places if place.is_first}
    shared = sum(place.node is not None and not place.is_first for places in examples for place in places)
    heading = f"{name}: {_counted(len(schedule), 'call')} for {_counted(graph.num_nodes, 'node')}"
    heading += f" ({shared} more shared)" if shared else ""
    heading += f"; no schedule has fewer than {_counted(lower_bound(graph), 'call')}"
    functions = [plan.program_tokens[group.op] for group in schedule]
    homes = [] if plan.placement is None else [plan.placement.labels[plan.placement.parts[each]] for each in functions]
    moves = _moves(plan)
    names_of_calls = [_column(["function", *functions]), *([_column(["device", *homes])] if homes else [])]
    title, *lines = ["  ".join(cells) for cells in zip(*names_of_calls, strict=True)]
    described = [f"call  {title}  rows  nodes", *moves.get(0, ())]
    for number, (line, group) in enumerate(zip(lines, schedule, strict=True), start=1):
        nodes = " ".join(names[node] for node in group.nodes.tolist())
        described += [f"{number:4}  {line}  {len(group.nodes):4}  {nodes}", *moves.get(number, ())]
    return "\n".join([heading, *described])


def _moves(plan: Plan) -> dict[int, list[str]]:
    """By the number of the call that they follow, lines for what moves between devices; 0 is the stem."""
    lines: dict[int, list[str]] = {}
    if plan.placement is not None:
        for move in plan.layout.moves:
            source, destination = (plan.placement.labels[at] for at in (move.source, move.destination))
            rows = _counted(sum(move.rows), "row")
            lines.setdefault(move.after, []).append(f"      {source} -> {destination}: {rows}")
    return lines


def _column(cells: Sequence[str]) -> list[str]:
    width = max(map(len, cells))
    return [cell.ljust(width) for cell in cells]


def draw_schedule(path: Path, title: str, schedule: Schedule, examples: Sequence[Sequence[Place]]) -> None:
    """Write the programs' trees, every node with the number and colour of its call, to `path`; hollow nodes are shared
    with an earlier place. The ending of `path` says which kind of picture (.png, .svg, .pdf).
    """
    call_of_node = {node: number for number, group in enumerate(schedule, start=1) for node in group.nodes.tolist()}
    figure = Figure()
    axis = figure.add_axes((0, 0, 1, 1))
    left = top = height = right = 0.0
    for places in examples:
        columns = _columns(places)
        width = COLUMN * (max(columns) + 1)
        if left and left + width > WIDTH:
            left, top, height = 0.0, top + height, 0.0
        _draw_tree(axis, places, columns, left, top + LEVEL, call_of_node, len(schedule))
        left, right = left + width, max(right, left + width)
        height = max(height, LEVEL * (max(place.depth for place in places) + 2.5))
    axis.set(xlim=(-0.4, right), ylim=(top + height, -LEVEL))
    axis.set_axis_off()
    axis.set_title(title, y=1.0, pad=-10, loc="left", fontsize=9)
    figure.set_size_inches(right + 0.4, top + height + LEVEL)
    save(figure, path)


def _draw_tree(
    axis: Axes,
    places: Sequence[Place],
    columns: Sequence[float],
    left: float,
    top: float,
    call_of_node: dict[int, int],
    num_calls: int,
) -> None:
    points = [
        (left + COLUMN * column, top + LEVEL * place.depth) for place, column in zip(places, columns, strict=True)
    ]
    axis.text(*points[0], f"example {places[0].example}\n\n", ha="center", va="bottom", fontsize=8)
    for place, point in zip(places, points, strict=True):
        if place.parent is not None:
            axis.plot(*zip(points[place.parent], point, strict=True), color="0.7", linewidth=1, zorder=1)
        call = call_of_node.get(place.node)
        color = "0.7" if call is None else colormaps["viridis"]((call - 1) / max(1, num_calls - 1))
        axis.scatter(*point, s=190, facecolor=color if place.is_first else "white", edgecolor=color, zorder=2)
        dark = place.is_first and call <= 0.6 * num_calls
        number = "" if call is None else str(call)
        axis.text(*point, number, color="white" if dark else "black", ha="center", va="center", fontsize=7)
        axis.text(point[0] + 0.15, point[1], place.token, va="center", fontsize=7)


def _columns(places: Sequence[Place]) -> list[float]:
    """Where each place stands across: leaves side by side, all others in the middle of what they take."""
    arguments: list[list[int]] = [[] for _ in places]
    for place in places[1:]:
        arguments[place.parent].append(place.position)
    columns = [0.0] * len(places)
    leaves = sum(not taken for taken in arguments)
    for position in reversed(range(len(places))):
        if arguments[position]:
            columns[position] = sum(columns[argument] for argument in arguments[position]) / len(arguments[position])
        else:
            leaves -= 1
            columns[position] = float(leaves)
    return columns


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
