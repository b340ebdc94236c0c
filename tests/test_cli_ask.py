"""`iep-ask` from the command line: answers, words, programs, questions that are typed or piped, features, and what is
said about bad input."""

import json
import shlex
import shutil
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
import torch
import torchvision
from ask_cases import COUNT, IMAGE, answered, changed, iep_ask, sample_data, trained
from clevr_files import write_images
from evaluate_cases import evaluate
from features_cases import SMALL
from tiny_data import assert_one_error, newest

from iep.cli.ask import typed_questions
from iep.models.checkpoint import read_checkpoint
from iep.preprocess.backbones import randomize
from iep.preprocess.recipe import file_digest

QUESTION, OTHER = "How many small things are there?", "Are there any blue cubes?"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_data(tmp_path_factory.mktemp("sample"))


@pytest.fixture(scope="module")
def parts(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """A generator, good enough to be run, an engine, and the image that is asked about."""
    root = tmp_path_factory.mktemp("runs")
    pg, ee = trained(sample, "pg", root / "pg", 150), trained(sample, "ee", root / "ee", 20)
    return "--pg", pg, "--ee", ee, "--image", IMAGE


@pytest.mark.parametrize("beam", [(), ("--beam-size", 3)])
def test_answers_and_programs_are_those_of_iep_eval(parts, sample, tmp_path, beam):
    _, rows, _ = evaluate(tmp_path / "eval", *parts[:4], "--data", sample, "--workers", 0, *beam)
    rows = [row for row in rows if row["image_index"] == 2]
    questions = [argument for row in rows for argument in ("--question", row["question"])]
    asked = [json.loads(line) for line in answered(*parts, *questions, "--json", *beam).splitlines()]
    assert len(asked) == len(rows) == 20
    assert len({tuple(row["predicted_program"]) for row in rows}) > 3
    for row, found in zip(rows, asked, strict=True):
        assert found["question"] == row["question"]
        assert found["answers"][0]["answer"] == row["predicted_answer"]
        assert found["answers"][0]["probability"] == pytest.approx(row["probability"], abs=2e-6)
        assert found["program"] == row["predicted_program"]
        assert found["run"][0] == row["predicted_program"][0]
        assert found["unknown_words"] == []


def test_an_answer_is_shown_with_runners_up_and_its_program_as_a_tree(parts):
    asked = ("--ee", newest(parts[3]), "--image", IMAGE, "--program", COUNT)
    lines = answered(*asked, "--question", QUESTION).splitlines()
    assert lines[0] == QUESTION
    shares = [float(word.strip("%,)")) for word in lines[1].split() if "%" in word]
    assert len(shares) == 3
    assert shares == sorted(shares, reverse=True)
    assert lines[2:5] == ["  count", "  └─ filter_size[small]", "     └─ scene"]
    assert "then" not in answered(*asked, "--top", 1)
    one, other = answered(*asked, "--program", "exist scene", "--top", 5, "--json").splitlines()
    first, second = json.loads(one), json.loads(other)
    assert (first["program"], second["program"]) == (COUNT.split(), ["exist", "scene"])
    assert len(first["answers"]) == len(second["answers"]) == 5
    assert first["answers"] != second["answers"]
    assert "question" not in first


def test_questions_asked_together_or_line_by_line_are_answered_as_one_by_one(parts, tmp_path):
    parts = (*parts[:5], *write_images(tmp_path, "val", 1, size=(37, 91)))  # an image of any size and kind
    one_by_one = "".join(answered(*parts, "--question", text) for text in (QUESTION, OTHER))
    assert answered(*parts, *("--question", QUESTION), *("--question", f"  {OTHER} ")) == one_by_one
    assert answered(*parts, typed=f"{QUESTION}\n\n \t\n{OTHER}\n\n  \n") == one_by_one
    assert answered(*parts, typed="") == ""


def test_unknown_words_are_named_once_with_the_nearest_known_one_and_taken_as_unk(parts):
    output = answered(*parts, "--question", "What color of smal zzz zzz is it?")
    assert "'smal' is not in the vocabulary and is read as <UNK>; did you mean 'small'?" in output
    assert output.count("'zzz' is not in the vocabulary and is read as <UNK>\n") == 1
    unknown = ("--question", "How many <UNK> qqq things?", "--question", "How many xxx yyy things?")
    first, second = (json.loads(line) for line in answered(*parts, *unknown, "--json").splitlines())
    assert first["unknown_words"] == ["<UNK>", "qqq"]
    assert first["answers"] == second["answers"]


def test_words_are_known_in_capitals(parts):
    questions = ("How many red things are there?", "HOW MANY Red THINGS ARE THERE?")
    asked = [argument for question in questions for argument in ("--question", question)]
    first, second = (json.loads(line) for line in answered(*parts, *asked, "--json").splitlines())
    assert first["unknown_words"] == second["unknown_words"] == []
    assert first["answers"] == second["answers"]


DOUBTED = [
    ("exist filter_shape[cube] relate[left] unique filter_color[red] scene", "yes", "no red thing was found"),
    (
        "query_color unique filter_shape[cube] scene",
        "blue",
        "2 cubes were found where one is expected",
    ),
    ("less_than count scene count scene", "yes", "the objects found in the image give the answer 'no'"),
]
"""Programs about `IMAGE`, their answers by the networks of the package, and what the found objects say."""


def test_an_answer_that_the_found_objects_contradict_is_shown_with_the_reason(parts):
    programs = [argument for program, *_ in DOUBTED for argument in ("--program", program)]
    sure = ("--program", "exist filter_shape[cube] scene")
    shown = answered("--image", IMAGE, *programs, *sure).split("\n\n")
    content = [json.loads(line) for line in answered("--image", IMAGE, *programs, *sure, "--json").splitlines()]
    for (_, answer, reason), text, found in zip(DOUBTED, shown, content, strict=False):
        assert text.splitlines()[0].startswith(f"  {answer} ")
        assert text.splitlines()[1] == f"  {reason}"
        assert found["answers"][0]["answer"] == answer
        assert found["warning"] == reason
    assert shown[3].splitlines()[1] == "  exist"
    assert "warning" not in content[3]
    resnet = answered("--ee", parts[3], "--image", IMAGE, *programs, "--json")  # whose objects are not known
    assert "warning" not in resnet


REFUSED = [
    # Options that do not go together.
    ("--image {image} --pg {pg}", 2, "--pg needs --ee"),
    ("--ee {ee} --image {image}", 1, "holds no program generator; give that of another run as pg (--pg CKPT)"),
    ("--ee {ee} --program {count}", 1, "{ee}: needs an image, and there is none"),
    ("--ee '' --image {image}", 2, "'--ee': the name is empty, expected a path"),
    ("--ee defualt --image {image}", 1, "defualt: no such file; did you mean 'default'?"),
    ("--image {image} --backbone resnet18", 1, "Error: default: records how its features were made (by synth)"),
    ("{run} --program {count} --pg x", 2, "--pg does not apply with --program"),
    ("{run} --program {count} --question a --question a", 1, "2 questions for 1 programs: give as many, or none"),
    ("{run} --program {count} --beam-size 2", 2, "--beam-size does not apply with --program"),
    ("--baseline x --image {image} --draw y.png", 2, "--draw does not apply with --baseline"),
    # Programs, questions and files.
    ("{run} --program 'count filter_colour[red] scene'", 1, "did you mean 'filter_color[red]'?"),
    ("{run} --program count --program count", 1, "program 1: the program ends after 1 token, inside its tree"),
    ("{run} --program 'count scene scene'", 1, "program token 2 (scene) comes after the tree is complete"),
    ("{run} --pg {pg} --question a --question ' ? '", 1, "question 2: the question '?' has no word"),
    ("--ee {ee} --image missing.png --program {count}", 1, "missing.png: no such file"),
    ("--ee {ee} --image {broken} --program {count}", 1, "broken.png: not an image"),
    ("{run} --pg {ee} --question a", 1, "{ee}: holds an execution engine"),
    ("{run} --pg {other} --question a", 1, "{other}: trained with another vocabulary: program token 12 is"),
    ("--baseline {ee} --image {image}", 1, "{ee}: holds an execution engine; give it as --ee"),
    # Pictures.
    ("{run} --program {count} --draw picture.gif", 2, "does not end in one of .png, .svg, .pdf"),
    ("{run} --program {count} --draw {broken}/a.png", 1, "{broken}: File exists"),
]


@pytest.mark.parametrize(("arguments", "code", "words"), REFUSED)
def test_refused_input_is_one_line(parts, runs, tmp_path, arguments: str, code: int, words: str):
    (tmp_path / "broken.png").write_bytes(IMAGE.read_bytes()[:500])
    names = {"pg": parts[1], "ee": parts[3], "run": f"--ee {parts[3]} --image {IMAGE}", "image": IMAGE}
    names |= {"count": f"'{COUNT}'", "other": runs["pg"]}
    names |= {"broken": tmp_path / "broken.png"}
    assert_one_error(iep_ask(*shlex.split(arguments.format(**names))), words.format(**names), code=code)


def test_a_checkpoint_without_a_recipe_is_asked_with_a_resnet101_or_the_backbone_that_is_given(parts, tmp_path):
    old = changed(parts[3], tmp_path / "old.pt", features={})
    asked = ("--pg", parts[1], "--ee", old, "--image", IMAGE, "--question", QUESTION)
    assumed = iep_ask(*asked, "--weights", "random")
    what = "they are assumed to be resnet101 to stage 3, 224x224 pixels, random weights"
    assert f"{old}: does not record how its features were made; {what}" in assumed.stderr
    assert_one_error(assumed, "(1024, 14, 14) an image, but the engine of", "is made for (64, 8, 8)", str(IMAGE))
    told = iep_ask(*asked, *SMALL)
    assert (told.exit_code, told.stderr) == (0, "")
    assert told.stdout.splitlines()[0] == QUESTION
    recorded = iep_ask(*parts, "--question", QUESTION, "--backbone", "synth")
    assert_one_error(recorded, "records how its features were made (by resnet18); another backbone does not apply")


@pytest.mark.parametrize("model", ["lstm", "cnn-lstm-sa"])
def test_a_baseline_answers_alone_as_in_iep_eval(sample, tmp_path, model):
    run = trained(sample, model, tmp_path / "run", 5)
    _, rows, _ = evaluate(tmp_path / "eval", "--baseline", run, "--data", sample, "--workers", 0)
    rows = [row for row in rows if row["image_index"] == 2]
    questions = [argument for row in rows for argument in ("--question", row["question"])]
    result = iep_ask("--baseline", run, "--image", IMAGE, *questions, "--json")
    assert result.exit_code == 0, result.output
    assert ("does not read the image" in result.stderr) == (model == "lstm")
    for row, line in zip(rows, result.stdout.splitlines(), strict=True):
        assert json.loads(line)["answers"][0]["answer"] == row["predicted_answer"]
        assert json.loads(line)["answers"][0]["probability"] == pytest.approx(row["probability"], abs=2e-6)
        assert "program" not in json.loads(line)
    asked = ("--baseline", run, "--question", QUESTION)
    shown, without = answered(*asked, "--image", IMAGE), iep_ask(*asked)
    assert len(shown.strip().splitlines()) == 2
    if model == "lstm":
        assert (without.exit_code, without.stderr, without.stdout) == (0, "", shown)
        for flags, what in ((("--backbone", "resnet18"), "a backbone"), (("--weights", "random"), "weights")):
            assert_one_error(iep_ask(*asked, *flags), f"{run}: reads no image; {what} does not apply")
    else:
        assert_one_error(without, f"{run}: needs an image, and there is none")


# Questions that are typed or piped


def test_a_bad_line_among_piped_ones_is_named_and_the_others_are_answered(parts):
    result = iep_ask(*parts, typed=f"{QUESTION}\n\n?\n{OTHER}")
    assert result.stdout == answered(*parts, "--question", QUESTION, "--question", OTHER)
    assert result.stderr == "Error: standard input, line 3: the question '?' has no word of the vocabulary\n"
    assert result.exit_code == 1


def test_an_image_is_not_drawn_over(parts, tmp_path):
    image = tmp_path / "image.png"
    shutil.copy(IMAGE, image)
    before = image.read_bytes()
    result = iep_ask("--ee", parts[3], "--image", image, "--program", COUNT, "--draw", image)
    assert_one_error(result, f"{image}: --image reads this file")
    assert image.read_bytes() == before


def test_at_a_terminal_questions_are_asked_for_until_an_empty_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"a?\nb?\n\n")))
    assert [text.strip() for _, text in typed_questions(True)] == ["a?", "b?"]
    assert capsys.readouterr().out == "question: " * 3


