"""`iep-export`: the libraries that training tools use read what it writes."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from clevr_files import question, write_clevr, write_questions
from click.testing import CliRunner, Result
from PIL import Image
from tiny_data import assert_one_error

from iep.cli.export import main
from iep.reward import clevr_reward

os.environ["HF_HUB_OFFLINE"] = "1"  # before datasets is imported
from datasets import Dataset, load_dataset

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "data" / "sample"
DETAILS = ["question_index", "image_index", "question_type", "program", "program_length", "scene"]
COLUMNS = {
    "hf": ["image", "question", "answer", *DETAILS],
    "trl": ["image", "prompt", "problem", "solution", *DETAILS],
    "easyr1": ["images", "problem", "answer", *DETAILS],
    "verl": ["data_source", "prompt", "images", "ability", "reward_model", "extra_info"],
    "swift": ["messages", "images", "solution", *DETAILS],
    "llava": ["id", "image", "conversations", *DETAILS],
}


def iep_export(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def exported(directory: Path, form: str, out: Path, *options: object) -> Path:
    result = iep_export(directory, "--format", form, "--out", out, *options)
    assert result.exit_code == 0, result.output
    return out


def read(out: Path, split: str, cache: Path) -> Dataset:
    """The rows of a split, as `datasets` reads them."""
    if (out / "data").exists():
        return load_dataset(str(out), split=split, cache_dir=str(cache))
    (path,) = out.glob(f"{split}.json*")
    return load_dataset("json", data_files=str(path), split="train", cache_dir=str(cache))


def entries(path: Path, key: str) -> list[dict]:
    return json.loads(path.read_text())[key]


@pytest.fixture
def clevr(tmp_path: Path) -> Path:
    """A directory like CLEVR's, without scenes."""
    return write_clevr(tmp_path / "CLEVR")


@pytest.mark.parametrize("form", COLUMNS)
def test_datasets_reads_every_question_with_its_image_and_a_solution_that_earns_the_reward(form: str, tmp_path: Path):
    out = exported(SAMPLE, form, tmp_path / "out")
    for split in ("train", "val"):
        asked = entries(SAMPLE / "questions" / f"CLEVR_{split}_questions.json", "questions")
        scenes = entries(SAMPLE / "scenes" / f"CLEVR_{split}_scenes.json", "scenes")
        rows = read(out, split, tmp_path)
        assert rows.column_names == COLUMNS[form]
        assert len(rows) == len(asked)
        for row, true in zip(rows, asked, strict=True):
            details = row.get("extra_info", row)
            assert details["question_index"] == true["question_index"]
            assert details["program"].split()[-1] == "scene"
            assert json.loads(details["scene"]) == scenes[true["image_index"]]
            assert true["question"] in str(row)
            said = row.get("conversations", [{}])[-1].get("value") or row.get("reward_model", {}).get("ground_truth")
            assert clevr_reward(true["answer"], row.get("solution") or row.get("answer") or said) == 1.0
        image = rows[-1].get("image") or rows[-1]["images"][0]
        opened = Image.open(out / image) if isinstance(image, str) else image
        pixels = Image.open(SAMPLE / "images" / split / asked[-1]["image_filename"])
        np.testing.assert_array_equal(np.asarray(opened), np.asarray(pixels))


