"""Features files that are done, interrupted, killed or damaged, that have no room, or that several processes write."""

import os
import shutil
import signal
from pathlib import Path

import h5py
import numpy as np
import pytest
from clevr_files import write_clevr, write_images
from click.testing import CliRunner
from features_cases import FILE, PARTIAL, RESNET, SMALL, SMALL_RESNET, Watched, features, run
from processes import together
from tiny_data import files_no_larger_than

from iep.cli.preprocess import main
from iep.data.features import Features
from iep.errors import InputError
from iep.preprocess.clevr_files import image_paths
from iep.preprocess.compute_features import preprocess_features


def interrupt(clevr: Path, out: Path, *options: str) -> None:
    """Leave a run that stopped at image 4, and restore the image."""
    image = clevr / "images" / "val" / "CLEVR_val_000004.png"
    sound = image.read_bytes()
    image.write_bytes(b"")
    run(clevr, "--out", out, *SMALL, *options, code=1)
    image.write_bytes(sound)


@pytest.mark.parametrize(
    ("damage", "flags", "message"),
    [
        (lambda clevr, out: None, ("--stage", 2), f"{PARTIAL}: was made with stage 1, now it is 2"),
        (lambda clevr, out: os.truncate(out / PARTIAL, 5000), (), f"{PARTIAL}: not a whole HDF5 file"),
    ],
)
def test_an_interrupted_run_that_cannot_be_resumed_is_refused_unless_overwritten(clevr, out, damage, flags, message):
    interrupt(clevr, out)
    damage(clevr, out)
    line = run(clevr, "--out", out, *SMALL, *flags, code=1)
    assert message in line
    assert line.endswith("; --overwrite replaces it")
    run(clevr, "--out", out, *SMALL, *flags, "--overwrite")
    assert len(features(out / FILE)) == 7
    assert [path.name for path in out.iterdir()] == [FILE]


def test_a_done_file_is_skipped_and_one_made_otherwise_replaced_only_if_told_to(clevr, out):
    run(clevr, "--out", out, *SMALL)
    before = (out / FILE).read_bytes()
    assert f"{out / FILE}: already done" in run(clevr, "--out", out, *SMALL, "--overwrite")
    other = (*SMALL, "--dtype", "float16")
    for options, difference in ((RESNET, "stage 1, now it is 3"), (other, "dtype float32, now it is")):
        assert f"{out / FILE}: was made with {difference}" in run(clevr, "--out", out, *options, code=1)
        assert (out / FILE).read_bytes() == before
    # A run that is satisfied with the finished file leaves the one that is to replace it.
    interrupt(clevr, out, "--dtype", "float16", "--overwrite")
    unfinished = {path.name: path.read_bytes() for path in out.iterdir()}
    assert unfinished.keys() == {FILE, PARTIAL}
    assert "already done" in run(clevr, "--out", out, *SMALL)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == unfinished
    run(clevr, "--out", out, *other, "--overwrite")
    assert features(out / FILE).dtype == np.float16
    assert [path.name for path in out.iterdir()] == [FILE]


def test_every_file_is_checked_before_any_is_made_and_a_new_image_makes_a_done_file_differ(clevr, out):
    run(clevr, "--out", out, *SMALL)
    write_images(clevr, "train", 2)
    run(clevr, "--out", out, *SMALL, "--stage", 2, code=1)
    write_images(clevr, "val", 8)
    assert "was made with images 7, now it is 8" in run(clevr, "--out", out, *SMALL, code=1)
    assert [path.name for path in out.iterdir()] == [FILE]
    os.truncate(out / FILE, 5000)
    assert f"{out / FILE}: not a whole HDF5 file" in run(clevr, "--out", out, *SMALL, code=1)
    assert (out / FILE).stat().st_size == 5000


def test_a_resumed_run_reads_only_images_that_are_new_or_whose_rows_are_damaged(clevr, out, tmp_path):
    one_by_one = ("--batch-size", 1)  # the last bits depend on the size of a batch
    interrupt(clevr, out, *one_by_one)
    images = image_paths(clevr / "images" / "val")
    with open(images[1], "ab") as file:
        file.write(b"more")
    with h5py.File(out / PARTIAL, "r+") as file:
        file["features"][2, 0, 0, 0] += 1
    run(clevr, "--out", tmp_path / "whole", *SMALL, *one_by_one)
    seen = []
    preprocess_features({"val": images}, out, Watched(before=lambda: seen.append(1)), batch_size=1)
    assert len(seen) == 1 + 5  # the first batch only tells the shape; rows 0 and 3 are as they were
    assert (out / FILE).read_bytes() == (tmp_path / "whole" / FILE).read_bytes()


