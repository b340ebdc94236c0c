"""`iep-train`: what it prints and leaves, that mistakes are one line, and what a full disk leaves standing."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from tiny_data import assert_one_error, files_no_larger_than, newest, tiny, tiny_config, write_data
from train_cases import iep_train

from iep.config import Config, read_config
from iep.models.checkpoint import BEST, read_checkpoint
from iep.runtime.records import METRICS, Records
from iep.training.run_training import train

COMMANDS = ("ask", "bench", "evaluate", "preprocess", "synth", "train")


@pytest.fixture
def run(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the LSTM's run, to go on with or to damage."""
    return Path(shutil.copytree(runs["lstm"], tmp_path / "run"))


def step(out: Path) -> int:
    return read_checkpoint(newest(out)).state.step


# What it does


def test_a_real_process_trains_and_says_where(data: Path, tmp_path: Path):
    arguments = ["--model", "ee", "--data", data, "--out", tmp_path / "run", *tiny("ee"), "workers=1"]
    command = [sys.executable, "-m", "iep.cli.train", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "run"
    before, *lines, last = done.stdout.splitlines()
    memory = r"[\d.]+ MB with gradients and optimiser state"
    assert re.fullmatch(rf"{out}: ee in float32 on cpu, \d+ threads?, [\d,]+ parameters; {memory}", before)
    assert lines[0] == f"{data}: 39 questions about 5 images of train and 26 questions about 5 images of val"
    accuracies = ["ee before the first iteration", "ee iteration 2", "ee iteration 4"]
    assert [line.partition(": validation accuracy ")[0] for line in lines[2:]] == accuracies
    best = rf"{out}: trained ee to iteration 4; the best checkpoint is {out / BEST}, of iteration (\d), validation .*%"
    assert int(re.fullmatch(best, last)[1]) == read_checkpoint(out / BEST).state.step
    assert "questions/s" in done.stderr
    assert "Warning" not in done.stderr
    assert step(out) == 4


def test_a_tracker_gets_the_settings_and_the_metrics(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given, logged = {}, []

    def init(**arguments: object) -> SimpleNamespace:
        given.update(arguments)
        return SimpleNamespace(log=lambda row, step: logged.append({"step": step, **row}))

    start = ("--model", "lstm", *tiny("lstm"), "iterations=2", "validate_every=2", "tracker=trackio")
    monkeypatch.setitem(sys.modules, "trackio", None)
    message = "tracker trackio is not installed; pip install 'iep[trackio]'"
    assert_one_error(iep_train(*start, "--data", "nowhere", "--out", tmp_path / "none"), message)  # before the data
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init, __spec__=True))
    assert iep_train(*start, "--data", data, "--out", tmp_path / "run").exit_code == 0
    assert (given["project"], given["name"], given["config"]["batch_size"]) == ("iep", "run", 8)
    assert logged == [json.loads(line) for line in (tmp_path / "run" / METRICS).read_text().splitlines()]
    assert {"loss", "accuracy", "validation_accuracy"} < set().union(*logged)


