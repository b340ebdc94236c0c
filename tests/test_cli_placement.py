"""`--placement` and `--devices` of the commands: results are those of one device, and what is placed is said."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from batching_cases import assert_same
from bench_cases import TINY_DATA, TINY_ENGINE, iep_bench
from click.testing import CliRunner, Result
from placement_cases import ONE_GPU, TWO_GPUS
from tiny_data import TINY, VOCAB, assert_one_error, newest

from iep.cli.evaluate import main as evaluate_main
from iep.cli.train import main as train_main
from iep.config import read_config
from iep.training.checkpoint import load_checkpoint
from iep.training.records import METRICS

PLACED = ("--placement", "balanced", "--devices", "cpu,cpu")
PARTS = ("stem", *VOCAB.program[2:], "classifier")


def iep_train(out: Path, *arguments: object) -> Result:
    settings = [each for each in TINY if each != "device=cpu"]
    return CliRunner().invoke(train_main, [str(each) for each in ("--out", out, *arguments, *settings)])


def train(out: Path, *arguments: object) -> Path:
    result = iep_train(out, *arguments)
    assert result.exit_code == 0, result.output
    return out


def iep_eval(*arguments: object) -> Result:
    return CliRunner().invoke(evaluate_main, [str(each) for each in arguments])


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in map(json.loads, (out / METRICS).read_text().splitlines()) if "loss" in row]


def assert_same_run(actual: Path, expected: Path) -> None:
    """The same losses and weights, to what the order of sums may change."""
    assert losses(actual) == pytest.approx(losses(expected), rel=1e-4)
    ours, theirs = (load_checkpoint(newest(out))["networks"]["engine"]["weights"] for out in (actual, expected))
    assert_same(ours, theirs, 1e-3)


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one device."""
    return train(tmp_path_factory.mktemp("alone") / "run", "--model", "ee", "--data", data, "--device", "cpu")


