"""`iep-bench loader`: what a pass hands out, what it says of the file's pages, and its files."""

from pathlib import Path

import numpy as np
import pytest
from bench_cases import iep_bench, report_of
from tiny_data import IMAGES, TRAIN, arrays, assert_one_error, write_data

from iep.bench.loader import cached_share, drop_pages, made_data, order_rows, touch_pages


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
    path = tmp_path / "file"
    path.write_bytes(bytes(2**22))
    touch_pages(path)
    if in_memory(tmp_path) or cached_share(path) is None:
        pytest.skip("pages of a file in memory cannot be dropped, and not every file system tells what is cached")
    assert cached_share(path) == 1
    drop_pages(path)
    assert cached_share(path) < 1


def test_the_data_made_are_sound_and_random(tmp_path: Path):
    questions, features, vocab = made_data(tmp_path, 3, seed=1)
    features.verify()
    assert (features.shape, features.dtype) == ((3, 1024, 14, 14), np.dtype("float16"))
    assert len({features.read(np.array([row])).numpy().tobytes() for row in range(3)}) == 3
    assert questions.image_idxs.tolist() == np.repeat([0, 1, 2], 10).tolist()
    assert questions.programs.max() < len(vocab.program)


def test_every_way_has_a_row_for_each_number_of_workers_and_the_data_made_are_removed(tmp_path: Path):
    result = iep_bench("loader", "--images", 3, "--batch-size", 8, "--workers", "0,1", "--repeat", 2, "--out", tmp_path)
    comparisons = report_of(result, tmp_path, "loader")
    assert [each["workers"] for each in comparisons] == [0, 1]
    sources = ("cold", "warm", "memory")
    names = [f"{s}, {o} order{p}" for s in sources for o in ("image", "random") for p in ("", ", plans")]
    for each in comparisons:
        assert [row["name"] for row in each["rows"]] == names
        assert all(row["GB/s"] > 0 and row["seconds"]["batch"]["repeats"] == 2 for row in each["rows"])


def test_data_of_ones_own_are_measured_and_left_alone(tmp_path: Path):
    data = write_data(tmp_path / "data", "float16")
    before = {path: path.read_bytes() for path in data.iterdir()}
    flags = ("--batch-size", 4, "--workers", 0, "--repeat", 1, "--features", "warm")
    result = iep_bench("loader", "--data", data, "--split", "train", *flags)
    assert result.exit_code == 0, result.output
    assert f"{TRAIN} questions about {IMAGES} images of {data}, split train" in result.output
    assert {path: path.read_bytes() for path in data.iterdir()} == before
    test = ("loader", "--data", data, "--split", "test", *flags)
    assert_one_error(iep_bench(*test), "test_questions.h5: has no programs to plan")
    assert iep_bench(*test, "--plans", "without").exit_code == 0


@pytest.mark.parametrize(
    "flags", [("--images", 3, "--data", "x"), ("--split", "val"), ("--features", "tape"), ("--plans", "both")]
)
def test_wrong_flags_are_usage_errors(flags: tuple):
    assert iep_bench("loader", *flags).exit_code == 2
