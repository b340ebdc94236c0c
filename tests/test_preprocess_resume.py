"""Features files that are done, interrupted, killed or damaged, or that have no room: what another run does."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from clevr_files import write_images
from features_cases import PATCHES, RESNET, features, run

from iep.runtime.locks import held
from iep.runtime.reading import read_json

KILLED_RUN = """
import sys, time
from pathlib import Path
import iep.preprocess.compute_features as features
from iep.preprocess.backbones import Patches
from iep.preprocess.clevr_files import image_paths

def slowly(extract, pixels, run=features._run):
    time.sleep(0.02)
    return run(extract, pixels)

features._run = slowly
images, out = map(Path, sys.argv[1:])
features.preprocess_features({"val": image_paths(images)}, out, Patches(2), batch_size=2, workers=1, flush_seconds=0)
"""


def kill_when(process: subprocess.Popen, journal: Path, rows: int) -> None:
    """SIGKILL `process`, and its workers, at an arbitrary moment after the journal says that `rows` are complete."""
    deadline = time.monotonic() + 60
    while not journal.exists() or read_json(journal)["rows"] < rows:
        assert process.poll() is None, "the process ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(random.Random(rows).uniform(0, 0.03))
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_a_killed_run_is_resumed_and_ends_with_the_same_bytes(tmp_path, out):
    images = write_images(tmp_path / "CLEVR", "val", 151)
    run(tmp_path / "CLEVR", "--out", tmp_path / "whole", *PATCHES)
    expected = (tmp_path / "whole" / "val_features.h5").read_bytes()
    journal = out / "val_features.h5.progress"
    for rows in (9, 60):
        command = [sys.executable, "-c", KILLED_RUN, str(images[0].parent), str(out)]
        with subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL) as process:
            kill_when(process, journal, rows)
        assert not (out / "val_features.h5").exists()
        assert read_json(journal)["rows"] >= rows
    # Were it read again, this image (of the same size, so that it counts as unchanged) would be an error.
    images[59].write_bytes(b"\0" * images[59].stat().st_size)
    run(tmp_path / "CLEVR", "--out", out, *PATCHES)
    assert (out / "val_features.h5").read_bytes() == expected
    assert [path.name for path in out.iterdir()] == ["val_features.h5"]


def test_a_run_is_resumed_after_a_bad_image_is_replaced(clevr, out):
    broken = clevr / "images" / "val" / "CLEVR_val_000005.png"
    sound = broken.read_bytes()
    broken.write_bytes(sound[:200])
    assert f"{broken}: not an image" in run(clevr, "--out", out, *PATCHES, code=1)
    assert read_json(out / "val_features.h5.progress")["rows"] == 4
    broken.write_bytes(sound)
    run(clevr, "--out", out, *PATCHES)
    assert "already done" in run(clevr, "--out", out, *PATCHES)
    assert len(features(out / "val_features.h5")) == 7


def interrupt(clevr: Path, out: Path, *options: str) -> Path:
    """Leave a run that stopped at image 4, and restore the image; return the unfinished file."""
    image = clevr / "images" / "val" / "CLEVR_val_000004.png"
    sound = image.read_bytes()
    image.write_bytes(b"")
    run(clevr, "--out", out, *PATCHES, *options, code=1)
    image.write_bytes(sound)
    return out / "val_features.h5.partial"


def append_to_image(clevr: Path, out: Path) -> None:
    with open(clevr / "images" / "val" / "CLEVR_val_000001.png", "ab") as file:
        file.write(b"more")


JOURNAL, PARTIAL, FINISHED = "val_features.h5.progress", "val_features.h5.partial", "val_features.h5"


@pytest.mark.parametrize(
    ("damage", "flags", "message"),
    [
        (lambda clevr, out: None, ("--patch-size", 8), f"{PARTIAL}: was made with patch_size 2, now it is 8"),
        (append_to_image, (), f"{JOURNAL}: the images of its 4 rows have changed"),
        (lambda clevr, out: os.truncate(out / PARTIAL, 5000), (), f"{PARTIAL}: not a whole HDF5 file"),
        (lambda clevr, out: (out / JOURNAL).write_text("[" * 10_000), (), f"{JOURNAL}: not the journal of 7 rows"),
        (lambda clevr, out: (out / JOURNAL).write_text('{"rows": "4"}'), (), f"{JOURNAL}: not the journal of 7 rows"),
    ],
)
def test_an_interrupted_run_that_cannot_be_resumed_is_refused_unless_overwritten(clevr, out, damage, flags, message):
    interrupt(clevr, out)
    damage(clevr, out)
    line = run(clevr, "--out", out, *PATCHES, *flags, code=1)
    assert message in line
    assert line.endswith("; --overwrite replaces it")
    run(clevr, "--out", out, *PATCHES, *flags, "--overwrite")
    assert len(features(out / FINISHED)) == 7
    assert [path.name for path in out.iterdir()] == [FINISHED]


def test_a_truncated_finished_file_is_named_and_left_as_it_is(clevr, out):
    run(clevr, "--out", out, *PATCHES)
    os.truncate(out / FINISHED, 5000)
    assert f"{out / FINISHED}: not a whole HDF5 file" in run(clevr, "--out", out, *PATCHES, code=1)
    assert (out / FINISHED).stat().st_size == 5000


def test_a_done_file_is_skipped_and_one_made_otherwise_refused_unless_overwritten(clevr, out):
    run(clevr, "--out", out, *PATCHES)
    path = out / "val_features.h5"
    before = path.read_bytes()
    assert f"{path}: already done" in run(clevr, "--out", out, *PATCHES, "--overwrite")
    for options, difference in (
        (RESNET, "backbone patches, now it is resnet18"),
        ((*PATCHES, "--dtype", "float16"), "dtype float32, now it is float16"),
    ):
        assert f"{path}: was made with {difference}" in run(clevr, "--out", out, *options, code=1)
        assert path.read_bytes() == before
    run(clevr, "--out", out, *PATCHES, "--dtype", "float16", "--overwrite")
    assert features(path).dtype == np.float16


def test_a_file_that_is_done_leaves_the_journal_of_the_one_that_is_to_replace_it(clevr, out):
    run(clevr, "--out", out, *PATCHES)
    other = ("--dtype", "float16", "--overwrite")
    partial = interrupt(clevr, out, *other)
    journal = out / "val_features.h5.progress"
    before = journal.read_bytes(), partial.read_bytes()
    assert "already done" in run(clevr, "--out", out, *PATCHES)
    assert (journal.read_bytes(), partial.read_bytes()) == before
    run(clevr, "--out", out, *PATCHES, *other)
    assert [path.name for path in out.iterdir()] == ["val_features.h5"]


def test_every_file_is_checked_before_any_is_made(clevr, out):
    run(clevr, "--out", out, *PATCHES)
    write_images(clevr, "train", 2)
    run(clevr, "--out", out, "--backbone", "patches", code=1)
    assert [path.name for path in out.iterdir()] == ["val_features.h5"]


def test_a_new_image_makes_a_done_file_differ(clevr, out):
    run(clevr, "--out", out, *PATCHES)
    write_images(clevr, "val", 8)
    assert "was made with images 7, now it is 8" in run(clevr, "--out", out, *PATCHES, code=1)


def test_two_processes_do_not_write_the_same_file(clevr, out):
    partial = out / "val_features.h5.partial"
    out.mkdir()
    with held(out / ".val_features.h5.lock", partial):
        assert f"{partial}: in use by process {os.getpid()}" in run(clevr, "--out", out, *PATCHES, code=1)
    run(clevr, "--out", out, *PATCHES)
    assert [path.name for path in out.iterdir()] == ["val_features.h5"]


def test_a_full_disk_is_noticed_at_the_start_and_leaves_earlier_files_untouched(clevr, out):
    run(clevr, "--out", out, *PATCHES)
    before = (out / "val_features.h5").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        line = run(clevr, "--out", out, "--backbone", "patches", "--overwrite", code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "val_features.h5.partial: no room for the features: needs 0.001 GB" in line
    assert [path.name for path in out.iterdir()] == ["val_features.h5"]
    assert (out / "val_features.h5").read_bytes() == before
