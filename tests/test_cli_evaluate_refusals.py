"""`iep-eval`: what cannot be evaluated, read or written is named in one line, and what stood before stays."""

import shutil
from pathlib import Path

import pytest
from evaluate_cases import evaluate, iep_eval
from tiny_data import VAL, VOCAB, assert_one_error, features, files_no_larger_than, write_h5

from iep.runtime.files import write_json


def test_where_nothing_can_be_written_nothing_is_evaluated(data, run, tmp_path: Path):
    (tmp_path / "report.json").mkdir()
    result = iep_eval("--ee", run["ee"], "--data", data, "--out", tmp_path)
    assert_one_error(result, f"{tmp_path / 'report.json'}")
    assert not (tmp_path / "predictions.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "problem", "code"),
    [
        ([], "nothing to evaluate: give --pg CKPT, --ee CKPT, both, or --baseline CKPT", 1),
        (["--baseline", "{lstm}", "--ee", "{ee}"], "--baseline answers alone", 1),
        (
            ["--ee", "{ee}", "--programs", "predicted"],
            "--programs predicted needs a program generator: give --pg CKPT",
            1,
        ),
        (["--pg", "{pg}", "--programs", "ground-truth"], "needs an execution engine: give --ee CKPT", 1),
        (["--baseline", "{lstm}", "--programs", "ground-truth"], "--baseline answers alone", 1),
        (["--pg", "{ee}"], "{ee}: holds an execution engine, expected a checkpoint with a program generator", 1),
        (["--ee", "{pg}"], "{pg}: holds a program generator, expected a checkpoint with an execution engine", 1),
        (["--baseline", "{joint}"], "{joint}: holds a program generator, an execution engine, expected", 1),
        (["--ee", "none.pt"], "none.pt: no such file", 1),
        (["--baseline", "{lstm}", "--split", "vall"], "vall_questions.h5: no such file", 1),
        (["--baseline", "{lstm}", "--device", "cuda:99"], "device 'cuda:99': not available here", 1),
        (["--baseline", "{lstm}", "--against", "old", "none.json"], "none.json: no such file", 1),
        (["--baseline", "{lstm}", "--against", "old"], "requires 2 arguments", 2),
        (["--baseline", "{lstm}", "--batching", "best"], "'best' is not one of", 2),
        (["--pg", "{pg}", "--beam-size", "0"], "0 is not in the range x>=1", 2),
        (["--pg", "{pg}", "--max-program-length", "1"], "1 is not in the range 2<=x<=1000", 2),
        (
            ["--baseline", "{lstm}", "--beam-size", "5"],
            "--beam-size and --max-program-length are for",
            2,
        ),
        (["--ee", "{ee}", "--max-program-length", "9"], "are for a program generator: give --pg CKPT", 2),
        (["--baseline", "{lstm}", "--images", "CLEVR"], "are for the HTML report: give --report DIR too", 2),
        (["--baseline", "{lstm}", "--report-questions", "5"], "are for the HTML report: give --report DIR too", 2),
        (["--baseline", "{lstm}", "--data", "none"], "none/vocab.json: no such file", 1),
        (["--baseline", "{lstm}", "--data", "{lstm}"], "{lstm}", 1),
        (["--baseline", "{lstm}", "--report", ""], "'--report': the name is empty, expected a directory", 2),
        (["--baseline", "{lstm}", "--out", ""], "'--out': the name is empty, expected a directory", 2),
        (["--baseline", "{lstm}", "--num-samples", "0"], "0 is not in the range x>=1", 2),
        (["--baseline", "{lstm}", "--out", "{lstm}"], "is a file", 2),
        (["--baseline", "{lstm}", "--name", "a\udcff"], "--name: the name 'a\\udcff' is not UTF-8 text", 2),
        (["--baseline", "{lstm}", "--against", "\udcff", "x"], "--against: the name '\\udcff' is not UTF-8 text", 2),
    ],
)
def test_refused_input_is_one_line(data, run, tmp_path, arguments, problem: str, code: int):
    arguments = [argument.format(**run) for argument in arguments]
    assert_one_error(iep_eval("--data", data, *arguments), problem.format(**run), code=code)


