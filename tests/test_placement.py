"""Which function lives on which device: dealt, balanced by work, or from a file; mistakes are one line."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from batching_cases import matrix, quick
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import PROGRAMS_BL, TOKENS, program

from iep.config import EngineConfig
from iep.errors import InputError
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.placement import (
    Placement,
    balanced,
    calls_of_parts,
    flops_of_parts,
    read_placement,
    round_robin,
)
from iep.execution_engine.plans import graph_of
from iep.networks import build, engine_kwargs
from iep.placing import Sample, check_options, costs_of, describe_engine, make_placement, place_engine, resolve_home
from iep.vocab import NULL, Vocab, index_tokens

PARTS = ("stem", "<END>", "count", "union", "classifier")
TWO = ("cpu", "cuda:0")


def test_round_robin_deals_the_parts_in_their_order() -> None:
    placement = round_robin(PARTS, ("cpu", "cpu", "cpu"))
    assert list(placement.parts.items()) == [("stem", 0), ("<END>", 1), ("count", 2), ("union", 0), ("classifier", 1)]


@given(work=st.lists(st.floats(0, 1e9), min_size=1, max_size=40), count=st.integers(2, 5))
@settings(quick, max_examples=100)
def test_no_device_is_left_with_more_than_the_largest_part_above_another(work: list[float], count: int) -> None:
    parts = {"stem": work[0]} | {f"part {number}": each for number, each in enumerate(work[1:])}
    placement = balanced(parts, ["cpu"] * count)
    assert list(placement.parts) == list(parts)
    assert placement.parts["stem"] == 0
    load = [sum(parts[part] for part, at in placement.parts.items() if at == device) for device in range(count)]
    assert max(load) - min(load) <= max(work) + 1e-3


def test_balanced_gives_the_longest_first_to_who_has_least() -> None:
    work = {"stem": 5.0, "a": 9.0, "b": 4.0, "c": 3.0, "classifier": 3.0}
    # a | stem, b: 9 | 9, and c is dealt to the first of equals; the devices then change names, for the stem's sake.
    assert balanced(work, TWO).parts == {"stem": 0, "a": 1, "b": 0, "c": 1, "classifier": 0}


@pytest.mark.parametrize("devices", [TWO, ("cpu", "cpu")])
def test_a_placement_written_as_yaml_is_read_back_and_travels(devices: tuple[str, ...], tmp_path: Path) -> None:
    placement = round_robin(PARTS, devices)
    (tmp_path / "place.yaml").write_text(placement.to_yaml())
    assert read_placement(tmp_path / "place.yaml", PARTS, devices) == placement
    assert pickle.loads(pickle.dumps(placement)) == placement


def test_a_file_names_devices_or_their_positions(tmp_path: Path) -> None:
    text = "stem: cuda:0\n<END>: cpu\ncount: 1\nunion: 0\nclassifier: cpu\n"
    (tmp_path / "place.yaml").write_text(text)
    placement = read_placement(tmp_path / "place.yaml", PARTS, TWO)
    assert placement.parts == {"stem": 1, "<END>": 0, "count": 1, "union": 0, "classifier": 0}
    homes = placement.homes(("<NULL>", "<END>", "count", "union"))
    assert (homes.inputs, homes.roots, homes.ops) == (1, 0, {1: 0, 2: 1, 3: 0})
    assert homes.devices == (torch.device("cpu"), torch.device("cuda:0"))


@pytest.mark.parametrize(
    ("change", "devices", "words"),
    [
        ({"cuont": "cpu"}, TWO, ["unknown function 'cuont'", "did you mean 'count'"]),
        ({7: "cpu"}, TWO, ["unknown function 7"]),
        ({"count": None}, TWO, ["count is on None", "expected one of the devices cpu, cuda:0"]),
        ({"count": "cuda:1"}, TWO, ["count is on 'cuda:1'", "expected one of the devices cpu, cuda:0"]),
        ({"count": 2}, TWO, ["count is on 2"]),
        ({"count": True}, TWO, ["count is on True"]),
        ({"count": "cpu"}, ("cpu", "cpu"), ["count is on 'cpu'", "2 of the devices", "a position from 0"]),
    ],
)
def test_what_a_file_says_wrong_is_named(change: dict, devices: tuple, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "place.yaml"
    path.write_text(yaml.safe_dump(dict.fromkeys(PARTS, 0) | change))
    with pytest.raises(InputError) as error:
        read_placement(path, PARTS, devices)
    assert all(word in str(error.value) for word in [str(path), *words]), error.value


@pytest.mark.parametrize(
    ("text", "words"),
    [("count: cpu\n", "'stem' has no device (4 of 5 parts"), ("- count", "expected a YAML mapping"), ("{", "not YAML")],
)
def test_a_file_that_is_no_placement_of_all_parts_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "place.yaml").write_text(text)
    with pytest.raises(InputError) as error:
        read_placement(tmp_path / "place.yaml", PARTS, TWO)
    assert words in str(error.value)


def test_operations_are_those_of_the_convolutions_and_linear_layers() -> None:
    tokens = index_tokens(["scene", "count", "union"])
    with torch.device("meta"):
        engine = ExecutionEngine(tokens, num_answers=28)
    flops, sizes = flops_of_parts(engine, (1024, 14, 14))
    assert sizes == (128 * 14 * 14, 14 * 14)
    places, conv = 14 * 14, 2 * 9 * 128 * 128  # multiply and add
    assert flops["scene"] == flops["count"] == flops["<END>"] == 2 * conv * places
    assert flops["union"] == (2 * conv + 2 * 256 * 128) * places
    assert flops["stem"] == (2 * 9 * 1024 * 128 + conv) * places
    assert flops["classifier"] == 2 * 128 * 512 * places + 2 * 512 * 49 * 1024 + 2 * 1024 * 28
    assert list(flops) == list(engine.parts)


def test_functions_count_as_often_as_programs_run_them() -> None:
    programs_BL = matrix([*PROGRAMS_BL.tolist(), program("union", "count")], pad=NULL)  # the last one lacks two scenes
    parts = ("stem", *TOKENS[2:], "classifier")
    calls = calls_of_parts(parts, graph_of(programs_BL, TOKENS, "module").op, TOKENS, len(programs_BL))
    runs = {"scene": 1 + 2 + 2 + 1 + 2, "count": 5, "filter_color[red]": 3, "union": 2, "relate[left]": 2}
    runs |= {"greater_than": 1, "<END>": 1}  # what is missing begins after that <END>
    expected = dict.fromkeys(parts, 0.0) | {part: count / 5 for part, count in runs.items()}
    assert calls == pytest.approx(expected | {"stem": 1.0, "classifier": 1.0})


def make_engine() -> ExecutionEngine:
    sizes = EngineConfig(module_dim=4, stem_widths=(), classifier_projection=4, classifier_hidden=(5,))
    return build("engine", engine_kwargs(sizes, Vocab((), TOKENS, index_tokens(["yes", "no"])), (3, 4, 4)))


def test_balanced_needs_programs_and_says_so() -> None:
    engine, unknown = make_engine(), Sample(None, np.arange(3), "val_questions.h5")
    assert costs_of(engine, unknown).work is None
    with pytest.raises(InputError, match=r"val_questions.h5: has no programs, by which --placement balanced weighs"):
        place_engine(engine, "balanced", ("cpu", "cpu"), unknown)
    costs = place_engine(engine, "round-robin", ("cpu", "cpu"), unknown)
    text = describe_engine("round-robin", engine, costs, unknown, engine.planner(), 8, "float32")
    assert "programs that are not known yet" in text


def test_what_crosses_is_said_in_maps_and_bytes() -> None:
    engine, sample = make_engine(), Sample(PROGRAMS_BL, np.arange(4), "here")
    state = torch.get_rng_state()
    for precision, size in (("float32", 4), ("bfloat16", 2)):
        costs = place_engine(engine, "round-robin", ("cpu", "cpu"), sample)
        text = describe_engine("round-robin", engine, costs, sample, engine.planner(), 4, precision)
        rows = engine.plan(PROGRAMS_BL).layout.rows_moved(0)
        assert rows > 0
        assert f"{rows} maps of {4 * 4 * 4 * size} bytes" in text
        assert "in a minibatch of 4 questions" in text
        assert all(f"{label} " in text for label in ("cpu#0", "cpu#1"))
        assert all(part in text for part in engine.parts)
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("none", ("cpu",)), "--devices cpu is for --placement"),
        (("balanced", ("cpu", "auto")), "'auto' is no device, expected names such as cpu or cuda:0"),
        (("round-robin", ()), "needs two devices or more"),
        (("round-robin", ("cpu",)), "needs two devices or more"),
        (("balanced", ("cpu", "cpu"), "cpu"), "--device cpu together with --devices cpu,cpu"),
        (("balanced", ("cpu", "cpu"), "auto", False), "is for an execution engine, and there is none"),
        (
            ("ballanced", ("cpu", "cpu")),
            "ballanced: no such file, nor one of none, round-robin, balanced; did you mean",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(options: tuple, words: str) -> None:
    with pytest.raises(InputError) as error:
        check_options(*options)
    assert words in str(error.value)


def test_options_that_make_sense_are_taken_and_name_the_device_of_all_that_is_not_placed() -> None:
    for options, home in ((("none", (), "cpu"), "cpu"), (("round-robin", ("cpu", "cpu"), "auto"), "cpu")):
        check_options(*options)
        assert resolve_home(*options) == torch.device(home)
    check_options("none", (), "cpu", has_engine=False)


def test_equal_devices_are_told_apart_by_number() -> None:
    assert Placement(("cpu", "cuda:0"), {}).labels == ("cpu", "cuda:0")
    assert Placement(("cpu", "cpu"), {}).labels == ("cpu#0", "cpu#1")
    assert make_placement("round-robin", ("cpu", "cpu"), PARTS, None, "x").device("stem") == torch.device("cpu")
