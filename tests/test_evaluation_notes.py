"""What `iep-eval` says, in the terminal and in its HTML report, of what might be taken otherwise than it is meant."""

import html
import re
import shutil
from pathlib import Path

from ask_cases import SAMPLE, sample_data, trained
from clevr_files import write_images
from evaluate_cases import evaluate, iep_eval
from tiny_data import VAL, arrays, write_h5

TYPES = "Question types are those of the predicted programs: the val split has no programs."


def page_notes(out: Path) -> list[str]:
    """The notes of an HTML report."""
    notes = re.search(r'<div id="notes">(.*?)</div>', (out / "report.html").read_text(), re.DOTALL)[1]
    return [html.unescape(note) for note in re.findall(r'<p class="hint">(.*?)</p>', notes)]


def without_programs(data: Path, out: Path) -> Path:
    other = Path(shutil.copytree(data, out))
    datasets = arrays(VAL)
    del datasets["programs"]
    write_h5(other / "val_questions.h5", datasets)
    return other


def test_types_told_by_predicted_programs_are_said_to_be(data, run, tmp_path: Path):
    models = ["--pg", run["pg"], "--ee", run["ee"]]
    other = without_programs(data, tmp_path / "data")
    _, _, output = evaluate(tmp_path / "out", *models, "--data", other, "--report", tmp_path / "out")
    commonest = "There is no column commonest: the val split has no programs or no answers."
    assert TYPES in output.splitlines()
    assert commonest in output.splitlines()
    assert page_notes(tmp_path / "out") == [TYPES, commonest]


def test_nothing_is_said_of_types_of_true_programs_or_of_none(data, run, tmp_path: Path):
    models = ["--pg", run["pg"], "--ee", run["ee"]]
    _, _, output = evaluate(tmp_path, *models, "--data", data, "--report", tmp_path)
    assert "Question types" not in output
    assert "column commonest" not in output
    assert page_notes(tmp_path) == []
    other = without_programs(data, tmp_path / "data")
    assert "Question types" not in iep_eval("--baseline", run["lstm"], "--data", other).stdout


def test_without_a_train_split_the_missing_column_is_said(data, run, tmp_path: Path):
    other = Path(shutil.copytree(data, tmp_path / "data"))
    (other / "train_questions.h5").unlink()
    report, _, output = evaluate(tmp_path / "out", "--baseline", run["lstm"], "--data", other)
    assert report["baselines"] == {}
    assert f"There is no column commonest: {other} has no train split to count answers on." in output.splitlines()
    unanswered = iep_eval("--baseline", run["lstm"], "--data", other, "--split", "test").stdout
    assert "no column commonest" not in unanswered


def test_pictures_of_other_images_than_the_features_are_said_to_be_wrong(data, run, tmp_path: Path):
    made = sample_data(tmp_path / "data", "--backbone", "patches", "--patch-size", 16)
    models = ["--baseline", trained(made, "lstm", tmp_path / "lstm", 1)]

    def noted(images: Path, data: Path = made, models: list[object] = models) -> list[str]:
        out = tmp_path / "out"
        _, _, output = evaluate(out, *models, "--data", data, "--report", out, "--images", images)
        notes = page_notes(out)
        assert [line for line in output.splitlines() if "not the images" in line] == notes
        return notes

    assert noted(SAMPLE) == []
    other = Path(shutil.copytree(SAMPLE, tmp_path / "other"))
    more = other / "images" / "val" / "CLEVR_val_000004.png"
    shutil.copy(SAMPLE / "images" / "val" / "CLEVR_val_000000.png", more)
    assert noted(other) == []
    for change in (lambda path: path.write_bytes(path.read_bytes() + b"x"), Path.unlink):
        change(other / "images" / "val" / "CLEVR_val_000001.png")
        (note,) = noted(other)
        assert note.startswith(
            f"{other / 'images' / 'val'}: not the images that {made / 'val_features.h5'} was made of"
        )
    write_images(tmp_path / "CLEVR", "val", 5)
    assert noted(tmp_path / "CLEVR", data, ["--baseline", run["lstm"]]) == []