def test_a_dry_run_prints_the_resolved_settings_and_leaves_nothing(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("batch_size: 5\nseed: 5\n")
    result = iep_train("--dry-run", "--config", tmp_path / "a.yaml", "--model", "pg", "seed=6")
    assert result.exit_code == 0
    (tmp_path / "printed.yaml").write_text(result.output)
    used = ["model=pg", "batch_size=5", "seed=6", "learning_rate=5e-4"]  # published, in place of None
    assert read_config(tmp_path / "printed.yaml") == read_config(None, used)
    assert {path.name for path in tmp_path.iterdir()} == {"a.yaml", "printed.yaml"}


def test_help_shows_settings_of_a_model_and_an_unknown_key_suggests_the_one_with_these_initials():
    shown = iep_train("--help-settings", "pg").output
    assert "generator.hidden_dim  (integer; default: 256)\n    The width of the LSTMs." in shown
    assert "engine." not in shown
    assert "engine.module_dim" in iep_train("--help-settings").output
    assert_one_error(iep_train("--dry-run", "lr=1"), "unknown key 'lr'; did you mean 'learning_rate'?")


def test_every_option_reaches_its_setting(tmp_path: Path):
    flags = "--model ee --data d --pg p --ee e --programs predicted --batching standard --precision bfloat16 keep=5"
    flags += " --device cpu --num-train-samples 7 num_val_samples=8 --no-sharing defer_weight_grads=true"
    flags += " --freeze stem,modules"
    result = iep_train("--dry-run", "--out", tmp_path / "run", *flags.split(), "pg=null", "ee=null", "learning_rate=1")
    (tmp_path / "printed.yaml").write_text(result.output)
    places = {"data": "d", "pg": "p", "ee": "e", "device": "cpu"}
    speed = {"batching": "standard", "precision": "bfloat16", "sharing": False, "defer_weight_grads": True}
    counts = {"num_train_samples": 7, "num_val_samples": 8, "keep": 5, "learning_rate": 1.0}
    expected = Config(model="ee", programs="predicted", freeze=("stem", "modules"), **places, **speed, **counts)
    assert read_config(tmp_path / "printed.yaml") == expected


def test_a_clevr_directory_must_be_preprocessed_first(tmp_path: Path):
    for name in ("questions", "images"):
        (tmp_path / name).mkdir()
    result = iep_train("--data", tmp_path, "--out", tmp_path / "run")
    assert_one_error(result, f"{tmp_path}: not preprocessed yet; run iep-preprocess {tmp_path} --out DIR")


# Resuming


def test_resuming_takes_the_settings_saved_and_those_given_over_them(run: Path):
    before = read_config(run / "config.yaml")
    (run.parent / "a.yaml").write_text("batch_size: 4\n")
    given = ("--resume", "--out", run, "--config", run.parent / "a.yaml", "iterations=6", "device=cpu")
    shown = iep_train("--dry-run", *given).output
    assert {"batch_size: 4", "iterations: 6", "  hidden_dim: 10"} <= set(shown.splitlines())
    assert step(run) == 4
    result = iep_train(*given)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith(f"{run}: trained lstm to iteration 6; the best checkpoint is ")
    assert step(run) == 6
    assert read_config(run / "config.yaml") == read_config(None, ["iterations=6", "batch_size=4"], base=before)


def test_a_run_is_resumed_in_another_directory_and_with_moved_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_data(tmp_path / "data")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    result = iep_train("--model", "lstm", "--data", "data", "--out", "run", *tiny("lstm"), "iterations=1")
    assert result.exit_code == 0, result.output
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert iep_train("--out", tmp_path / "run", "--resume", "iterations=2").exit_code == 0
    (tmp_path / "data").rename(tmp_path / "moved")
    assert_one_error(iep_train("--out", tmp_path / "run", "--resume", "iterations=3"), "data/vocab.json: no such file")
    iep_train("--out", tmp_path / "run", "--resume", "iterations=3", "--data", "../moved")
    assert step(tmp_path / "run") == 3


def test_the_length_of_programs_follows_the_data_and_is_stored_for_whoever_answers(data: Path, tmp_path: Path):
    copied = shutil.copytree(data, tmp_path / "data")
    with h5py.File(copied / "train_questions.h5", "r+") as file:
        programs = file["programs"][()]
        del file["programs"]
        file["programs"] = np.pad(programs, ((0, 0), (0, 40 - programs.shape[1])))
        file.attrs.pop("content_digest", None)
    for name, given, expected in (("long", (), 40), ("short", ("max_program_length=3",), 3)):
        config = tiny_config(copied, "pg", "iterations=1", *given)
        train(config, tmp_path / name, resume=False)
        generator = read_checkpoint(tmp_path / name).network("generator").module.eval()
        assert generator.max_program_length == expected


def test_a_run_is_not_resumed_as_another_model(run: Path):
    result = iep_train("--resume", "--out", run, "--model", "ee")
    assert_one_error(result, f"{newest(run)}: holds a run of model lstm, cannot resume it as ee")


def test_a_run_without_a_checkpoint_is_begun_anew_with_its_settings(data: Path, tmp_path: Path):
    given = ("--out", tmp_path / "run", "--model", "lstm", "--data", data, *tiny("lstm"))
    result = iep_train(*given, "learning_rate=1e15", "weight_decay=1e15")
    assert_one_error(result, "the loss is nan at iteration 2")
    begun = read_config(tmp_path / "run" / "config.yaml")
    usable = ("learning_rate=0.01", "weight_decay=0")
    result = iep_train("--out", tmp_path / "run", "--resume", *usable, "device=cpu")
    assert result.exit_code == 0, result.output
    assert read_config(tmp_path / "run" / "config.yaml") == read_config(None, usable, base=begun)


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "problem", "code"),
    [
        ("--out {run} batchsize=3", "batchsize=3: unknown key 'batchsize'; did you mean 'batch_size'?", 1),
        (
            "--out {run} --model pg temperature=1 --programs predicted engine.module_dim=77 --sharing",
            "programs is predicted, sharing is True, temperature is 1.0, engine.module_dim is 77, which training pg",
            1,
        ),
        ("--out {run} --model lstm --modules tbd", "engine.modules is tbd, which training lstm does not use", 1),
        ("--out {run} --config mini/pgg", "nor the name of a config of this package; did you mean 'mini/pg'?", 1),
        ("--out {run} --model eee", "'eee' is not one of", 2),
        ("--out {run} --data nowhere", "nowhere/vocab.json: no such file", 1),
        ("--out {run} --resume", "{run}: holds no run to resume", 1),
        ("--out {run}", "no data: give --data DIR, a directory written by iep-preprocess", 1),
        ("--out {run} --model backbone", "no data: give --data DIR, a directory in CLEVR's layout", 1),
        ("--out {run} --model backbone --data nowhere", "nowhere/scenes/CLEVR_train_scenes.json: no such file", 1),
        ("--model ee", "Missing option '--out'", 2),
        ("--out {file}", "is a file", 2),
        ("--out {file}/run --model lstm", "file/run: Not a directory", 1),
        ("--out ''", "'--out': the name is empty, expected a directory", 2),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(tmp_path: Path, arguments: str, problem: str, code: int):
    names = {"run": tmp_path / "run", "file": tmp_path / "file"}
    names["file"].write_text("")
    assert_one_error(iep_train(*shlex.split(arguments.format(**names))), problem.format(**names), code=code)
    assert not names["run"].exists()


def test_an_environment_that_torchrun_would_not_make_is_one_line(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_one_error(iep_train("--out", tmp_path), "environment variable RANK expected, but not set")


# What all commands share


def test_help_needs_no_torch():
    code = f"""if True:
        import importlib, sys
        for command in {COMMANDS}:
            importlib.import_module("iep.cli." + command).main(["--help"], standalone_mode=False)
        sys.exit("torch" in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False).returncode == 0


# A full disk


@pytest.mark.parametrize(("size", "name"), [(20_000, ".pt"), (2500, METRICS)])
def test_a_full_disk_is_one_line_that_names_the_file(run: Path, size: int, name: str):
    before = newest(run).read_bytes()
    with files_no_larger_than(size):
        result = iep_train("--resume", "--out", run, "iterations=24", "validate_every=24")
    assert_one_error(result, f"{run}/", name, "file size limit reached")
    assert newest(run).read_bytes() == before
    assert not list(run.glob(".*"))
    assert iep_train("--resume", "--out", run, "iterations=24").exit_code == 0
    recorded = [json.loads(line)["step"] for line in (run / METRICS).read_text().splitlines()]
    assert sorted(set(recorded)) == list(range(1, 25))
    assert recorded == sorted(recorded)


def test_a_board_that_cannot_be_written_is_named(tmp_path: Path):
    def write_rows() -> None:
        with files_no_larger_than(500):
            records = Records(tmp_path, step=0)
            for number in range(20):
                records.write(number, {"a": 1})

    with pytest.raises(OSError, match="File too large") as caught:
        write_rows()
    assert Path(caught.value.filename).parent == tmp_path / "tensorboard"
