"""The written directory: CLEVR's layout and keys, the same bytes always, and whole files whatever happens."""

import hashlib
import os
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from pycocotools import mask as coco
from tiny_data import assert_one_error, files_no_larger_than

from iep.cli.synth import main
from iep.runtime.reading import read_json
from iep.synth.annotations import bounding_box, run_lengths

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "data" / "sample"
SMALL = ["--preset", "mini", "--width", "60", "--height", "40", "--questions-per-image", "4"]
COUNTED = {"train": 53, "val": 3, "test": 2}
COUNTS = [argument for split, count in COUNTED.items() for argument in (f"--{split}", str(count))]

SHARED_KEYS = {"image_index", "image_filename", "split"}
QUESTION_KEYS = SHARED_KEYS | {"program", "question_index", "question_family_index", "answer", "question"}
OBJECT_KEYS = {"color", "size", "rotation", "shape", "3d_coords", "material", "pixel_coords"}


def iep_synth(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def synth(*arguments: object) -> str:
    """Return the output of a command that ends well."""
    result = iep_synth(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def digests(root: Path) -> dict[str, str]:
    """A hash of every file under `root`."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("synth") / "out"
    synth(out, *SMALL, *COUNTS)
    return out


def test_files_are_named_and_counted_as_in_clevr_and_the_test_split_gives_nothing_away(made: Path) -> None:
    images = [f"images/{split}/CLEVR_{split}_{i:06d}.png" for split, n in COUNTED.items() for i in range(n)]
    questions = [f"questions/CLEVR_{split}_questions.json" for split in COUNTED]
    scenes = [f"scenes/CLEVR_{split}_scenes.json" for split in ("train", "val")]
    assert set(digests(made)) == {*images, *questions, *scenes, "synth.json"}
    with Image.open(made / images[0]) as image:
        assert (image.format, image.size, image.mode) == ("PNG", (60, 40), "RGB")
    for split in COUNTED:
        questions = read_json(made / f"questions/CLEVR_{split}_questions.json")["questions"]
        hidden = {"program", "answer", "question_family_index"} if split == "test" else set()
        assert all(set(question) == QUESTION_KEYS - hidden for question in questions)


def test_the_bytes_depend_on_split_and_seed_alone_and_fewer_images_are_the_first_ones(made, tmp_path: Path) -> None:
    two, few, other = (tmp_path / name for name in ("two", "few", "other"))
    synth(two, *SMALL, *COUNTS, "--workers", "2")
    synth(few, *SMALL, "--train", "2", "--val", "0")
    synth(other, *SMALL, "--train", "2", "--val", "0", "--seed", "1")
    full, first = digests(made), digests(few)
    assert digests(two) == full
    assert not set(digests(other).values()) & set(full.values())
    assert "val" not in os.listdir(few / "images")
    for index in range(2):
        name = f"images/train/CLEVR_train_{index:06d}.png"
        assert first[name] == full[name] != full[name.replace("train", "val")]
    name = "questions/CLEVR_train_questions.json"
    assert read_json(few / name)["questions"] == read_json(made / name)["questions"][:8]


def test_what_is_there_is_kept_and_what_is_missing_or_damaged_is_made_again(made: Path, tmp_path: Path) -> None:
    cut = Path(shutil.copytree(made, tmp_path / "cut"))
    (cut / "questions" / "CLEVR_train_questions.json").unlink()  # as a killed process leaves it
    damaged, removed, kept = sorted((cut / "images" / "train").glob("*.png"))[:3]
    damaged.write_bytes(damaged.read_bytes()[:-20])  # as a power cut might leave it
    removed.unlink()
    (cut / "images" / "train" / ".CLEVR_train_000050.png.1.tmp").write_bytes(b"half")
    before = kept.stat().st_mtime_ns
    assert synth(cut, *SMALL, *COUNTS).count("already done") == 2
    assert digests(cut) == digests(made)
    assert kept.stat().st_mtime_ns == before


def test_a_finished_data_set_is_not_made_again_and_never_replaced_by_one_of_other_options(made: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.rglob("*")}
    said = synth(made, *SMALL, *COUNTS)
    assert said.startswith(f"{made}: 58 images with 232 questions\n")
    assert said.count("already done") == 3
    for options, difference in (
        ((*SMALL, "--train", "2", "--val", "0"), "--train 53, now it is 2"),
        ((*SMALL, *COUNTS, "--max-objects", "4"), "--max-objects 3, now it is 4"),
        ((*SMALL, *COUNTS, "--annotations"), "--annotations False, now it is True"),
    ):
        assert_one_error(iep_synth(made, *options), f"{made}: was made with {difference}; choose a new directory")
    assert {path: path.stat().st_mtime_ns for path in made.rglob("*")} == before


def test_images_are_added_to_a_data_set_without_drawing_its_own_again(made, tmp_path: Path) -> None:
    out = tmp_path / "out"
    synth(out, *SMALL, "--train", "51", "--val", "3")  # 50 is the end of a block of balanced answers
    before = {path: path.stat().st_mtime_ns for path in (out / "images").rglob("*.png")}
    assert synth(out, *SMALL, *COUNTS).count("already done") == 1
    assert digests(out) == digests(made)
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("images/mine.png", "precious", "not empty and not made by iep-synth"),
        ("synth.json", "{}", "was made with generator None, now it is 3"),
        ("synth.json", '{"rules": 3}', "synth.json: {'rules': 3}, expected the record of iep-synth"),
    ],
)
def test_a_directory_of_something_else_is_never_touched(tmp_path: Path, name: str, content: str, complaint: str):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    assert_one_error(iep_synth(tmp_path, *SMALL, *COUNTS), complaint)
    assert [each.read_text() for each in tmp_path.rglob("*.*")] == [content]


@pytest.mark.parametrize(
    ("limit", "named", "workers"), [(2_000, "CLEVR_train_0000", 2), (20_000, "CLEVR_train_scenes.json", 1)]
)
def test_a_full_disk_is_one_line_that_names_the_file(tmp_path: Path, limit: int, named: str, workers: int) -> None:
    with files_no_larger_than(limit):
        result = iep_synth(tmp_path / "out", *SMALL, "--train", "30", "--val", "0", "--workers", workers)
    assert_one_error(result, named, "file size limit reached")
    assert not list((tmp_path / "out").rglob("*.tmp"))
    assert not (tmp_path / "out" / "questions" / "CLEVR_train_questions.json").exists()


@given(arrays(bool, st.tuples(st.integers(1, 40), st.integers(1, 40))), st.integers(1, 30))
def test_any_mask_is_decoded_to_itself_by_pycocotools(pixels: np.ndarray, scale: int) -> None:
    mask_HW = np.kron(pixels, np.ones((scale, scale), bool))
    mask = {"size": list(mask_HW.shape), "counts": run_lengths(mask_HW)}
    assert (coco.decode(mask) == mask_HW).all()
    assert coco.toBbox(mask).tolist() == bounding_box(mask_HW) or not mask_HW.any()


def test_annotations_are_of_the_visible_pixels_and_change_nothing_else(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    synth(out, *SMALL, "--train", "3", "--val", "2", "--test", "1", "--annotations")
    full, plain = digests(out), digests(made)
    depths = {f"depth/{split}/CLEVR_{split}_{i:06d}.png" for split, n in (("train", 3), ("val", 2)) for i in range(n)}
    assert {name for name in full if name.startswith("depth")} == depths
    assert all(full[name] == plain[name] for name in full if name.startswith("images"))
    for entry in read_json(out / "scenes/CLEVR_train_scenes.json")["scenes"]:
        depth_HW = np.asarray(Image.open(out / "depth/train" / entry["image_filename"]))
        assert (depth_HW.dtype, depth_HW.shape) == (np.uint16, (40, 60))
        covered = np.zeros((40, 60), int)
        for thing in entry["objects"]:
            assert set(thing) == OBJECT_KEYS | {"bbox", "mask"}
            mask_HW = coco.decode(thing["mask"]).astype(bool)
            covered += mask_HW
            assert thing["bbox"] == coco.toBbox(thing["mask"]).tolist()
            radius = 0.7 if thing["size"] == "large" else 0.35
            assert np.abs(depth_HW[mask_HW] / 1000 - thing["pixel_coords"][2]).max() < 2 * radius
        assert covered.max() == 1
        assert (np.diff(depth_HW[covered.sum(1) == 0].astype(int), axis=0) < 0).all()  # the ground comes nearer


@pytest.mark.parametrize(
    ("flags", "complaint", "code"),
    [
        ("--min-objects 6 --max-objects 4", "--min-objects 6 is more than --max-objects 4", 2),
        ("--train 0 --val 0 --test 0", "nothing to make", 2),
        (
            "--preset mini --train 1 --val 0 --min-objects 1 --max-objects 1 --questions-per-image 300",
            "300 different questions do not fit scenes of 1 to 1 objects",
            1,
        ),
    ],
)
def test_arguments_that_cannot_be_followed_are_one_line(tmp_path: Path, flags: str, complaint: str, code: int) -> None:
    assert_one_error(iep_synth(tmp_path / "out", *flags.split(" ")), complaint, code=code)
    assert not (tmp_path / "out").exists()


def test_no_file_of_a_split_is_written_without_a_question(tmp_path: Path) -> None:
    few = ("--preset", "mini", "--families", "closure", "--train", "1", "--val", "0")
    assert_one_error(iep_synth(tmp_path, *few), f"{tmp_path}/", "_train.json: would have no question; make more images")
    assert not list(tmp_path.glob("*_train.json"))
    assert not (tmp_path / "scenes/CLEVR_train_scenes.json").exists()


def test_the_sample_is_what_its_command_makes(tmp_path: Path) -> None:
    lines = (ROOT / "data" / "README.md").read_text().splitlines()
    (line,) = [line for line in lines if "iep-synth data/sample" in line]
    _, out, *flags = shlex.split(line.strip())
    synth(tmp_path / Path(out).name, *flags)
    again = tmp_path / "sample"
    assert set(digests(again)) == set(digests(SAMPLE))
    assert sum(path.stat().st_size for path in SAMPLE.rglob("*") if path.is_file()) < 1_000_000
    for path in SAMPLE.rglob("*.json"):
        assert (again / path.relative_to(SAMPLE)).read_bytes() == path.read_bytes()
    for path in SAMPLE.rglob("*.png"):
        # Pixels, not bytes: the last bit of a sine and the compression differ between machines.
        ours, theirs = (np.asarray(Image.open(p)).astype(int) for p in (again / path.relative_to(SAMPLE), path))
        assert np.abs(ours - theirs).max() <= 2
