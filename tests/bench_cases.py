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
    """Return the comparisons of a benchmark's JSON, whose files must be whole and name every row."""
    assert result.exit_code == 0, result.output
    assert {path.name for path in out.iterdir()} == {f"{name}.json", f"{name}.txt"}
    report, table = json.loads((out / f"{name}.json").read_text()), (out / f"{name}.txt").read_text()
    assert table.startswith(f"$ {report['command']}\n")
    assert report["command"].startswith((f"iep-bench {name} ", f"python -m benchmarks {name} "))
    assert all(line in result.stdout for line in table.splitlines())
    assert len(table.split("\n\n")) == 1 + len(report["comparisons"])
    for comparison in report["comparisons"]:
        for row in comparison["rows"]:
            assert f"\n{row['name']} " in table
    return report["comparisons"]
