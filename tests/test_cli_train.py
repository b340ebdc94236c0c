"""`iep-train`: what it prints and leaves, that mistakes are one line, and what a full disk leaves standing."""

import json
import pickle
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import h5py
import pytest
import torch
from click.testing import CliRunner, Result
from tiny_data import (
    TRAIN,
    VOCAB,
    arrays,
    assert_error_lines,
    assert_one_error,
    features,
    files_no_larger_than,
    newest,
    tiny,
    write_data,
    write_h5,
)

import iep
from iep.cli.command import Command
from iep.cli.train import main
from iep.config import Config, read_config
from iep.errors import InputError
from iep.models.checkpoint import BEST, load_checkpoint, save_checkpoint
from iep.runtime.files import write_json
from iep.runtime.records import METRICS, Records
from iep.training.loop import Trainer
from iep.training.run_training import TORCHRUN


@pytest.fixture
def run(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the LSTM's run, to go on with or to damage."""
    return Path(shutil.copytree(runs["lstm"], tmp_path / "run"))


def iep_train(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def step(out: Path) -> int:
    return load_checkpoint(newest(out))["step"]


# What it does


def test_a_real_process_trains_and_says_where(data: Path, tmp_path: Path):
    arguments = ["--model", "ee", "--data", data, "--out", tmp_path / "run", *tiny("ee"), "workers=1"]
    command = [sys.executable, "-m", "iep.cli.train", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "ee iteration 4: validation accuracy" in done.stdout
    out = tmp_path / "run"
    before, *lines, last = done.stdout.splitlines()
    assert re.fullmatch(rf"{out}: ee on cpu, [\d,]+ parameters", before)
    assert lines[0] == f"{data}: 39 questions about 5 images of train and 26 questions about 5 images of val"
    assert lines[1] == "iterations 1 to 4, 8 questions each"
    assert lines[2].startswith("ee before the first iteration: validation accuracy ")
    best = rf"{out}: trained ee to iteration 4; the best checkpoint is {out / BEST}, of iteration (\d), validation .*%"
    assert int(re.fullmatch(best, last)[1]) == load_checkpoint(out / BEST)["step"]
    assert "questions/s" in done.stderr
    assert "Warning" not in done.stderr
    assert step(tmp_path / "run") == 4


def test_a_dry_run_prints_the_resolved_settings_and_leaves_nothing(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("batch_size: 5\nseed: 5\n")
    result = iep_train(
        "--dry-run", "--out", tmp_path / "run", "--config", tmp_path / "a.yaml", "--model", "pg", "seed=6"
    )
    assert result.exit_code == 0
    (tmp_path / "printed.yaml").write_text(result.output)
    assert read_config(tmp_path / "printed.yaml") == read_config(None, ["model=pg", "batch_size=5", "seed=6"])
    assert not (tmp_path / "run").exists()


def test_a_dry_run_needs_no_torch():
    code = (
        "import sys; from iep.cli.train import main; main(['--dry-run', '--out', 'x'], standalone_mode=False);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_every_option_reaches_its_setting(tmp_path: Path):
    options = {
        "model": "ee",
        "data": "d",
        "pg": "p",
        "ee": "e",
        "programs": "predicted",
        "batching": "standard",
        "num_train_samples": 7,
        "num_val_samples": 8,
        "precision": "bfloat16",
        "device": "cpu",
        "keep": 5,
    }
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    flags += ["--no-sharing", "--defer-weight-grads", "--freeze", "stem,modules"]
    result = iep_train("--dry-run", "--out", tmp_path / "run", *flags, *(f"{name}=null" for name in ("pg", "ee")))
    (tmp_path / "printed.yaml").write_text(result.output)
    assert read_config(tmp_path / "printed.yaml") == Config(
        **options, freeze=("stem", "modules"), sharing=False, defer_weight_grads=True
    )


def test_joint_training_takes_runs_for_checkpoints(data: Path, runs: dict[str, Path], tmp_path: Path):
    starts = ["--pg", runs["pg"], "--ee", runs["ee"] / BEST]
    result = iep_train("--model", "joint", "--data", data, "--out", tmp_path / "run", *starts, *tiny("joint"))
    assert result.exit_code == 0
    assert set(load_checkpoint(tmp_path / "run")["networks"]) == {"generator", "engine"}
    saved = read_config(tmp_path / "run" / "config.yaml")
    assert (saved.pg, saved.ee) == (str(runs["pg"]), str(runs["ee"] / BEST))


def test_only_the_samples_asked_for_are_read(data: Path, tmp_path: Path):
    options = ["--num-train-samples", 3, "--num-val-samples", 5]
    result = iep_train("--model", "lstm", "--data", data, "--out", tmp_path / "run", *options, *tiny("lstm"))
    assert result.exit_code == 0
    accuracies = [
        row["validation_accuracy"]
        for row in map(json.loads, (tmp_path / "run" / METRICS).read_text().splitlines())
        if "validation_accuracy" in row
    ]
    assert all((5 * accuracy) == pytest.approx(round(5 * accuracy), abs=1e-5) for accuracy in accuracies)


# Resuming


def test_a_restart_by_the_torchrun_that_began_a_run_goes_on_with_it_and_no_other_does(data, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    out = tmp_path / "run"
    given = ("--out", out, "--model", "lstm", "--data", data, *tiny("lstm"))
    assert iep_train(*given, "iterations=2").exit_code == 0
    went_on = iep_train(*given, "iterations=4")
    assert went_on.exit_code == 0, went_on.output
    assert step(out) == 4
    (out / TORCHRUN).write_text("another")
    for _ in range(2):  # a refused start is no beginning either
        assert_one_error(iep_train(*given, "iterations=6"), f"{out}: already holds a run; add --resume")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert_one_error(iep_train(*given, "iterations=6"), f"{out}: already holds a run; add --resume")


def test_resuming_nothing_is_a_fresh_start(data: Path, tmp_path: Path):
    result = iep_train("--resume", "--model", "lstm", "--data", data, "--out", tmp_path / "run", *tiny("lstm"))
    assert result.exit_code == 0
    assert step(tmp_path / "run") == 4


def test_resuming_takes_the_settings_saved_and_those_given_over_them(run: Path):
    before = read_config(run / "config.yaml")
    result = iep_train("--resume", "--out", run, "iterations=6", "batch_size=4", "device=cpu")
    assert result.exit_code == 0
    assert f"{run}: resumes with iterations 6 instead of 4, batch_size 4 instead of 8\n" in result.stdout
    assert result.stdout.splitlines()[-1].startswith(f"{run}: trained lstm to iteration 6; the best checkpoint is ")
    assert step(run) == 6
    assert read_config(run / "config.yaml") == read_config(None, ["iterations=6", "batch_size=4"], base=before)


def test_a_file_given_again_changes_nothing_unless_it_has_changed(data: Path, tmp_path: Path):
    file, out = tmp_path / "a.yaml", tmp_path / "run"
    file.write_text("model: lstm\niterations: 8\nlog_every: 1\n")
    again = ("--out", out, "--config", file, "--resume")
    assert iep_train(*again, "--data", data, *tiny("lstm"), "iterations=2").exit_code == 0
    result = iep_train(*again)
    assert result.output == f"{out}: already trained to iteration 2 or further; nothing to do\n"
    file.write_text("model: lstm\niterations: 3\nlog_every: 1\n")
    result = iep_train(*again)
    assert f"{out}: resumes with iterations 3 instead of 2\n" in result.output
    assert step(out) == 3
    file.write_text("model: lstm\nlstm: {hidden_dim: 9}\n")
    assert_one_error(iep_train(*again), "was trained with lstm.hidden_dim 10, cannot resume with lstm.hidden_dim 9")


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
    result = iep_train("--out", tmp_path / "run", "--resume", "iterations=3", "--data", "../moved")
    assert f"data {tmp_path / 'moved'} instead of {tmp_path / 'data'}" in result.output
    assert step(tmp_path / "run") == 3


def test_a_checkpoint_of_another_model_among_a_runs_own_is_refused(runs: dict[str, Path], run: Path):
    content = load_checkpoint(newest(runs["ee"]))
    save_checkpoint(run / "step-9.pt", content | {"step": 9})
    result = iep_train("--resume", "--out", run, "iterations=10")
    assert_one_error(result, f"{run / 'step-9.pt'}: holds a run of model ee, cannot resume it as lstm")


def test_a_run_without_a_checkpoint_is_begun_anew_with_its_settings(data: Path, tmp_path: Path):
    given = ("--out", tmp_path / "run", "--model", "lstm", "--data", data, *tiny("lstm"))
    assert iep_train(*given, "learning_rate=1e30").exit_code == 1
    begun = read_config(tmp_path / "run" / "config.yaml")
    result = iep_train("--out", tmp_path / "run", "--resume", "learning_rate=0.01", "device=cpu")
    assert result.exit_code == 0, result.output
    assert read_config(tmp_path / "run" / "config.yaml") == read_config(None, ["learning_rate=0.01"], base=begun)


def test_a_damaged_best_checkpoint_is_named_by_resuming_and_by_evaluation(data: Path, run: Path):
    damaged = run / BEST
    content = bytearray(damaged.read_bytes())
    for place in range(len(content) // 2, len(content) // 2 + 128):  # an archive has gaps of up to 63 bytes
        content[place] ^= 1
    damaged.write_bytes(content)
    assert_one_error(iep_train("--resume", "--out", run, "iterations=6"), f"{damaged}: not a whole checkpoint file")
    with pytest.raises(InputError, match=rf"{BEST}: not a whole .*; the newest .*: to use it, name {run}/step-4.pt$"):
        load_checkpoint(run)
    damaged.unlink()
    assert iep_train("--resume", "--out", run, "iterations=6", "device=cpu").exit_code == 0
    assert load_checkpoint(damaged)["step"] == 6


def test_a_run_directory_that_goes_away_ends_the_run(data: Path, tmp_path: Path, monkeypatch):
    def gone(self, name: str) -> None:
        shutil.rmtree(tmp_path / "run")
        save(self, name)

    save = Trainer.save
    monkeypatch.setattr(Trainer, "save", gone)
    result = iep_train("--out", tmp_path / "run", "--model", "lstm", "--data", data, *tiny("lstm"))
    assert_one_error(result, f"{tmp_path / 'run'}: the run directory is gone; nothing is saved of iteration 2")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("iterations", [2, 4])
def test_resuming_a_complete_run_says_that_there_is_nothing_to_do(run: Path, iterations: int):
    result = iep_train("--resume", "--out", run, f"iterations={iterations}")
    assert result.exit_code == 0
    assert result.output == f"{run}: already trained to iteration {iterations} or further; nothing to do\n"
    assert step(run) == 4


def test_a_dry_runs_resuming_prints_the_settings_saved(run: Path):
    result = iep_train("--resume", "--dry-run", "--out", run, "seed=9")
    assert result.exit_code == 0
    assert "hidden_dim: 10" in result.output
    assert "seed: 9" in result.output
    assert step(run) == 4


# Mistakes


def test_a_run_is_not_overwritten(data: Path, run: Path):
    before = newest(run).read_bytes()
    result = iep_train("--model", "lstm", "--data", data, "--out", run, *tiny("lstm"))
    assert_one_error(result, f"{run}: already holds a run; add --resume")
    assert newest(run).read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "problem", "code"),
    [
        (["batchsize=3"], "batchsize=3: unknown key 'batchsize'; did you mean 'batch_size'?", 1),
        (["batch_size=0"], "batch_size=0: batch_size is 0, expected at least 1", 1),
        (["batch_size"], "'batch_size': expected key=value", 1),
        (["clip_gradients=0"], "clip_gradients is 0.0, expected at least", 1),
        (
            ["--model", "pg", "temperature=1", "--programs", "predicted", "engine.module_dim=77", "--sharing"],
            "programs is predicted, sharing is True, temperature is 1.0, engine.module_dim is 77, which training pg",
            1,
        ),
        (["--config", "mini/pgg"], "nor the name of a config of this package; did you mean 'mini/pg' or", 1),
        (["--model", "eee"], "'eee' is not one of", 2),
        (["--num-train-samples", "0"], "0 is not in the range x>=1", 2),
        (["--programs", "guessed"], "'guessed' is not one of", 2),
        (["--batchin", "improved"], "No such option", 2),
        (["--config", "none.yaml"], "none.yaml: no such file", 1),
        (["--data", "nowhere"], "nowhere/vocab.json: no such file", 1),
        (["--data", "nowhere", "--device", "cuda:99"], "device 'cuda:99': not available here", 1),
        ([], "no data: give --data DIR", 1),
        (["--pg", "none.pt", "--programs", "predicted"], "no data: give --data DIR", 1),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(tmp_path: Path, arguments: list[str], problem: str, code: int):
    assert_one_error(iep_train("--out", tmp_path / "run", *arguments), problem, code=code)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("data", [[], ["--data", "nowhere"]])
def test_resuming_what_is_no_run_says_so_where_no_new_one_can_begin(tmp_path: Path, data: list[str]):
    problem = "nowhere/vocab.json: no such file" if data else f"{tmp_path / 'run'}: holds no run to resume"
    assert_one_error(iep_train("--out", tmp_path / "run", "--resume", *data), problem)
    assert not (tmp_path / "run").exists()


def test_a_missing_run_directory_option_is_a_usage_error():
    assert_one_error(iep_train("--model", "ee"), "Missing option '--out'", code=2)


def test_a_file_in_place_of_the_run_directory_is_a_usage_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert_one_error(iep_train("--out", tmp_path / "file"), "is a file", code=2)
    assert_one_error(iep_train("--out", ""), "'--out': the name is empty, expected a directory", code=2)
    assert_one_error(iep_train("--out", tmp_path / "file" / "run", "--model", "lstm"), "file/run: Not a directory")


def test_a_bad_config_file_is_named(tmp_path: Path):
    (tmp_path / "run.yaml").write_text("engine: {module_dims: 3}")
    result = iep_train("--out", tmp_path / "run", "--config", tmp_path / "run.yaml")
    assert_one_error(result, f"{tmp_path / 'run.yaml'}: unknown key 'engine.module_dims'; did you mean 'module_dim'?")


def damage_vocab(data: Path) -> tuple[Path, str]:
    content = VOCAB.to_json()
    del content["answer_token_to_idx"]
    write_json(data / "vocab.json", content)
    return data / "vocab.json", "'answer_token_to_idx' is missing"


def cut(name: str) -> object:
    def damage(data: Path) -> tuple[Path, str]:
        content = (data / name).read_bytes()
        (data / name).write_bytes(content[: len(content) // 2])
        return data / name, "not a whole HDF5 file"

    return damage


def drop_programs(data: Path) -> tuple[Path, str]:
    datasets = arrays(TRAIN)
    del datasets["programs"]
    return write_h5(data / "train_questions.h5", datasets), "has no programs, which training ee needs"


def exceed_vocab(data: Path) -> tuple[Path, str]:
    datasets = arrays(TRAIN)
    datasets["answers"][4] = 300
    return write_h5(data / "train_questions.h5", datasets), "answers, row 4: index 300 is not in the vocabulary"


def lose_images(data: Path) -> tuple[Path, str]:
    return write_h5(data / "val_features.h5", {"features": features(1)[:2]}), "holds 2 images, but question 1 of"


@pytest.mark.parametrize(
    "damage",
    [damage_vocab, cut("train_questions.h5"), cut("val_features.h5"), drop_programs, exceed_vocab, lose_images],
)
def test_damaged_data_are_named_before_anything_is_written(tmp_path: Path, damage):
    data = write_data(tmp_path / "data")
    path, problem = damage(data)
    result = iep_train("--model", "ee", "--data", data, "--out", tmp_path / "run", *tiny("ee"))
    assert_one_error(result, f"{path}: ", problem)
    assert not (tmp_path / "run").exists()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2000])


def trap(path: Path) -> None:
    path.write_bytes(pickle.dumps({"format": "iep-checkpoint-1", "a": print}))


def replace_by_anothers(path: Path) -> None:
    torch.save({"model_state": {}}, path)


@pytest.mark.parametrize("damage", [truncate, trap, replace_by_anothers])
@pytest.mark.parametrize("use", ["resume", "start"])
def test_a_bad_checkpoint_is_named(data: Path, run: Path, tmp_path: Path, damage, use: str):
    damage(newest(run))
    if use == "resume":
        result = iep_train("--resume", "--out", run)
    else:
        options = ["--programs", "predicted", "--pg", newest(run)]
        result = iep_train("--model", "ee", "--data", data, "--out", tmp_path / "new", *options, *tiny("ee"))
        assert not (tmp_path / "new").exists()
    assert_one_error(result, f"{newest(run)}: not ")


def test_a_checkpoint_of_another_model_is_named(data: Path, runs: dict[str, Path], tmp_path: Path):
    swapped = ["--pg", runs["ee"], "--ee", runs["pg"]]
    result = iep_train("--model", "joint", "--data", data, "--out", tmp_path / "run", *swapped, *tiny("joint"))
    assert_one_error(result, f"{runs['ee']}: holds an execution engine, expected a checkpoint with a program generator")


def test_features_that_become_unreadable_while_training_are_one_line(tmp_path: Path):
    data = write_data(tmp_path / "data")
    with h5py.File(data / "train_features.h5", "w") as file:
        file.create_dataset("features", data=features(0), chunks=(1, 3, 4, 4), compression="gzip", fletcher32=True)
        start = file["features"].id.get_chunk_info(2).byte_offset
    with open(data / "train_features.h5", "r+b") as file:
        file.seek(start + 10)
        file.write(bytes(30))
    arguments = ["--model", "ee", "--data", data, "--out", tmp_path / "run", *tiny("ee"), "workers=1"]
    assert_one_error(iep_train(*arguments), f"{data / 'train_features.h5'}: features, row 2 cannot be read")


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        ("two", "WORLD_SIZE is 'two', expected a whole number, as torchrun sets it"),
        ("2", "RANK is not set, expected a number below WORLD_SIZE, which is 2"),
        ("0", "RANK is not set, expected a number below WORLD_SIZE, which is 0"),
    ],
)
def test_an_environment_that_torchrun_would_not_make_is_one_line(tmp_path: Path, monkeypatch, size: str, problem: str):
    monkeypatch.setenv("WORLD_SIZE", size)
    assert_one_error(iep_train("--out", tmp_path), problem)


# What all commands share


@pytest.mark.parametrize("command", ["ask", "bench", "evaluate", "preprocess", "synth", "train"])
def test_every_command_says_its_version(command: str):
    result = CliRunner().invoke(import_module(f"iep.cli.{command}").main, ["--version"])
    assert result.output == f"iep, version {iep.__version__}\n"


def test_memory_that_runs_out_is_one_line_of_any_command_with_the_option_that_helps():
    @click.command(cls=Command)
    @click.option("--batch-size")
    def greedy(batch_size: None) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nMore.")

    words = "not enough memory: CUDA out of memory. Tried to allocate 1 GiB.; lower --batch-size"
    assert_one_error(CliRunner().invoke(greedy, []), words)


# A full disk


def test_a_full_disk_leaves_the_earlier_checkpoints_of_a_real_process(run: Path):
    before = {name: (run / name).read_bytes() for name in ("step-4.pt", BEST)}
    size = len(before["step-4.pt"]) - 1000
    command = [sys.executable, "-m", "iep.cli.train", "--resume", "--out", str(run), "iterations=8"]
    limited = f"import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size})); "
    code = f"{limited}import sys; sys.argv = {command[2:]!r}; runpy.run_module('iep.cli.train', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert_error_lines(done.stderr, f"{run}/", ".pt: file size limit reached")
    for name, content in before.items():
        assert (run / name).read_bytes() == content
        assert load_checkpoint(run / name)["step"] <= 4
    assert not list(run.glob(".*"))
    assert iep_train("--resume", "--out", run, "iterations=8").exit_code == 0
    assert step(run) == 8


@pytest.mark.parametrize(("size", "name"), [(20_000, ".pt"), (2500, METRICS), (100, "config.yaml")])
def test_a_full_disk_is_one_line_that_names_the_file(run: Path, size: int, name: str):
    before = newest(run).read_bytes()
    with files_no_larger_than(size):
        result = iep_train("--resume", "--out", run, "iterations=24", "validate_every=24")
    assert_one_error(result, f"{run}/", name, "file size limit reached")
    assert newest(run).read_bytes() == before
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