# Features of a ResNet


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine trained on features of a ResNet with random weights."""
    root = tmp_path_factory.mktemp("resnet")
    flags = ("--backbone", "resnet18", "--stage", 2, "--image-size", 64, "--weights", "random", "--seed", 5)
    data = sample_data(root / "data", *flags)
    return trained(data, "ee", root / "ee", 5)


def test_weights_of_a_file_are_asked_for_and_must_be_that_file(resnet, tmp_path):
    """The random weights of the recorded seed are made again, and equal those of the file."""
    torch.manual_seed(5)
    model = torchvision.models.resnet18(weights=None)
    randomize(model)
    torch.save(model.state_dict(), tmp_path / "a.pth")
    torch.save({}, tmp_path / "b.pth")
    asked = ("--image", IMAGE, "--program", COUNT, "--ee")
    expected, given = answered(*asked, resnet), ("--weights", tmp_path / "a.pth")
    recipe = read_checkpoint(resnet).recipe
    digest = f"file {file_digest(tmp_path / 'a.pth')}"
    of_file = changed(resnet, tmp_path / "file.pt", features=recipe | {"weights": digest})
    assert_one_error(iep_ask(*asked, of_file), "give --weights FILE")
    assert_one_error(iep_ask(*asked, of_file, "--weights", tmp_path / "b.pth"), "made with weights file")
    assert answered(*asked, of_file, *given) == expected
    pretrained = changed(resnet, tmp_path / "pretrained.pt", features=recipe | {"weights": "torchvision IMAGENET1K_V1"})
    result = iep_ask(*asked, pretrained, *given)
    assert result.exit_code == 0, result.output
    assert f"made with torchvision IMAGENET1K_V1; {tmp_path / 'a.pth'} is used in its place" in result.stderr
    assert result.stdout == expected
