"""`iep-bench plan`: every node is named once, and placements and op groups are shown."""

import re
from pathlib import Path

from bench_cases import iep_bench
from click.testing import Result

from iep.config import BATCHING

COUNT = "count filter_color[red] scene"
COMPARE = "equal_color query_color unique filter_color[red] scene query_color unique scene"


def calls_of(output: str) -> dict[str, list[tuple[str, int, list[str]]]]:
    """By strategy: function, rows and nodes of every call, in their order."""
    calls: dict[str, list[tuple[str, int, list[str]]]] = {}
    for line in output.splitlines():
        number, _, rest = line.strip().partition(" ")
        if number.removesuffix(":").split("+")[0] in BATCHING:
            calls[number.removesuffix(":")] = found = []
        elif number.isdigit():
            function, rows, *nodes = rest.split()
            assert int(number) == len(found)
            found.append((function, int(rows), nodes))
    return calls


def assert_shown(result: Result, programs: list[str], schedulers: tuple[str, ...]) -> None:
    """Without sharing: all programs, and every scheduler's calls, each node once."""
    assert result.exit_code == 0, result.output
    for number, program in enumerate(programs):
        assert f"example {number}: {program}\n" in result.stdout
    calls = calls_of(result.stdout)
    assert tuple(calls) == schedulers
    for groups in calls.values():
        token_of_node = {node: function for function, _, nodes in groups for node in nodes}
        assert sum(rows for _, rows, _ in groups) == len(token_of_node)
        for number, program in enumerate(programs):
            tokens = program.split()
            assert [token_of_node[f"{number}.{position}"] for position in range(len(tokens))] == tokens


def test_every_node_is_named_once() -> None:
    programs = [COUNT, COMPARE, "scene", f"exist intersect {COUNT} {COMPARE}"]
    given = [word for program in programs for word in ("--program", program)]
    result = iep_bench("plan", "--batching", ",".join(BATCHING), *given)
    assert_shown(result, programs, BATCHING)


def test_shared_nodes_have_one_name() -> None:
    result = iep_bench(
        "plan", "--batching", "improved+sharing", "--questions-per-image", 2, "--program", COUNT, "--program", COMPARE
    )
    assert result.exit_code == 0, result.output
    assert "8 nodes" in result.stdout
    nodes = [node for _, _, nodes in calls_of(result.stdout)["improved+sharing"] for node in nodes]
    assert sorted(nodes) == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2", "1.5", "1.6"]


def test_preprocessed_programs_are_shown(data: Path) -> None:
    result = iep_bench("plan", "--data", data, "--num-samples", 3, "--batching", "standard")
    programs = [line.partition(": ")[2] for line in result.stdout.splitlines() if line.startswith("example")]
    assert len(programs) == 3
    assert_shown(result, programs, ("standard",))


def test_a_plan_says_which_call_runs_where_and_what_is_copied() -> None:
    """Devices that are not there can be planned for."""
    given = ["--placement", "round-robin", "--devices", "cuda:6,cuda:7", "--program", COUNT]
    result = iep_bench("plan", *given)
    assert result.exit_code == 0, result.output
    assert "on device 0, cuda:6" in result.stdout
    assert "the forward pass copies 1 values between devices" in result.stdout
    assert re.search(r"\nops: \d+ is count, \d+ is filter_color\[red\], \d+ is scene\n", result.stdout)


def test_a_call_of_an_op_group_has_several_functions() -> None:
    given = ("--program", COUNT, "--program", "exist filter_shape[cube] scene", "--batching", "lookahead+triton")
    result = iep_bench("plan", *given)
    assert result.exit_code == 0, result.output
    assert "3 calls for 6 nodes" in result.stdout
    assert "filter_color[red] filter_shape[cube]  2" in result.stdout
