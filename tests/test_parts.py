"""The parts of an engine are placed in turn or balanced by their work, which is that of the calls of programs."""

import numpy as np
import pytest
import torch
from batching_cases import quick
from engine_cases import PROGRAMS_BL, TOKENS, programs
from hypothesis import given, settings
from hypothesis import strategies as st

from iep.config import EngineConfig
from iep.execution_engine.assembly import Running, prepare
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.parts import ProgramSample, balanced, round_robin, work_of
from iep.models.network import Network
from iep.vocab import NULL, Vocab, index_tokens

PARTS = ("stem", "<END>", "count", "union", "classifier")


def make_engine(feature_shape=(3, 4, 4), config=None) -> ExecutionEngine:
    small = EngineConfig(module_dim=4, stem_widths=(), classifier_projection=4, classifier_hidden=(5,))
    return Network.new("engine", config or small, Vocab((), TOKENS, index_tokens(["yes"])), feature_shape).module


def test_round_robin_gives_the_parts_to_the_devices_in_turn() -> None:
    placement = round_robin(PARTS, ("cpu", "cuda:0", "cpu"))
    assert list(placement.parts.items()) == [("stem", 0), ("<END>", 1), ("count", 2), ("union", 0), ("classifier", 1)]
    of_ops = placement.of_ops(("<NULL>", "<END>", "count", "union"))
    assert (of_ops.inputs, of_ops.roots, of_ops.ops) == (0, 1, {1: 1, 2: 2, 3: 0, 4: 0, 5: 1})
    assert of_ops.devices == tuple(map(torch.device, ("cpu", "cuda:0", "cpu")))


@given(work=st.lists(st.floats(0, 1e9), min_size=1, max_size=40), count=st.integers(2, 5))
@settings(quick, max_examples=100)
def test_balanced_loads_differ_by_no_more_than_the_largest_part(work: list[float], count: int) -> None:
    parts = {"stem": work[0]} | {f"part {number}": each for number, each in enumerate(work[1:])}
    placement = balanced(parts, ["cpu"] * count)
    assert list(placement.parts) == list(parts)
    assert placement.parts["stem"] == 0
    load = [sum(parts[part] for part, at in placement.parts.items() if at == device) for device in range(count)]
    assert max(load) - min(load) <= max(work) + 1e-3


def test_costs_are_those_of_the_convolutions_and_linear_layers_of_the_calls_that_programs_make() -> None:
    lacks_scenes_BL = np.pad(programs("union count"), ((0, 0), (0, PROGRAMS_BL.shape[1] - 4)), constant_values=NULL)
    programs_BL = np.concatenate([PROGRAMS_BL, lacks_scenes_BL])
    config = EngineConfig(classifier_projection=32, classifier_hidden=(10,))
    engine = make_engine((24, 14, 14), config)
    places, conv = 14 * 14, 2 * 9 * 128 * 128  # multiply and add
    flops = dict.fromkeys(engine.parts, 2 * conv * places)
    flops |= dict.fromkeys(("union", "greater_than"), (2 * conv + 2 * 256 * 128) * places)
    linear = 2 * 32 * 49 * 10 + 2 * 10 * engine.classifier[-1].out_features
    flops |= {"stem": (2 * 9 * 24 * 128 + conv) * places, "classifier": 2 * 128 * 32 * places + linear}
    runs = {"scene": 1 + 2 + 2 + 1 + 2, "count": 5, "filter_color[red]": 3, "union": 2, "relate[left]": 2}
    runs |= {"greater_than": 1, "<END>": 1, "stem": 5, "classifier": 5}  # the missing ones begin after that <END>
    expected = {part: runs.get(part, 0) / 5 * flops[part] for part in engine.parts}
    assert work_of(engine, ProgramSample(programs_BL, np.arange(5), "here")) == pytest.approx(expected)


def test_the_parts_of_each_device_are_described(capsys) -> None:
    engine, state = make_engine(), torch.get_rng_state()
    running = Running(placement="round-robin", devices=("cpu", "cpu"))
    prepare(engine, running, ProgramSample(PROGRAMS_BL, np.arange(4), "here"))
    assert {"cpu#0,", "cpu#1,", *engine.parts} <= set(capsys.readouterr().out.split())
    assert torch.get_rng_state().equal(state)
