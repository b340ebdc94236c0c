"""The scripts of examples/ run to their ends, and print what they promise."""

import re
import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def output_of(name: str, capsys) -> str:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_vertex_functions_learn_the_values_of_expressions_in_few_calls(capsys):
    lines = output_of("vertex_functions.py", capsys).splitlines()
    found = [re.search(r"error (\S+); (\d+) vertices of 64 trees in (\d+) calls", line).groups() for line in lines]
    errors, vertices, calls = zip(*[(float(e), int(v), int(c)) for e, v, c in found], strict=True)
    assert errors[-1] < errors[0] / 4
    assert min(vertices) > 300
    assert max(calls) <= 6


def test_a_lazy_scope_learns_four_sentences_and_reports_what_it_batched(capsys):
    text = output_of("lazy_scope.py", capsys)
    assert float(re.search(r"loss (\S+)", text).group(1)) < 0.1
    assert "Merge" in text
