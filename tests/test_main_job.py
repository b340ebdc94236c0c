"""The main job as a user runs it: real processes, one command after the other, from a seed to a table of accuracies."""

import json
import re
from pathlib import Path

import processes

ROOT = Path(__file__).parents[1]
SMALL = ("iterations=2", "validate_every=1", "log_every=1", "batch_size=8", "warmup=0", "curriculum=[]")


def run(command: str, *arguments: str) -> str:
    """Return the output of `iep-COMMAND`, which must end well."""
    ended = processes.run(command, arguments, cwd=ROOT)
    assert ended.returncode == 0, ended.output
    return ended.output


def test_a_seed_becomes_a_trained_and_evaluated_model(tmp_path: Path):
    clevr, data, runs = (str(tmp_path / name) for name in ("clevr", "data", "runs"))
    run("synth", clevr, "--preset", "mini", "--train", "12", "--val", "3", "--test", "1")
    run("preprocess", clevr, "--out", data, "--dtype", "float16")
    for model in ("pg", "lstm", "tbd"):
        run("train", "--config", f"configs/mini/{model}.yaml", "--data", data, "--out", f"{runs}/{model}", *SMALL)
    parts = ("--pg", f"{runs}/pg", "--ee", f"{runs}/tbd")
    run("train", "--config", "configs/mini/joint.yaml", "--data", data, *parts, "--out", f"{runs}/joint", *SMALL)
    joint = ("--pg", f"{runs}/joint", "--ee", f"{runs}/joint", "--data", data)
    run("evaluate", "--baseline", f"{runs}/lstm", "--data", data, "--out", f"{runs}/eval/lstm")
    table = run("evaluate", *joint, "--out", f"{runs}/eval/val", "--against", "lstm", f"{runs}/eval/lstm")
    rows = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]
    heading = rows.index(["questions", "most common answer", "lstm", "model"])
    assert rows[heading + 1][:2] == ["overall", "60"]
    report = json.loads((tmp_path / "runs/eval/val/report.json").read_text())
    assert report["questions"] == 60
    assert "no answers" in run("evaluate", *joint, "--split", "test", "--out", f"{runs}/eval/test")
    assert len((tmp_path / "runs/eval/test/predictions.jsonl").read_text().splitlines()) == 20
