"""`iep-eval` run in this process, for the tests of it."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from iep.cli.evaluate import main


def iep_eval(*arguments: object) -> Result:
    """Run the command, networks on the CPU unless `arguments` name several devices."""
    device = () if {"--devices", "--answers"} & {*arguments} else ("--device", "cpu")
    return CliRunner().invoke(main, [str(argument) for argument in (*device, *arguments)])


def evaluate(out: Path, *arguments: object) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """report.json, the rows of predictions.jsonl and what was printed."""
    result = iep_eval("--out", out, *arguments)
    assert result.exit_code == 0, result.output
    predictions = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    return json.loads((out / "report.json").read_text()), predictions, result.stdout