@pytest.mark.parametrize(
    "devices",
    [
        "cpu,cpu",
        "cpu,cpu,cpu",
        pytest.param("cpu,cuda:0", marks=ONE_GPU),
        pytest.param("cuda:0,cuda:1", marks=TWO_GPUS),
    ],
)
@pytest.mark.parametrize("placement", ["round-robin", "balanced"])
def test_training_on_several_devices_is_training_on_one(data, alone, devices, placement, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    out = train(tmp_path / "run", "--model", "ee", "--data", data, "--placement", placement, "--devices", devices)
    assert_same_run(out, alone)


def test_the_placement_is_said_once_and_kept_as_a_file_that_places_likewise(data, tmp_path) -> None:
    result = iep_train(tmp_path / "run", "--model", "ee", "--data", data, *PLACED, "workers=1")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("placement balanced:") == 1
    assert "cross in a minibatch of 8 questions on the way forward" in result.stdout
    kept = tmp_path / "run" / "placement.yaml"
    assert tuple(yaml.safe_load(kept.read_text())) == PARTS
    train(tmp_path / "again", "--model", "ee", "--data", data, "--placement", kept, "--devices", "cpu,cpu")
    assert (tmp_path / "again" / "placement.yaml").read_text() == kept.read_text()
    assert_same(
        {"losses": torch.tensor(losses(tmp_path / "again"))}, {"losses": torch.tensor(losses(tmp_path / "run"))}, 0
    )


@pytest.mark.parametrize(
    ("first", "then"),
    [(PLACED, ("--device", "cpu")), (PLACED, ("--placement", "none")), (("--device", "cpu"), PLACED)],
)
def test_a_run_goes_on_on_other_devices(data, alone, first, then, tmp_path) -> None:
    short = [each.replace("iterations=4", "iterations=2") for each in TINY if each != "device=cpu"]
    arguments = ["--out", tmp_path / "run", "--model", "ee", "--data", data, *first, *short]
    assert CliRunner().invoke(train_main, [str(each) for each in arguments]).exit_code == 0
    assert_same_run(train(tmp_path / "run", "--resume", *then), alone)
    config = read_config(tmp_path / "run" / "config.yaml")
    assert config.devices == (("cpu", "cpu") if then == PLACED else ())


def test_a_checkpoint_does_not_remember_devices(data, tmp_path) -> None:
    out = train(tmp_path / "run", "--model", "ee", "--data", data, *PLACED)
    assert not {"device", "devices", "placement"} & load_checkpoint(newest(out))["config"].keys()
    dry = CliRunner().invoke(train_main, ["--out", str(tmp_path / "run"), "--resume", "--dry-run"])
    assert "device: auto\n" in dry.output
    assert "placement: none\n" in dry.output


def test_a_placed_run_repeats_bit_for_bit_and_resumes_so(data, tmp_path) -> None:
    given = ("--model", "ee", "--data", data, "--placement", "round-robin", "--devices", "cpu,cpu,cpu")
    whole = train(tmp_path / "whole", *given)
    short = [each.replace("iterations=4", "iterations=2") for each in TINY if each != "device=cpu"]
    arguments = ["--out", tmp_path / "part", *given, *short]
    assert CliRunner().invoke(train_main, [str(each) for each in arguments]).exit_code == 0
    part = train(tmp_path / "part", "--resume", "--placement", "round-robin", "--devices", "cpu,cpu,cpu")
    ours, theirs = (load_checkpoint(newest(out))["networks"]["engine"]["weights"] for out in (part, whole))
    assert_same(ours, theirs, 0.0)


def test_joint_training_and_training_on_predicted_programs_run_placed(data, parts, tmp_path) -> None:
    for number, given in enumerate(
        (["--model", "joint", *parts], ["--model", "ee", "--programs", "predicted", parts[0]])
    ):
        for name, where in (("alone", ("--device", "cpu")), ("placed", PLACED)):
            train(tmp_path / f"{name}{number}", "--data", data, *given, *where)
        assert losses(tmp_path / f"placed{number}") == pytest.approx(losses(tmp_path / f"alone{number}"), rel=1e-3)


@pytest.mark.parametrize("programs", ["ground-truth", "predicted"])
def test_evaluation_on_several_devices_predicts_what_one_does(data, run, programs, tmp_path) -> None:
    given = ["--data", data, "--pg", run["pg"], "--ee", run["ee"], "--programs", programs]
    for name, where in (("alone", ("--device", "cpu")), ("placed", PLACED)):
        result = iep_eval(*given, *where, "--out", tmp_path / name)
        assert result.exit_code == 0, result.output
    assert "cross in a minibatch of 26 questions" in result.stdout
    alone, placed = ((tmp_path / name / "predictions.jsonl").read_text().splitlines() for name in ("alone", "placed"))
    answers = [[json.loads(line)["predicted_answer"] for line in lines] for lines in (alone, placed)]
    assert answers[0] == answers[1]
    assert json.loads((tmp_path / "placed" / "report.json").read_text())["device"] == "cpu,cpu"


def test_a_split_without_programs_can_be_dealt_but_not_balanced(data, run) -> None:
    given = ["--data", data, "--split", "test", "--pg", run["pg"], "--ee", run["ee"], "--devices", "cpu,cpu"]
    assert_one_error(iep_eval(*given, "--placement", "balanced"), "test_questions.h5", "has no programs", "round-robin")
    result = iep_eval(*given, "--placement", "round-robin")
    assert result.exit_code == 0, result.output
    assert "depends on programs that are not known yet" in result.stdout


def test_a_benchmark_of_a_placed_engine_says_so(tmp_path) -> None:
    given = ["--repeat", 1, "--batch-sizes", 64, "--batching", "lookahead+sharing", "--out", tmp_path]
    result = iep_bench("engine", *PLACED, *given, *TINY_DATA, *TINY_ENGINE)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("placed on cpu#0, cpu#1; milliseconds") == 2
    report = json.loads((tmp_path / "engine.json").read_text())
    assert report["placement"]["devices"] == ["cpu", "cpu"]
    assert set(report["placement"]["parts"].values()) == {0, 1}
    assert all(row["peak_memory"] is None for comparison in report["comparisons"] for row in comparison["rows"])


def test_a_plan_says_which_call_runs_where_and_what_crosses() -> None:
    """Devices that are not there can be planned for."""
    program = ["--program", "count filter_color[red] scene"]
    result = iep_bench("plan", "--placement", "round-robin", "--devices", "cuda:6,cuda:7", *program)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines() if line[:6].strip().isdigit() or "->" in line]
    assert lines == [
        ["1", "scene", "cuda:6", "1", "0.2"],
        ["2", "filter_color[red]", "cuda:6", "1", "0.1"],
        ["cuda:6", "->", "cuda:7:", "1", "row"],
        ["3", "count", "cuda:7", "1", "0.0"],
    ]
    assert "1 maps of 100,352 bytes" in result.stdout


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--model", "pg", *PLACED], "is for an execution engine, and there is none"),
        (["--model", "lstm", *PLACED], "is for an execution engine, and there is none"),
        (["--placement", "balanced"], "needs two devices or more"),
        (["--devices", "cpu,cpu"], "--devices cpu,cpu is for --placement"),
        (["placement=balanced", "devices=[cpu,cpu]", "device=cpu"], "--device cpu together with --devices cpu,cpu"),
        (["--placement", "round-robbin", "--devices", "cpu,cpu"], "did you mean 'round-robin'"),
        (["--placement", "balanced", "--devices", "cpu,cuda:99"], "device 'cuda:99': not available here"),
    ],
)
def test_what_cannot_be_placed_is_named_in_one_line(given, words, data, tmp_path) -> None:
    settings = [each for each in TINY if each != "device=cpu"]
    arguments = ["--data", data, "--out", tmp_path / "run", *settings, *given]
    assert_one_error(CliRunner().invoke(train_main, [str(each) for each in arguments]), words)
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            ["--device", "cpu", "--devices", "cpu,cpu"],
            "--device is for one device; it cannot go together with --devices",
        ),
        (["--device", "cpu", "--placement", "balanced"], "it cannot go together with --placement"),
        (["--devices", "cpu,,cpu"], "is not a comma list of devices"),
    ],
)
def test_wrong_flags_are_usage_errors(given, words, data, tmp_path) -> None:
    for result in (
        iep_train(tmp_path / "run", "--data", data, *given),
        iep_eval("--data", data, *given),
        iep_bench("engine", *given),
    ):
        assert result.exit_code == 2
        assert words in " ".join(result.stderr.replace("│", " ").split())
