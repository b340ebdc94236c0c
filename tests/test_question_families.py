"""Questions of some families: which are short, what is refused, and that training and evaluation see these alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from evaluate_cases import evaluate
from tiny_data import TRAIN, VAL, VOCAB, arrays, assert_one_error, newest, padded, refused, tiny, write_data, write_h5
from train_cases import iep_train, weights

from iep.data.question_families import family_filter, read_families
from iep.data.question_file import Questions, read_questions
from iep.errors import InputError

FAMILIES = 13
"""The number of question families of the tiny data set. The family of a question is its row modulo this number."""


def questions_of(path: Path, lengths: dict[int, list[int]]) -> Questions:
    """Questions with programs of so many functions, by family, the families' questions in turn."""
    pairs = sorted((turn, family, n) for family, given in lengths.items() for turn, n in enumerate(given))
    datasets = arrays(len(pairs))
    datasets["programs"] = padded([[VOCAB.program_index["unique"]] * (n - 1) + [4] for _, _, n in pairs])
    datasets["question_families"] = np.array([family for _, family, _ in pairs], dtype=np.int32)
    return read_questions(write_h5(path, datasets), VOCAB)


def families_left(questions: Questions, spec: str, train: Path | None = None) -> list[int]:
    return sorted(set(family_filter(spec, train, VOCAB)(questions).families.tolist()))


# What is short


def test_a_family_is_short_below_a_mean_of_sixteen_and_long_from_there_on(tmp_path: Path):
    questions = questions_of(tmp_path / "a.h5", {0: [15], 1: [16], 2: [15, 16], 3: [17], 4: [15, 17], 5: [3, 28]})
    short, long = (family_filter(families, None, VOCAB)(questions) for families in ("short", "long"))
    assert set(short.families.tolist()) == {0, 2, 5}
    assert set(long.families.tolist()) == {1, 3, 4}
    assert sorted([*short.orig_idxs, *long.orig_idxs]) == sorted(questions.orig_idxs)
    assert all((np.diff(part.orig_idxs) > 0).all() for part in (short, long))


def test_lengths_are_those_of_training_and_a_family_unknown_there_is_measured_where_it_is(tmp_path: Path):
    train = questions_of(tmp_path / "train.h5", {0: [10], 1: [20]}).path
    questions = questions_of(tmp_path / "val.h5", {0: [20], 1: [10], 2: [20], 3: [10]})
    assert families_left(questions, "short", train) == [0, 3]
    assert families_left(questions, "long", train) == [1, 2]
    assert families_left(questions, "long", tmp_path / "missing.h5") == [0, 2]
    without = replace(questions.select(slice(2)), programs=None)
    assert families_left(without, "long", train) == [1]
    with pytest.raises(InputError, match=r"val\.h5: no program tells whether family 0 is short or long"):
        family_filter("long", None, VOCAB)(without)


# A file that lists them


@pytest.mark.parametrize("text", ["- 3\n- 0\n- 12\n", "[\n  3,\n  0,\n  12\n]\n"])
def test_a_list_of_families_is_read_from_json_and_yaml(tmp_path: Path, data: Path, text: str):
    (tmp_path / "families").write_text(text)
    questions = read_questions(data / "train_questions.h5", VOCAB)
    left = family_filter(str(tmp_path / "families"), None, VOCAB)(questions)
    assert left.orig_idxs.tolist() == [1000 + row for row in range(TRAIN) if row % FAMILIES in (0, 3, 12)]
    assert left.programs.tolist() == questions.programs[left.orig_idxs - 1000].tolist()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "no such file, expected a file that lists question families, or one of the words short and long"),
        ("families: [1]", "expected a list of question families, such as [0, 3, 12]"),
        ("[1, two]", "item 1 is 'two', expected a whole number from 0"),
    ],
)
def test_a_bad_list_of_families_is_one_line_that_names_the_file(tmp_path: Path, text: str | None, problem: str):
    path = tmp_path / "families.json"
    if text is not None:
        path.write_text(text)
    with refused("", path, problem):
        read_families(path)


# Training


def assert_trained_alike(one: Path, other: Path) -> None:
    first, second = (weights(newest(out), "generator") for out in (one, other))
    assert all(torch.equal(first[name], second[name]) for name in first)


def validations(result: Result) -> list[str]:
    """Return the lines about them, which hold accuracies; a run of `tiny` has three."""
    lines = [line for line in result.stdout.splitlines() if line.startswith("pg ")]
    assert len(lines) == 3
    return lines


def test_training_on_families_is_training_on_a_file_that_holds_only_them(data: Path, tmp_path: Path):
    (tmp_path / "families.json").write_text("[2, 5, 6]")
    chosen = [row for row in range(TRAIN) if row % FAMILIES in (2, 5, 6)]
    alone = write_data(tmp_path / "alone")
    for split, count, rows in (("train", TRAIN, chosen[:7]), ("val", VAL, [row for row in chosen if row < VAL][1:4])):
        write_h5(alone / f"{split}_questions.h5", {name: values[rows] for name, values in arrays(count).items()})
    common = ("--model", "pg", *tiny("pg"), "batch_size=3")
    taken = ("--num-train-samples", 7, "skip_val_samples=1", "num_val_samples=3")
    arguments = ("--families", tmp_path / "families.json", "--data", data, "--out", tmp_path / "a", *taken)
    filtered, whole = iep_train(*common, *arguments), iep_train(*common, "--data", alone, "--out", tmp_path / "b")
    assert filtered.exit_code == whole.exit_code == 0, filtered.output + whole.output
    assert_trained_alike(tmp_path / "a", tmp_path / "b")
    assert validations(filtered) == validations(whole)


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("val_split=valB", "valB_questions.h5: no such file"),
        (f"skip_val_samples={VAL}", f"val_questions.h5: of {VAL} questions the first {VAL} are skipped, none is left"),
        ("families=long", "no question of the families long, only of [0, 1, 2, "),
        ("families=longer", "longer: no such file, expected a file that lists question families"),
    ],
)
def test_a_split_that_is_not_there_or_leaves_no_question_is_one_line(
    data: Path, tmp_path: Path, setting: str, problem: str
):
    result = iep_train("--model", "pg", "--data", data, "--out", tmp_path / "run", *tiny("pg"), setting)
    assert_one_error(result, problem)
    assert not (tmp_path / "run").exists()


# Evaluation


def test_evaluation_takes_families_then_skips_then_counts(data: Path, run: dict[str, Path], tmp_path: Path):
    (tmp_path / "families.yaml").write_text("[0, 1, 2]")
    chosen = ("--families", tmp_path / "families.yaml", "--skip-samples", 2, "--num-samples", 3)
    report, rows, output = evaluate(tmp_path / "out", "--pg", run["pg"], "--ee", run["ee"], "--data", data, *chosen)
    kept = [row for row in range(VAL) if row % FAMILIES in (0, 1, 2)][2:5]
    assert [row["question_index"] for row in rows] == [1000 + row for row in kept]
    assert report["questions"] == 3
    selection = f"families {tmp_path / 'families.yaml'}, without the first 2, the first 3"
    assert report["selection"] == selection
    assert f"Of the val split: {selection}." in output
    _, every, _ = evaluate(tmp_path / "all", "--pg", run["pg"], "--ee", run["ee"], "--data", data)
    assert [row["predicted_answer"] for row in rows] == [every[row]["predicted_answer"] for row in kept]
