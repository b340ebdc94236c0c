"""Features made by several processes: the same file as by one, whatever is killed and however it is resumed."""

import os
import signal
from pathlib import Path

import pytest
from clevr_files import write_clevr, write_images
from click.testing import CliRunner
from processes import together

import iep.preprocess.compute_features as features_module
from iep.cli.preprocess import main
from iep.data.features import Features
from iep.errors import InputError
from iep.preprocess.backbones import Patches
from iep.preprocess.clevr_files import image_paths
from iep.preprocess.compute_features import preprocess_features
from iep.runtime.reading import read_json

IMAGES = 31
FILE, JOURNAL = "val_features.h5", "val_features.h5.progress"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "CLEVR", "val", IMAGES)[0].parent


def make(images: Path, out: Path, killed_after: tuple[int, ...] = ()) -> str:
    """What one process of a job says, or how it fails; process r kills itself in its batch `killed_after[r]`."""
    said, run = [], features_module._run
    left = iter(range(killed_after[int(os.environ["RANK"])] + 1 if killed_after else 1000))

    def counted(extract, pixels_BCHW):
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return run(extract, pixels_BCHW)

    features_module._run = counted  # in a process of its own
    try:
        preprocess_features(
            {"val": image_paths(images)}, out, Patches(2), batch_size=2, say=said.append, flush_seconds=0
        )
    except InputError as error:
        return f"Error: {error}"
    except SystemExit as stop:
        return f"exit {stop.code}"
    return "\n".join(said)


def alone(images: Path, out: Path) -> bytes:
    preprocess_features({"val": image_paths(images)}, out, Patches(2), batch_size=2, say=lambda line: None)
    return (out / FILE).read_bytes()


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
    rows = read_json(out / JOURNAL)["rows"]
    assert 4 <= rows < IMAGES
    # Were they read again, these images (of the same size, so that they count as unchanged) would be errors.
    for path in image_paths(images)[:rows]:
        path.write_bytes(b"\0" * path.stat().st_size)
    together(make, images, out, world_size=3)
    for index, path in enumerate(write_images(images.parents[1], "val", IMAGES)):
        assert path == image_paths(images)[index]
    assert (out / FILE).read_bytes() == alone(images, tmp_path / "alone")


def test_a_bad_image_of_any_process_ends_all_and_one_of_them_names_it(images: Path, tmp_path: Path):
    out, bad = tmp_path / "data", image_paths(images)[11]  # the second process's second batch ends with it
    sound = bad.read_bytes()
    bad.write_bytes(sound[:100])
    first, second = together(make, images, out)
    assert first.startswith(f"Error: {bad}: not an image")
    assert second == "exit 1"
    assert read_json(out / JOURNAL)["rows"] == 10
    bad.write_bytes(sound)
    assert alone(images, out) == alone(images, tmp_path / "alone")


def command(clevr: Path, out: Path) -> tuple[int, str]:
    flags = ("--backbone", "patches", "--patch-size", "2", "--workers", "0", "--device", "cpu", "--batch-size", "1")
    result = CliRunner().invoke(main, [str(clevr), "--out", str(out), *flags])
    return result.exit_code, result.stdout


def test_the_command_does_questions_once_and_the_first_process_speaks_for_all(tmp_path: Path):
    clevr, out = write_clevr(tmp_path / "CLEVR"), tmp_path / "data"
    (code, said), (other_code, other_said) = together(command, clevr, out)
    assert (code, other_code, other_said) == (0, 0, "")
    assert len(said.splitlines()) == 1 + 2 * 3
    assert command(clevr, tmp_path / "alone")[0] == 0
    for path in (tmp_path / "alone").iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    Features(out / "test_features.h5").verify()
    (clevr / "questions" / "CLEVR_val_questions.json").write_text("{")
    assert [code for code, _ in together(command, clevr, tmp_path / "other")] == [1, 1]
