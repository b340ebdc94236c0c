"""Files are written whole or not at all, and JSON that cannot be read is named."""

import errno
import os
from pathlib import Path

import pytest

from iep.errors import InputError
from iep.runtime.files import atomic_path, check_writable, write_bytes, write_json
from iep.runtime.reading import read_json


def test_a_file_is_flushed_before_it_is_renamed(tmp_path: Path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: done.append("flushed") or fsync(handle))
    monkeypatch.setattr(os, "replace", lambda old, new: done.append("named") or replace(old, new))
    write_bytes(tmp_path / "file", b"new")
    assert done == ["flushed", "named"]


def test_a_file_keeps_its_old_content_until_the_block_ends(tmp_path: Path):
    target = tmp_path / "new" / "directory" / "file.txt"
    write_bytes(target, b"old")
    with atomic_path(target) as temporary:
        temporary.write_text("new")
        assert (target.read_text(), temporary.parent) == ("old", target.parent)
    assert target.read_text() == "new"
    assert list(target.parent.iterdir()) == [target]
    with pytest.raises(OSError, match="new"):
        write_bytes(target.parent, b"new")
    assert list(target.parent.parent.iterdir()) == [target.parent]


def fail_halfway(target: Path, failure: BaseException) -> None:
    with atomic_path(target) as temporary:
        temporary.write_text("half of the ne")
        raise failure


@pytest.mark.parametrize("known", [None, "other.bin"])
def test_a_block_that_fails_leaves_the_old_file_and_an_error_names_the_file(tmp_path: Path, known: str | None):
    target = tmp_path / "file.bin"
    for failure in (TypeError("no JSON"), KeyboardInterrupt(), OSError(errno.ENOSPC, "full", known)):
        target.write_text("old")
        with pytest.raises(type(failure)) as caught:
            fail_halfway(target, failure)
        assert target.read_text() == "old"
        assert list(tmp_path.iterdir()) == [target]
    assert caught.value.filename == (known or str(target))


def test_json_is_read_back_as_it_was_written(tmp_path: Path):
    value = {"a": [1, 2.5, None, "ü"], "b": {"c": True}}
    for indent in (None, 2):
        write_json(tmp_path / "value.json", value, indent)
        assert read_json(tmp_path / "value.json") == value
        assert (tmp_path / "value.json").read_bytes().endswith(b"\n")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not a vocabulary (JSONDecodeError: Expecting value: line 1 column 1"),
        (b'{"a": 1,\n"b": }', "Expecting value: line 2 column 6"),
        (b"1" * 5000, "limit (4300 digits)"),
        (b"[" * 10_000, "maximum recursion depth"),
        (b'{"a": "\xff"}', "can't decode byte 0xff in position 7"),
        (None, "no such file, expected a vocabulary"),
        (Path.mkdir, "is a directory, expected a vocabulary"),
    ],
)
def test_a_file_that_is_not_json_is_an_error_with_its_position(tmp_path: Path, content, problem: str):
    path = tmp_path / "value.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        content(path)
    with pytest.raises(InputError) as caught:
        read_json(path, "a vocabulary")
    assert str(caught.value).startswith(f"{path}: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_path_that_cannot_be_written_is_named_before_the_work(tmp_path: Path):
    (tmp_path / "taken" / "report.json").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(IsADirectoryError, match=r"taken/report\.json"):
        check_writable([tmp_path / "taken" / "report.json"])
    with pytest.raises(OSError, match="file"):
        check_writable([tmp_path / "file" / "report.json"])
    check_writable([tmp_path / "new" / "report.json"])
    assert list((tmp_path / "new").iterdir()) == []
