"""Engines of attention modules by command: trained, gone on with, evaluated, trained jointly."""

from pathlib import Path

import pytest
import torch
from tiny_data import newest, tiny
from train_cases import iep_train, rows

from iep.models.checkpoint import read_checkpoint


@pytest.fixture(scope="module")
def tbd(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of an engine of attention modules."""
    out = tmp_path_factory.mktemp("tbd") / "run"
    done = iep_train(
        "--modules", "tbd", "--data", data, "--out", out, *tiny("ee"), "workers=1", "attention_penalty=0.001"
    )
    assert done.exit_code == 0, done.output
    return out


def test_a_run_keeps_its_modules_and_tells_the_penalty(tbd: Path):
    engine = read_checkpoint(newest(tbd)).network("engine")
    assert engine.settings["modules"] == "tbd"
    assert not hasattr(engine.module, "unique")
    steps = [row for row in rows(tbd) if "loss" in row]
    assert all(0 < row["attention_penalty"] < row["loss"] for row in steps)
    assert "modules: tbd" in (tbd / "config.yaml").read_text()


def test_validation_names_modules_without_attention_anywhere(data: Path, tbd: Path, tmp_path: Path):
    content = torch.load(newest(tbd), weights_only=True)
    for name, value in content["networks"]["engine"]["weights"].items():
        if name.endswith("conv3.bias"):
            value.fill_(-99.0 if "[red]" in name else 99.0)
    torch.save(content, tmp_path / "start.pt")
    given = ("--data", data, "--ee", tmp_path / "start.pt", "--freeze", "modules", *tiny("ee"))
    result = iep_train(*given, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    (line,) = {line.partition("the attention of ")[2] for line in result.output.splitlines() if "never exceeds" in line}
    assert "filter_color[red]" in line
    assert "filter_color[green]" not in line


def test_joint_training_runs_whatever_the_generator_samples(data: Path, tbd: Path, tmp_path: Path):
    """A generator of one step's training: hardly a program of its is well-formed."""
    started = iep_train("--model", "pg", "--data", data, "--out", tmp_path / "pg", *tiny("pg"), "iterations=1")
    assert started.exit_code == 0, started.output
    starts = ["--pg", tmp_path / "pg", "--ee", tbd]
    for number, sharing in enumerate(("sharing=true", "sharing=false")):
        out = tmp_path / str(number)
        settings = [*tiny("joint"), sharing, "attention_penalty=0.0001", "temperature=2"]
        done = iep_train("--model", "joint", *starts, "--data", data, "--out", out, *settings)
        assert done.exit_code == 0, done.output
    ours, theirs = (rows(tmp_path / name) for name in "01")
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], rel=1e-5)
    assert ours[0]["attention_penalty"] == pytest.approx(theirs[0]["attention_penalty"], rel=1e-5)