def test_the_data_directory_is_required(run: dict[str, Path]):
    assert_one_error(iep_eval("--baseline", run["lstm"]), "Missing option '--data'", code=2)


@pytest.mark.parametrize(
    ("flag", "kind"), [("pg", "question"), ("pg", "program"), ("ee", "answer"), ("lstm", "answer")]
)
def test_data_of_another_vocabulary_are_refused(data, run, tmp_path: Path, flag: str, kind: str):
    other = Path(shutil.copytree(data, tmp_path / "data"))
    content = VOCAB.to_json()
    key = f"{kind}_token_to_idx"
    content[key] = content[key] | {"zebra": len(content[key])}
    write_json(other / "vocab.json", content)
    option = "baseline" if flag == "lstm" else flag
    result = iep_eval(f"--{option}", run[flag], "--data", other)
    assert_one_error(result, f"{run[flag]}: trained with another vocabulary: {kind} token", "'zebra' in the data")


def test_features_of_another_shape_are_refused(data: Path, run: dict[str, Path], tmp_path: Path):
    other = Path(shutil.copytree(data, tmp_path / "data"))
    path = write_h5(other / "val_features.h5", {"features": features(1, channels=5)})
    assert_one_error(iep_eval("--ee", run["ee"], "--data", other), f"{path}: features are (5, 4, 4) an image")


def test_a_truncated_checkpoint_is_named(data: Path, run: dict[str, Path], tmp_path: Path):
    path = tmp_path / "cut.pt"
    path.write_bytes(run["lstm"].read_bytes()[:-100])
    assert_one_error(iep_eval("--baseline", path, "--data", data), f"{path}: not a whole checkpoint file")


def test_a_truncated_split_leaves_the_earlier_report(data: Path, run: dict[str, Path], tmp_path: Path):
    evaluate(tmp_path / "out", "--baseline", run["lstm"], "--data", data)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    other = Path(shutil.copytree(data, tmp_path / "data"))
    (other / "val_questions.h5").write_bytes((data / "val_questions.h5").read_bytes()[:-100])
    result = iep_eval("--baseline", run["lstm"], "--data", other, "--out", tmp_path / "out")
    assert_one_error(result, f"{other / 'val_questions.h5'}: not a whole HDF5 file")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_full_disk_leaves_the_earlier_report_and_names_the_file(data: Path, run: dict[str, Path], tmp_path: Path):
    arguments = ["--baseline", run["lstm"], "--data", data]
    evaluate(tmp_path, *arguments)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    # Of one question the report is the larger file, of all of them the predictions, which are written first.
    for name, samples in (("predictions.jsonl", VAL), ("report.json", 1)):
        with files_no_larger_than(500):
            result = iep_eval(*arguments, "--num-samples", samples, "--out", tmp_path)
        assert_one_error(result, f"{tmp_path / name}: file size limit reached")
        assert (tmp_path / name).read_bytes() == before[name]
    assert {path.name for path in tmp_path.iterdir()} == before.keys()


@pytest.mark.parametrize("option", ["--out", "--report"])
def test_the_table_is_printed_even_where_no_file_can_be_written(data, run, tmp_path: Path, option: str):
    arguments = ["--baseline", run["lstm"], "--data", data, "--name", "blind"]
    report, _, output = evaluate(tmp_path / "whole", *arguments)
    with files_no_larger_than(500):
        result = iep_eval(*arguments, option, tmp_path / "full")
    assert_one_error(result, "file size limit reached")
    overall = [line for line in output.splitlines() if line.startswith(("overall", "exist", "count"))]
    assert f"{100 * report['accuracy']['overall']:.1f}" in overall[0]
    assert [line for line in result.output.splitlines() if line.startswith(("overall", "exist", "count"))] == overall
    assert "Wrote" not in result.output
