"""The scripts of examples/, as a reader runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def output_of(name: str) -> str:
    """What an example prints; it must end well."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run_here():
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == ["lazy_scope.py", "vertex_functions.py"]


def test_vertex_functions_learn_what_expressions_are_worth_in_few_calls():
    lines = output_of("vertex_functions.py").splitlines()
    found = [re.search(r"error (\S+); (\d+) vertices of 64 trees in (\d+) calls", line).groups() for line in lines]
    errors, vertices, calls = zip(*[(float(e), int(v), int(c)) for e, v, c in found], strict=True)
    assert errors[-1] < errors[0] / 4
    assert min(vertices) > 300
    assert max(calls) <= 6


def test_a_lazy_scope_learns_four_sentences_and_says_what_it_batched():
    text = output_of("lazy_scope.py")
    assert float(re.search(r"loss (\S+)", text).group(1)) < 0.1
    assert "Merge" in text
