"""An engine and minibatches so small that a benchmark of them takes moments, and what a benchmark writes."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

import benchmarks.__main__
import iep.cli.bench

TINY_ENGINE = (
    "engine.module_dim=2",
    "engine.stem_widths=[]",
    "engine.classifier_projection=2",
    "engine.classifier_hidden=[3]",
)
TINY_DATA = ("--feature-shape", "3", "3", "3")


def iep_bench(*arguments: object) -> Result:
    return CliRunner().invoke(iep.cli.bench.main, [str(argument) for argument in arguments])


def laboratory(*arguments: object) -> Result:
    """Run `python -m benchmarks`."""
    return CliRunner().invoke(benchmarks.__main__.main, [str(argument) for argument in arguments])


def measure(*arguments: object) -> Result:
    """Run `iep-bench engine` on the tiny engine and generated data, one round unless `arguments` say otherwise."""
    return iep_bench("engine", "--device", "cpu", "--repeat", 1, *TINY_DATA, *TINY_ENGINE, *arguments)


def report_of(result: Result, out: Path, name: str) -> list[dict[str, Any]]:
    """Return the comparisons of a benchmark's JSON; what it printed must name the command and every row."""
    assert result.exit_code == 0, result.output
    assert [path.name for path in out.iterdir()] == [f"{name}.json"]
    report = json.loads((out / f"{name}.json").read_text())
    assert result.stdout.startswith(f"$ {report['command']}\n")
    assert report["command"].startswith((f"iep-bench {name} ", f"python -m benchmarks {name} "))
    _, *tables, written = result.stdout.split("\n\n")
    assert written == f"Wrote {out / name}.json\n"
    for table, comparison in zip(tables, report["comparisons"], strict=True):
        _, _, *lines = table.splitlines()
        for line, row in zip(lines, comparison["rows"], strict=True):
            assert line.startswith(f"{row['name']} ")
    return report["comparisons"]
