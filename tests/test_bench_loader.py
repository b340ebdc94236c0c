"""`iep-bench loader`: what a pass over the data reads, and the files of the comparison."""

from pathlib import Path

import numpy as np
from bench_cases import iep_bench, report_of
from tiny_data import IMAGES, TRAIN, arrays, write_data

from iep.bench.measure_loader import made_data, order_rows


def test_image_order_reads_every_question_once_and_random_order_every_image_once():
    images = arrays(TRAIN)["image_idxs"]
    rows = order_rows(images, "image", [0])
    assert sorted(rows.tolist()) == list(range(TRAIN))
    assert images[rows].tolist() == sorted(images.tolist())
    rows = order_rows(images, "random", [0])
    assert sorted(images[rows].tolist()) == list(range(IMAGES))
    assert rows.tolist() != order_rows(images, "random", [1]).tolist()


def test_generated_data_are_valid_and_random(tmp_path: Path):
    made = made_data(tmp_path, 3, seed=1)
    questions, features = made.questions, made.features
    assert (features.shape, features.dtype) == ((3, 1024, 14, 14), np.dtype("float16"))
    assert len({features.read(np.array([row])).numpy().tobytes() for row in range(3)}) == 3
    assert questions.image_idxs.tolist() == np.repeat([0, 1, 2], 10).tolist()


def test_every_source_has_a_row_for_each_number_of_workers_and_generated_data_are_removed(tmp_path: Path):
    result = iep_bench("loader", "--images", 3, "--batch-size", 8, "--workers", "0,1", "--repeat", 2, "--out", tmp_path)
    comparisons = report_of(result, tmp_path, "loader")
    assert [each["workers"] for each in comparisons] == [0, 1]
    names = [f"{source}, {order} order" for source in ("cold", "warm", "memory") for order in ("image", "random")]
    for each in comparisons:
        assert [row["name"] for row in each["rows"]] == names
        assert all(row["facts"]["GB/s"] > 0 and row["seconds"]["batch"]["repeats"] == 2 for row in each["rows"])


def test_existing_data_are_measured_and_left_unchanged(tmp_path: Path):
    data = write_data(tmp_path / "data", "float16")
    before = {path: path.read_bytes() for path in data.iterdir()}
    flags = ("--batch-size", 4, "--workers", 0, "--repeat", 1, "--features", "warm")
    result = iep_bench("loader", "--data", data, "--split", "train", *flags)
    assert result.exit_code == 0, result.output
    assert f"{TRAIN} questions about {IMAGES} images of {data}, split train" in result.output
    assert {path: path.read_bytes() for path in data.iterdir()} == before
