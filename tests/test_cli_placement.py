"""`--placement` and `--devices`, and `--execution`: results are those of one device, and those of calls."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from batching_cases import assert_same
from device_cases import HAS_TRITON, ONE_GPU, TWO_GPUS
from engine_cases import small_engine
from evaluate_cases import iep_eval
from tiny_data import assert_one_error, newest, tiny
from train_cases import iep_train, rows, weights

from iep.config import read_config
from iep.errors import InputError
from iep.execution_engine.assembly import Running, set_execution
from iep.execution_engine.choices import EXECUTIONS as NAMES
from iep.models.checkpoint import read_checkpoint

EXECUTIONS = tuple(NAMES)
PLACED = ("--placement", "balanced", "--devices", "cpu,cpu")
SETTINGS = [each for each in tiny("ee") if each != "device=cpu"]


def train(out: Path, *arguments: object) -> str:
    result = iep_train("--out", out, *SETTINGS, *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in rows(out) if "loss" in row]


def assert_same_run(actual: Path, expected: Path, relative: float = 1e-3) -> None:
    """Assert the same losses and weights, up to the order of sums."""
    assert losses(actual) == pytest.approx(losses(expected), rel=relative)
    assert_same(weights(newest(actual), "engine"), weights(newest(expected), "engine"), relative)


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one device."""
    out = tmp_path_factory.mktemp("alone") / "run"
    train(out, "--model", "ee", "--data", data, "--device", "cpu")
    return out


@pytest.mark.parametrize(
    "devices",
    ["cpu,cpu,cpu", pytest.param("cpu,cuda:0", marks=ONE_GPU), pytest.param("cuda:0,cuda:1", marks=TWO_GPUS)],
)
@pytest.mark.parametrize("placement", ["round-robin", "balanced"])
def test_training_on_several_devices_is_training_on_one(data, alone, devices, placement, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    given = ("--placement", placement, "--devices", devices, "workers=1")
    text = train(tmp_path / "run", "--model", "ee", "--data", data, *given)
    assert text.count(f"placement {placement}:") == 1
    assert_same_run(tmp_path / "run", alone)


@pytest.mark.parametrize(
    ("first", "then"),
    [(PLACED, ("--device", "cpu")), (("--device", "cpu"), PLACED)],
)
def test_a_run_resumes_on_other_devices_which_checkpoints_do_not_keep(data, alone, first, then, tmp_path) -> None:
    train(tmp_path / "run", "--model", "ee", "--data", data, *first, "iterations=2")
    assert not {"device", "devices", "placement"} & read_checkpoint(newest(tmp_path / "run")).state.config.keys()
    train(tmp_path / "run", "--resume", *then)
    assert_same_run(tmp_path / "run", alone)
    assert read_config(tmp_path / "run" / "config.yaml").devices == (("cpu", "cpu") if then == PLACED else ())


def test_evaluation_on_several_devices_predicts_the_answers_of_one(data, run, tmp_path) -> None:
    given = ["--data", data, "--pg", run["pg"], "--ee", run["ee"]]
    answers = []
    for where in (("--device", "cpu"), PLACED):
        result = iep_eval(*given, *where, "--out", tmp_path)
        assert result.exit_code == 0, result.output
        lines = (tmp_path / "predictions.jsonl").read_text().splitlines()
        answers.append([json.loads(line)["predicted_answer"] for line in lines])
    assert answers[0] == answers[1]
    assert "placement balanced:" in result.stdout
    assert json.loads((tmp_path / "report.json").read_text())["device"] == "cpu,cpu"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--model", "pg", *PLACED], "placement is balanced, devices is"),
        (["placement=balanced", "devices=[cpu,cpu]", "device=cpu"], "--device cpu together with --devices cpu,cpu"),
        (["--placement", "balanced", "--devices", "cpu,cuda:99"], "device 'cuda:99': not available here"),
        (["--device", "cpu", "--devices", "cpu,cpu"], "it cannot go together with --devices"),
        (["--devices", "cpu,,cpu"], "is not a comma-separated list of devices"),
    ],
)
def test_what_cannot_be_placed_is_an_error_before_a_run_begins(given, words, data, tmp_path) -> None:
    result = iep_train("--out", tmp_path / "run", *SETTINGS, "--data", data, *given)
    assert result.exit_code in (1, 2)
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert not (tmp_path / "run" / "config.yaml").exists()


