"""`iep-bench loader`: what a pass hands out, what it says of the file's pages, and its files."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tiny_data import IMAGES, TRAIN, arrays, assert_one_error, write_data

from iep.bench.loader import drop_pages, order_rows, resident_share, touch_pages
from iep.bench.loader_run import write_random_features
from iep.cli.bench import main
from iep.features import Features


def run(*arguments: object):
    return CliRunner().invoke(main, ["loader", *map(str, arguments)])


def test_a_pass_in_image_order_hands_out_every_question_and_one_at_random_every_image_once():
    images = arrays(TRAIN)["image_idxs"]
    rows = order_rows(images, "image", [0])
    assert sorted(rows.tolist()) == list(range(TRAIN))
    assert images[rows].tolist() == sorted(images.tolist())
    rows = order_rows(images, "random", [0])
    assert sorted(images[rows].tolist()) == list(range(IMAGES))
    assert rows.tolist() != order_rows(images, "random", [1]).tolist()


def in_memory(directory: Path) -> bool:
    """Are the files of `directory` nowhere but in memory?"""
    kinds = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    places = {fields[4]: fields[fields.index("-") + 1] for fields in kinds}
    return next(places[str(path)] for path in (directory, *directory.parents) if str(path) in places) == "tmpfs"


def test_dropped_pages_are_gone_and_touched_ones_are_there(tmp_path: Path):
    if in_memory(tmp_path):
        pytest.skip("pages of a file in memory cannot be dropped")
    path = tmp_path / "file"
    path.write_bytes(bytes(2**22))
    touch_pages(path)
    assert resident_share(path) == 1
    drop_pages(path)
    assert resident_share(path) < 1


def test_the_features_made_are_sound_and_random(tmp_path: Path):
    write_random_features(tmp_path / "f.h5", (70, 2, 3, 3), seed=1)
    features = Features(tmp_path / "f.h5")
    features.verify()
    assert (features.shape, features.dtype) == ((70, 2, 3, 3), np.dtype("float16"))
    assert len({features.read(np.array([row])).numpy().tobytes() for row in range(70)}) == 70


def test_table_and_json_have_every_way_and_the_data_made_are_removed(tmp_path: Path):
    result = run("--images", 3, "--batch-size", 8, "--workers", "0,1", "--repeat", 2, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "loader.json").read_text())
    ways = [tuple(row["way"].values()) for row in content["rows"]]
    assert len(ways) == len(set(ways)) == 3 * 2 * 2 * 2
    assert all(row["questions_per_second"]["least"] > 0 for row in content["rows"])
    assert (tmp_path / "loader.txt").read_text().rstrip().endswith(result.output.rstrip().splitlines()[-3])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loader.json", "loader.txt"]


def test_data_of_ones_own_are_measured_and_left_alone(tmp_path: Path):
    data = write_data(tmp_path / "data", "float16")
    before = {path: path.read_bytes() for path in data.iterdir()}
    flags = ("--batch-size", 4, "--workers", 0, "--repeat", 1, "--features", "warm")
    result = run("--data", data, "--split", "train", *flags)
    assert result.exit_code == 0, result.output
    assert f"{TRAIN} questions about {IMAGES} images, float16 features" in result.output
    assert {path: path.read_bytes() for path in data.iterdir()} == before
    assert_one_error(run("--data", data, "--split", "test", *flags), "test_questions.h5: has no programs to plan")
    assert run("--data", data, "--split", "test", *flags, "--plans", "without").exit_code == 0


@pytest.mark.parametrize("flags", [("--images", 3, "--data", "x"), ("--split", "val"), ("--features", "tape")])
def test_flags_that_do_not_go_together_are_usage_errors(flags: tuple):
    assert run(*flags).exit_code == 2
