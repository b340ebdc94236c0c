"""One process at a time writes a directory: the second is refused and told who is the first."""

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from fork_server import Server
from tiny_data import assert_one_error, tiny

from iep.cli.evaluate import main as iep_eval
from iep.cli.preprocess import main as iep_preprocess
from iep.cli.synth import main as iep_synth
from iep.cli.train import main as iep_train
from iep.data.datasets import Batch
from iep.errors import InputError
from iep.runtime.locks import LOCK, alone_in
from iep.training.loop import Trainer


def holder(directory: Path) -> subprocess.Popen:
    """A process that holds `directory` until it is killed."""
    code = (
        "import pathlib, time\nfrom iep.runtime.locks import alone_in\n"
        f"with alone_in(pathlib.Path({str(directory)!r})):\n"
        "    print('held', flush=True)\n    time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    return process


def kill(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_second_process_is_told_the_first_and_may_come_when_that_is_killed(tmp_path: Path):
    process = holder(tmp_path / "run")
    with pytest.raises(InputError) as caught, alone_in(tmp_path / "run"):
        pass
    message = str(caught.value)
    host, today = os.uname().nodename, time.strftime("%Y-%m-%d", time.gmtime())
    assert message.startswith(f"{tmp_path / 'run'}: in use by process {process.pid} on {host}, since {today}")
    assert "\n" not in message
    with pytest.raises(InputError, match=f"process {process.pid}"), alone_in(tmp_path / "run"):
        pass  # asking takes nothing from the first
    kill(process)
    with alone_in(tmp_path / "run"):
        assert f"process {os.getpid()} " in (tmp_path / "run" / LOCK).read_text()
        (tmp_path / "run" / "file").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["file"]


def test_directories_made_for_nothing_are_removed(tmp_path: Path):
    def fail() -> None:
        with alone_in(tmp_path / "a" / "b"):
            raise InputError("no")

    with pytest.raises(InputError, match="no"):
        fail()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "there").mkdir()
    with alone_in(tmp_path / "there"):
        pass
    assert (tmp_path / "there").is_dir()


def test_what_killed_processes_left_of_the_targets_is_removed(tmp_path: Path):
    for name in (".a.pt.123.tmp", "..a.pt.123.tmp.123.tmp", ".b.pt.5.tmp", "c.pt", ".d"):
        (tmp_path / name).touch()
    with alone_in(tmp_path, "a.pt"):
        assert {path.name for path in tmp_path.iterdir()} == {".b.pt.5.tmp", "c.pt", ".d", LOCK}
    with alone_in(tmp_path, "*"):
        assert {path.name for path in tmp_path.iterdir()} == {"c.pt", ".d", LOCK}


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_in_a_line(data: Path, tmp_path: Path, monkeypatch, number: int):
    def refuse(file: object, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    arguments = ["--model", "lstm", "--data", data, "--out", tmp_path / "run", *tiny("lstm")]
    result = CliRunner().invoke(iep_train, [str(argument) for argument in arguments])
    assert_one_error(result, f"{tmp_path / 'run' / LOCK}: cannot be locked, locks are not supported on its file system")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]


def test_every_command_that_writes_a_directory_asks(data: Path, runs: dict[str, Path], tmp_path: Path):
    out = tmp_path / "out"
    (tmp_path / "clevr" / "questions").mkdir(parents=True)
    (tmp_path / "clevr" / "questions" / "CLEVR_train_questions.json").write_text('{"questions": []}')
    process = holder(out)
    for command, *arguments in (
        (iep_train, "--resume", "--model", "lstm", "--data", data, "--out", out, *tiny("lstm")),
        (iep_eval, "--baseline", runs["lstm"], "--data", data, "--out", out),
        (iep_synth, out, "--train", 1, "--val", 0, "--test", 0),
        (iep_preprocess, tmp_path / "clevr", "--out", out, "--only", "questions"),
    ):
        result = CliRunner().invoke(command, [str(argument) for argument in arguments])
        assert_one_error(result, f"{out}: in use by process {process.pid} on ")
    kill(process)
    assert [path.name for path in out.iterdir()] == [LOCK]


def test_looking_at_a_run_in_use_is_allowed(runs: dict[str, Path], tmp_path: Path):
    process = holder(tmp_path / "run")
    result = CliRunner().invoke(iep_train, ["--resume", "--dry-run", "--out", str(tmp_path / "run")])
    assert result.exit_code == 0
    kill(process)


def test_a_run_that_is_training_refuses_another_and_goes_on(server: Server, data: Path, tmp_path: Path, monkeypatch):
    arguments = ["--resume", "--data", data, "--out", tmp_path / "run", *tiny("lstm"), "model=lstm"]
    seconds, train_step = [], Trainer.train_step

    def watched(self: Trainer, batch: Batch) -> object:
        seconds.append(server.run("train", arguments))
        return train_step(self, batch)

    monkeypatch.setattr(Trainer, "train_step", watched)
    assert CliRunner().invoke(iep_train, [str(argument) for argument in arguments]).exit_code == 0
    assert len(seconds) == 4
    for second in seconds:
        assert second.returncode == 1
        assert second.output.startswith(f"Error: {tmp_path / 'run'}: in use by process {os.getpid()} on ")
    assert not list((tmp_path / "run").glob(".*"))


def test_a_data_set_that_was_killed_before_its_first_file_is_begun_again(tmp_path: Path):
    (tmp_path / ".synth.json.123.tmp").write_text('{"gen')
    arguments = ["--preset", "mini", "--train", "1", "--val", "0", "--test", "0"]
    result = CliRunner().invoke(iep_synth, [str(tmp_path), *arguments])
    assert result.exit_code == 0, result.output
    assert not list(tmp_path.rglob(".*"))


def test_features_killed_just_after_they_took_their_name_leave_nothing(tmp_path: Path):
    clevr, out = tmp_path / "clevr", tmp_path / "data"
    sizes = ["--preset", "mini", "--train", "2", "--val", "0", "--test", "0"]
    assert CliRunner().invoke(iep_synth, [str(clevr), *sizes]).exit_code == 0
    arguments = [str(clevr), "--out", str(out), "--backbone", "patches", "--workers", "0"]
    assert CliRunner().invoke(iep_preprocess, arguments).exit_code == 0
    names = {path.name for path in out.iterdir()}
    (out / "train_features.h5.progress").write_text("{}")
    (out / ".train_features.h5.progress.7.tmp").write_text("{")
    assert CliRunner().invoke(iep_preprocess, arguments).exit_code == 0
    assert {path.name for path in out.iterdir()} == names == {"vocab.json", "train_questions.h5", "train_features.h5"}