@HAS_TRITON
def test_training_and_evaluation_by_kernels_are_those_of_calls(data, tmp_path) -> None:
    how = ("--data", data, "--device", "cpu", "iterations=1", "batch_size=1", "num_val_samples=1")
    for execution in ("calls", "triton"):
        train(tmp_path / execution, "--model", "ee", *how, "--execution", execution)
        given = ("--data", data, "--device", "cpu", "--execution", execution, "--num-samples", 2)
        result = iep_eval("--ee", tmp_path / "calls", "--out", tmp_path / f"{execution}-eval", *given)
        assert result.exit_code == 0, result.output
    assert yaml.safe_load((tmp_path / "triton" / "config.yaml").read_text())["execution"] == "triton"
    assert_same_run(tmp_path / "triton", tmp_path / "calls")
    found, expected = (json.loads((tmp_path / f"{each}-eval" / "report.json").read_text()) for each in EXECUTIONS[:2])
    assert found["accuracy"] == expected["accuracy"]


@ONE_GPU
@pytest.mark.parametrize("execution", EXECUTIONS[1:])
def test_training_by_kernels_on_a_gpu_is_that_of_calls_and_is_resumed(data, execution, tmp_path) -> None:
    how = ("--device", "cuda", "--precision", "bfloat16")
    train(tmp_path / "calls", "--model", "ee", "--data", data, *how)
    train(tmp_path / "run", "--model", "ee", "--data", data, *how, "--execution", execution, "iterations=2")
    train(tmp_path / "run", "--resume", *how, "--execution", execution)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "calls"), rel=0.05)


@pytest.mark.parametrize(
    ("execution", "given", "message"),
    [
        ("triton", PLACED, "execution is triton, but the engine is placed on several devices; expected calls"),
        ("triton", ["defer_weight_grads=true"], "execution is triton, but defer_weight_grads is for calls, and other"),
        ("triton", ["engine.module_norm=example"], "kernels run only modules whose parameters are all those of conv"),
        ("triton", ["--modules", "vector"], "Triton's kernels are for modules with weights of their own"),
        ("triton", ["--asynchronous", "--threads", 2, "instance_size=4"], "execution"),
        ("cuda_graph", ["--device", "cpu"], "CUDA graphs are for training on a GPU; expected calls"),
    ],
)
def test_an_execution_that_is_not_possible_is_an_error(data, execution, given, message, tmp_path) -> None:
    what = ("--model", "ee", "--data", data, "--execution", execution)
    result = iep_train("--out", tmp_path, *SETTINGS, *what, *given)
    assert_one_error(result, message, code=result.exit_code)
    assert result.exit_code != 0


def test_kernels_need_a_gpu_and_bfloat16(monkeypatch) -> None:
    monkeypatch.setattr("iep.execution_engine.assembly.resolve_device", torch.device)  # without a GPU, too
    engine = small_engine()
    with pytest.raises(InputError, match="kernels compute in bfloat16, and precision is float32; expected calls"):
        set_execution(engine, Running("cuda", execution="triton"))
    set_execution(engine, Running("cuda", execution="triton", precision="bfloat16"))
    assert engine.execution == "triton"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(InputError, match="Triton's kernels run on a GPU, not on cpu"):
        set_execution(small_engine(), Running("cpu", execution="triton"))


def test_evaluation_uses_no_cuda_graphs(data, alone, tmp_path) -> None:
    result = iep_eval("--ee", alone, "--out", tmp_path / "eval", "--data", data, "--execution", "cuda_graph")
    assert_one_error(result, "execution is cuda_graph, but CUDA graphs are for training on a GPU; expected calls")