def test_the_rewards_of_the_documentation_give_1_to_true_answers_alone(tmp_path: Path):
    page = (ROOT / "docs" / "other_models.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "easyr1_score" in block)
    names: dict = {}
    exec(code, names)
    trl, verl, easyr1 = (
        read(exported(SAMPLE, form, tmp_path / form), "val", tmp_path)[0] for form in ("trl", "verl", "easyr1")
    )
    for text, reward in ((f"It is <answer>{easyr1['answer'].upper()}</answer>.", 1.0), ("I cannot say", 0.0)):
        assert names["reward"]([[{"role": "assistant", "content": text}]], [trl["solution"]], prompts=None) == [reward]
        assert names["verl_score"](verl["data_source"], text, verl["reward_model"]["ground_truth"]) == reward
        assert names["easyr1_score"]({"response": text, "ground_truth": easyr1["answer"]})["overall"] == reward


@pytest.mark.parametrize("form", ["trl", "verl", "swift"])
def test_rows_have_the_steps_of_their_programs_and_prompts_ask_for_a_thought(form: str, tmp_path: Path):
    for row in read(exported(SAMPLE, form, tmp_path / "out", "--trace", "--think"), "val", tmp_path):
        details = row.get("extra_info", row)
        assert len(details["trace"]) == details["program_length"]
        answer = row.get("solution") or row["reward_model"]["ground_truth"]
        assert clevr_reward(details["trace"][-1].rpartition(" = ")[2], answer) == 1.0
        assert "<think> </think>" in (row.get("prompt") or row["messages"])[0]["content"]


def test_questions_of_closure_are_about_the_images_of_a_split(clevr: Path, tmp_path: Path):
    shutil.copy(clevr / "questions" / "CLEVR_val_questions.json", clevr / "or_mat_val.json")
    rows = json.loads(
        (exported(clevr, "llava", tmp_path / "out", "--split", "or_mat_val") / "or_mat_val.json").read_text()
    )
    images = {path.read_bytes() for path in (clevr / "images" / "val").iterdir()}
    assert {(tmp_path / "out" / row["image"]).read_bytes() for row in rows} <= images


def test_equal_questions_about_one_image_are_written_once_and_splits_share_no_image(clevr: Path, tmp_path: Path):
    asked = [question(0, 0, "train"), question(1, 0, "train"), question(2, 1, "train"), question(3, 1, "train", "blue")]
    write_questions(clevr, "train", [each | {"answer": True} for each in asked])
    out = exported(clevr, "swift", tmp_path / "out")
    train, val = (read(out, split, tmp_path) for split in ("train", "val"))
    assert train["question_index"][:] == [0, 2, 3]
    assert set(train["solution"]) == {"<answer>yes</answer>"}, "the public generator's true is CLEVR's yes"
    assert not {path for (path,) in train["images"]} & {path for (path,) in val["images"]}
    assert not list(out.glob("test*")), "the test split has no answers"


@pytest.mark.parametrize("form", ["hf", "verl"])
def test_a_program_after_many_questions_without_one_is_exported(clevr: Path, tmp_path: Path, form: str):
    asked = [question(n, 0, "train") | {"question": f"Question {n}?"} for n in range(203)]
    write_questions(clevr, "train", [*({**each, "program": None} for each in asked[:202]), asked[202]])
    rows = read(exported(clevr, form, tmp_path / "out", "--split", "train"), "train", tmp_path)
    details = [row.get("extra_info", row) for row in (rows[0], rows[202])]
    assert [each["program"] for each in details] == ["", "count filter_color[red] scene"]
    assert [each["program_length"] for each in details] == [0, 3]


# What cannot be exported


def test_nothing_is_left_of_an_export_that_fails(clevr: Path, tmp_path: Path):
    image = clevr / "images" / "val" / "CLEVR_val_000001.png"
    image.write_bytes(image.read_bytes()[:-9])
    for form in ("hf", "llava"):
        result = iep_export(clevr, "--format", form, "--out", tmp_path / "out")
        assert_one_error(result, f"{image}: not a whole PNG image")
    assert {path.name for path in tmp_path.iterdir()} == {clevr.name}


def test_without_pyarrow_parquet_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert_one_error(iep_export(SAMPLE, "--format", "hf", "--out", tmp_path / "out"), "pip install 'iep[export]'")
    exported(SAMPLE, "swift", tmp_path / "out")


def without(key: str) -> dict:
    return {name: value for name, value in question(1, 0, "val").items() if name != key}


@pytest.mark.parametrize(
    ("asked", "options", "message"),
    [
        ([question(0, 0, "val"), without("answer")], (), "question 1: 'answer' is None, expected a string"),
        ([question(0, 9, "val")], (), "question 0: is about image 9, but there are 3 images (0 to 2)"),
        ([question(0, 0, "val")], ("--split", "test"), "the questions have no answers, which an export needs"),
        ([question(0, 0, "val")], ("--split", "nowhere"), "no questions of split 'nowhere' (found: train, val, test)"),
        ([question(0, 0, "val")], ("--trace",), "CLEVR_val_scenes.json: no such file"),
    ],
)
def test_questions_that_cannot_be_exported_are_one_line(clevr: Path, tmp_path: Path, asked, options, message):
    write_questions(clevr, "val", asked)
    result = iep_export(clevr, "--format", "hf", "--split", "val", "--out", tmp_path / "out", *options)
    assert_one_error(result, message)


def test_a_question_without_a_program_or_a_scene_that_it_runs_on_has_no_trace(clevr: Path, tmp_path: Path):
    path = clevr / "scenes" / "CLEVR_val_scenes.json"
    path.parent.mkdir()
    for asked, scenes, message in (
        (question(0, 0, "val"), [{}], "image 1 has no scene"),
        (question(0, 0, "val"), [{}] * 3, "its program does not run on the scene of image 0 (KeyError"),
        (without("program"), [{}] * 3, "question 0: has no program, from which a trace is made"),
    ):
        write_questions(clevr, "val", [asked])
        path.write_text(json.dumps({"scenes": scenes}))
        result = iep_export(clevr, "--format", "trl", "--split", "val", "--out", tmp_path / "out", "--trace")
        assert_one_error(result, str(clevr), message)


def test_a_directory_is_written_if_it_is_empty(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    assert (exported(SAMPLE, "swift", tmp_path / "empty") / "train.jsonl").exists()
    assert_one_error(iep_export(SAMPLE, "--format", "swift", "--out", tmp_path), "not empty; choose a new directory")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
