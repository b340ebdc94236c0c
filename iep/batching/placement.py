"""Graph, schedule and a device for every op -> a plan in which values are copied to the devices that need them.

Every call runs on the device of its op. A value that is needed on another device is copied there once, by a *copy
call* right after the call that computes it, and the calls on that device read the copy. One thread issues all calls
in order. Launches on GPUs are asynchronous, so that calls on different devices run at the same time (the scheme for
several GPUs of Suarez & Zhu 2017, section 3.1, last paragraph).

Shapes: N nodes, S slots, D devices, X copies, A greatest number of arguments.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from iep.batching.graph import Graph
from iep.batching.plan import Plan, Read, Signature, Types, make_plan, one_column
from iep.batching.schedulers import Group, Schedule, one_group_per_op


@dataclass(frozen=True)
class OpPlacement:
    """The devices of ops, inputs and roots, as positions in a list that may contain a device several times."""

    devices: tuple[torch.device, ...]
    ops: Mapping[int, int]
    """The position of the device of every op that may run."""
    inputs: int
    roots: int
    """The position of the device to which the results go."""


def make_placed_plan(graph: Graph, schedule: Schedule, placement: OpPlacement, types: Types | None = None) -> Plan:
    """Return the plan of `schedule` on several devices.

    The values of column c on device p (a position) are column c * D + p of the plan; copy calls have negative ops.

    Raises:
        ValueError: the schedule does not fit the graph, an op of the graph has no device, or a call's functions are on
            several devices.
    """
    types, count = types or one_column(graph), len(placement.devices)
    ops, kind_N = graph.kinds
    missing = set(ops.tolist()) - placement.ops.keys()
    if missing:
        raise ValueError(f"op {min(missing)} runs, but is not placed on a device")
    device_N = np.array([placement.ops[op] for op in ops.tolist()], dtype=np.int64)[kind_N]
    for group in schedule:
        if (device_N[group.nodes] != device_N[group.nodes[:1]]).any():
            raise ValueError(f"the functions of op group {group.op} are on several devices, expected one")
    device_S = np.concatenate([np.full(graph.num_inputs, placement.inputs), device_N])

    # The values that other devices need, once for each such device.
    node, argument = np.nonzero(graph.args >= 0)
    slot_X = np.concatenate([graph.args[node, argument], *(slots for slots, _ in types.roots)])
    device_X = np.concatenate([device_N[node], np.full(len(slot_X) - len(node), placement.roots)])
    crosses = device_S[slot_X] != device_X
    slot_X, device_X = np.divmod(np.unique(slot_X[crosses] * count + device_X[crosses]), count)

    def on_device(signature: Signature, device: int) -> Signature:
        return signature._replace(makes=tuple(column * count + device for column in signature.makes))

    # Copies of one call's results to one device are one call, right after it. The inputs of a column are treated in the
    # same way, as results of a call before the first, with a negative number.
    num_columns = int(types.inputs.max(initial=-1)) + 1
    call_S = np.concatenate([types.inputs - num_columns, np.zeros(graph.num_nodes, dtype=np.int64)])
    for number, group in enumerate(schedule):
        call_S[graph.num_inputs + group.nodes] = number
    placed_ops = types.signatures.keys() & placement.ops.keys()
    signatures = {op: on_device(types.signatures[op], placement.ops[op]) for op in placed_ops}
    numbered = list(enumerate(schedule))
    for op, (device, copies, _) in enumerate(one_group_per_op(call_S[slot_X], device_X), start=1):
        number = int(call_S[slot_X[copies[0]]])
        is_input = number < 0
        makes = (number + num_columns,) if is_input else types.signatures[graph.op[schedule[number].nodes[0]]].makes
        reads = tuple(Read(0, field=field) for field in range(len(makes)))
        signatures[-op] = on_device(Signature(reads, makes), device)
        numbered.append((number, Group(-op, graph.num_nodes + copies)))
    groups = [group for _, group in sorted(numbered, key=itemgetter(0))]

    # Nodes n and copies N + x, in the order in which they run, become the nodes of a new graph.
    order = np.concatenate([np.empty(0, dtype=np.int64), *(group.nodes for group in groups)])
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    renumbered = np.concatenate([np.arange(graph.num_inputs), graph.num_inputs + position, [-1]])
    read_DS = np.tile(np.append(np.arange(len(device_S)), -1), (count, 1))
    """`read_DS[d, s]` is the slot that device d reads for slot s: s itself or its copy on d. The last column maps -1,
    no argument, to itself."""
    read_DS[device_X, slot_X] = len(device_S) + np.arange(len(slot_X))
    args_XA = np.full((len(slot_X), graph.args.shape[1]), -1)
    args_XA[:, :1] = slot_X[:, None]
    args = np.concatenate([read_DS[device_N[:, None], graph.args], args_XA])[order]
    placed = Graph(
        graph.num_inputs,
        np.concatenate([graph.op, np.full(len(slot_X), graph.op.max(initial=-1) + 1)])[order],
        renumbered[args],
        np.concatenate([graph.example, np.zeros_like(slot_X)])[order],
        renumbered[read_DS[placement.roots, graph.roots]],
    )
    return make_plan(
        placed,
        tuple(group._replace(nodes=position[group.nodes]) for group in groups),
        Types(
            types.inputs * count + placement.inputs,
            signatures,
            tuple((renumbered[read_DS[placement.roots, slots]], fields) for slots, fields in types.roots),
            None if types.fields is None else np.concatenate([types.fields, np.zeros_like(args_XA)])[order],
        ),
        placement.devices,
    )


def longest_first(costs: Mapping[Any, float], count: int) -> dict[Any, int]:
    """Return the position of a device for every op or part, so that the devices have similar loads.

    This is the rule of the longest processing time first (Graham 1969, Bounds on multiprocessing timing anomalies): the
    remaining op with the greatest cost is assigned to the device with the least load. Of equal ops or devices, the
    earlier one is chosen.

    Args:
        costs: the cost of each op, in any unit.
        count: the number of devices.
    """
    load, found = [0.0] * count, {}
    for op in sorted(costs, key=costs.__getitem__, reverse=True):
        found[op] = load.index(min(load))
        load[found[op]] += costs[op]
    return found
