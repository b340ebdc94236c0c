"""One process at a time writes a directory; a second one ends with an error that names the first."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from clevr_files import write_clevr, write_questions
from click.testing import CliRunner
from tiny_data import assert_one_error, tiny
from train_cases import iep_train

from iep.cli.evaluate import main as iep_eval
from iep.cli.export import main as iep_export
from iep.cli.preprocess import main as iep_preprocess
from iep.cli.synth import main as iep_synth
from iep.cli.train import main as train
from iep.errors import InputError
from iep.runtime.locks import LOCK, alone_in


@contextmanager
def held(directory: Path, by: str = "alone_in") -> Iterator[int]:
    """A process that holds the lock of `directory` until the block ends and it is killed; yields its number."""
    code = (
        f"import pathlib, time\nfrom iep.runtime.locks import {by}\n"
        f"with {by}(pathlib.Path({str(directory)!r})):\n    print('held', flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path: Path):
    with held(tmp_path / "run") as first:
        for _ in range(2):  # asking takes nothing from the first
            with pytest.raises(InputError) as caught, alone_in(tmp_path / "run"):
                pass
            message = str(caught.value)
            assert message.startswith(f"{tmp_path / 'run'}: in use by process {first} on {os.uname().nodename}; ")
            assert "\n" not in message
    with alone_in(tmp_path / "run"):
        assert f"process {os.getpid()} " in (tmp_path / "run" / LOCK).read_text()
        (tmp_path / "run" / "file").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["file"]


def test_a_directory_that_was_made_for_a_failed_job_is_removed(tmp_path: Path):
    def fail() -> None:
        with alone_in(tmp_path / "run"):
            raise InputError("no")

    with pytest.raises(InputError, match="no"):
        fail()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "there").mkdir()
    with alone_in(tmp_path / "there"):
        pass
    assert (tmp_path / "there").is_dir()


def test_temporary_files_of_killed_processes_are_removed(tmp_path: Path):
    for name in (".a.pt.123.tmp", "..a.pt.123.tmp.123.tmp", "c.pt", ".d", ".e.tmp"):
        (tmp_path / name).touch()
    with alone_in(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {"c.pt", ".d", ".e.tmp", LOCK}


def test_commands_lock_the_directories_that_they_write(data: Path, runs: dict[str, Path], tmp_path: Path):
    out = tmp_path / "out"
    (tmp_path / "clevr" / "questions").mkdir(parents=True)
    (tmp_path / "clevr" / "questions" / "CLEVR_train_questions.json").write_text('{"questions": []}')
    commands = (
        (train, "--resume", "--model", "lstm", "--data", data, "--out", out, *tiny("lstm")),
        (iep_eval, "--baseline", runs["lstm"], "--data", data, "--out", out),
        (iep_synth, out, "--train", 1, "--val", 0, "--test", 0),
        (iep_preprocess, tmp_path / "clevr", "--out", out, "--only", "questions"),
    )
    with held(out) as first:
        for command, *arguments in commands:
            result = CliRunner().invoke(command, [str(argument) for argument in arguments])
            assert_one_error(result, f"{out}: in use by process {first} on ")
        dry = iep_train("--resume", "--dry-run", "--out", out)
        assert dry.exit_code == 0, dry.output  # which writes nothing
    assert [path.name for path in out.iterdir()] == [LOCK]


def test_one_export_at_a_time_writes_a_new_directory_and_the_next_one_removes_what_a_killed_one_left(tmp_path: Path):
    clevr = write_clevr(tmp_path / "clevr")
    empty = write_questions(tmp_path / "empty", "train", []).parents[1]  # an error once the questions are read
    out = tmp_path / "parent" / "out"
    with held(out, by="new_directory") as first:
        result = CliRunner().invoke(iep_export, [str(empty), "--format", "swift", "--out", str(out)])
        assert_one_error(result, f"{out}: in use by process {first} on ")
    assert list(out.parent.iterdir())
    result = CliRunner().invoke(iep_export, [str(clevr), "--format", "swift", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert [path.name for path in out.parent.iterdir()] == ["out"]