def test_a_full_disk_is_noticed_at_the_start_and_leaves_earlier_files_untouched(clevr, out):
    run(clevr, "--out", out, *SMALL)
    before = (out / FILE).read_bytes()
    with files_no_larger_than(200_000):
        line = run(clevr, "--out", out, *SMALL, "--image-size", 96, "--overwrite", code=1)
    assert "val_features.h5.partial: no space for the features: needs 0.001 GB" in line
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {FILE: before}


# Several processes


def command(clevr: Path, out: Path) -> tuple[int, str]:
    flags = ("--workers", "0", "--device", "cpu", "--batch-size", "1")
    result = CliRunner().invoke(main, [str(clevr), "--out", str(out), *map(str, SMALL), *flags])
    return result.exit_code, result.stdout


IMAGES = 31


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "CLEVR", "val", IMAGES)[0].parent


def make(images: Path, out: Path, killed_after: tuple[int, ...] = ()) -> str:
    """Return what one process of a job says, or how it fails; process r kills itself in its batch `killed_after[r]`."""
    said, left = [], iter(range(killed_after[int(os.environ["RANK"])] + 1 if killed_after else 1000))
    patches = Watched(before=lambda: next(left, None) is None and os.kill(os.getpid(), signal.SIGKILL))
    try:
        preprocess_features({"val": image_paths(images)}, out, patches, batch_size=2, say=said.append)
    except InputError as error:
        return f"Error: {error}"
    except SystemExit as stop:
        return f"exit {stop.code}"
    return "\n".join(said)


def alone(images: Path, out: Path) -> bytes:
    preprocess_features({"val": image_paths(images)}, out, SMALL_RESNET, batch_size=2, say=lambda line: None)
    return (out / FILE).read_bytes()


def written(out: Path) -> list[int]:
    """Return the rows of the unfinished file that have a checksum."""
    with h5py.File(out / PARTIAL) as file:
        return np.flatnonzero(file["checksums"][()]).tolist()


@pytest.mark.parametrize("world_size", [2, 3])
def test_several_processes_write_the_bytes_of_one(images: Path, tmp_path: Path, world_size: int):
    together(make, images, tmp_path / "data", world_size=world_size)
    assert (tmp_path / "data" / FILE).read_bytes() == alone(images, tmp_path / "alone")
    assert [path.name for path in (tmp_path / "data").iterdir()] == [FILE]
    assert all("already done" in said for said in together(make, images, tmp_path / "data"))


def test_a_killed_job_is_resumed_by_another_number_of_processes_to_the_same_bytes(images: Path, tmp_path: Path):
    out = tmp_path / "data"
    for killed_after in ((3, 2), (2, 4), (1, 1)):
        with pytest.raises((AssertionError, EOFError)):
            together(make, images, out, killed_after)
    rows = written(out)
    assert 4 <= len(rows) < IMAGES
    # Were they read again, these images (of the same size, so that they count as unchanged) would be errors.
    for path in (image_paths(images)[row] for row in rows):
        path.write_bytes(b"\0" * path.stat().st_size)
    together(make, images, out, world_size=3)
    for index, path in enumerate(write_images(images.parents[1], "val", IMAGES)):
        assert path == image_paths(images)[index]
    assert (out / FILE).read_bytes() == alone(images, tmp_path / "alone")


def test_a_bad_image_of_any_process_ends_all_and_one_of_them_names_it(images: Path, tmp_path: Path):
    out, bad = tmp_path / "data", image_paths(images)[11]  # the second process's third batch ends with it
    sound = bad.read_bytes()
    bad.write_bytes(sound[:100])
    first, second = together(make, images, out)
    assert first.startswith(f"Error: process 1: {bad}: not an image")
    assert second == "exit 1"
    assert written(out) == list(range(10))
    bad.write_bytes(sound)
    assert alone(images, out) == alone(images, tmp_path / "alone")


def test_the_command_does_questions_once_and_the_first_process_speaks_for_all(tmp_path: Path):
    clevr, out = write_clevr(tmp_path / "CLEVR"), tmp_path / "data"
    shutil.rmtree(clevr / "images" / "train")
    (code, said), (other_code, other_said) = together(command, clevr, out)
    assert (code, other_code, other_said) == (0, 0, "")
    assert len(said.splitlines()) == 1 + 2 * 3
    assert "no images of split 'train'" in said
    assert command(clevr, tmp_path / "alone")[0] == 0
    for path in (tmp_path / "alone").iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    Features(out / "test_features.h5").verify()
    (clevr / "questions" / "CLEVR_val_questions.json").write_text("{")
    assert [code for code, _ in together(command, clevr, tmp_path / "other")] == [1, 1]
