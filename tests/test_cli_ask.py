"""`iep-ask` from the command line: answers, words, programs, questions that are typed or piped, features, and what is
said about bad input."""

import json
import os
import pty
import shlex
import shutil
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
import torch
import torchvision
from ask_cases import COUNT, IMAGE, answered, answers_of, changed, iep_ask, sample_data, trained
from clevr_files import write_images
from evaluate_cases import evaluate
from tiny_data import assert_one_error, newest

import iep
from iep.asking.answers import describe, nearest_word
from iep.cli.ask import main, typed_questions
from iep.evaluation.predict import Predictor
from iep.models.checkpoint import load_checkpoint
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
    for lines in (f"{QUESTION}\n{OTHER}", f"{QUESTION}\n\n \t\n{OTHER}\n\n  \n"):
        assert answered(*parts, typed=lines) == one_by_one
    assert answered(*parts, typed="") == ""


def test_unknown_words_are_named_once_with_the_nearest_known_one_and_taken_as_unk(parts):
    output = answered(*parts, "--question", "What Color of smal zzz zzz is it?")
    for word, near in (("smal", "small"), ("Color", "color")):
        assert f"'{word}' is not in the vocabulary and is read as <UNK>; the nearest known word is '{near}'" in output
    assert output.count("'zzz' is not in the vocabulary and is read as <UNK>\n") == 1
    unknown = ("--question", "How many <UNK> qqq things?", "--question", "How many xxx yyy things?")
    first, second = (json.loads(line) for line in answered(*parts, *unknown, "--json").splitlines())
    assert first["unknown_words"] == ["<UNK>", "qqq"]
    assert first["answers"] == second["answers"]


def test_the_nearest_word_is_one_in_another_case_or_near_in_the_same_case():
    assert nearest_word("what", ["", "hat", "whats", "What"]) == "What"
    assert nearest_word("spehre", ["Sphere", "sphere"]) == "sphere"
    assert nearest_word("xylophone", ["The", "the"]) is None


def test_the_rest_of_a_predicted_program_whose_tree_is_complete_is_named(parts, monkeypatch):
    tokens = load_checkpoint(parts[3])["vocab"]["program_token_to_idx"]
    monkeypatch.setattr(Predictor, "programs", lambda self, batch: torch.tensor([[tokens["scene"], tokens["count"]]]))
    lines = answered(*parts, "--question", QUESTION).splitlines()
    assert lines[2:] == ["  scene", "  ignored, after the tree was complete: count", ""]


REFUSED = [
    # Options that do not go together.
    ("--image {image} --pg {pg}", 2, "give --ee CKPT, or --baseline CKPT"),
    ("--ee {ee} --image {image}", 1, "holds no program generator; give that of another run as pg (--pg CKPT)"),
    ("--ee {ee} --program {count}", 2, "there is no image: give --image FILE"),
    ("--ee '' --image {image}", 2, "'--ee': the name is empty, expected a path"),
    (
        "--ee symbolic --image {image}",
        2,
        "iep-eval --ee symbolic --images DIR; expected a checkpoint, a run or default",
    ),
    ("--ee defualt --image {image}", 1, "defualt: no such file; did you mean 'default'?"),
    ("--image {image} --backbone resnet18", 1, "Error: default: records how its features were made (by synth)"),
    ("{run} --program {count} --pg x", 2, "give one of them"),
    ("{run} --program {count} --question a --question b", 2, "2 --question for 1 --program"),
    ("{run} --program {count} --saliency gradient", 2, "--saliency is for pictures: give --draw FILE too"),
    ("{run} --program {count} --beam-size 2", 2, "--beam-size does not apply"),
    ("{run} --program {count} --max-program-length 9", 2, "--max-program-length does not apply"),
    ("{run} --program {count} --stage 2", 1, "its features were made (by patches); another backbone does not apply"),
    *(
        (f"--baseline x --image {{image}} {option}", 2, f"runs no program: {option.split()[0]} does not apply")
        for option in ("--pg y", "--ee y", "--program y", "--draw y.png", "--saliency norm", "--beam-size 1")
    ),
    ("--baseline x --max-program-length 9", 2, "runs no program: --max-program-length does not apply"),
    # Programs, questions and files.
    ("{run} --program 'count filter_colour[red] scene'", 1, "did you mean 'filter_color[red]'?"),
    ("{run} --program 'count <END> scene'", 1, "program token 1 ('<END>') is a special token, expected a function"),
    ("{run} --program count", 1, "ends after 1 token, inside its tree"),
    ("{run} --program 'count scene scene'", 1, "program token 2 (scene) comes after the tree is complete"),
    ("{run} --program {count} --program count", 1, "program 2: the program ends after 1 token"),
    ("{run} --pg {pg} --question '  '", 1, "the question is empty"),
    ("{run} --pg {pg} --question a --question ' ? '", 1, "question 2: the question '?' has no word"),
    ("--ee {ee} --image missing.png --program {count}", 1, "missing.png: no such file"),
    ("--ee {ee} --image {broken} --program {count}", 1, "broken.png: not an image"),
    ("--ee {ee} --image {pipe} --program {count}", 1, "pipe: is not a regular file, expected an image"),
    ("--ee {ee} --image {folder} --program {count}", 2, "is a directory"),
    ("{run} --pg {ee} --question a", 1, "{ee}: holds an execution engine"),
    ("{run} --pg {other} --question a", 1, "{other}: trained with another vocabulary: program token 12 is"),
    ("--baseline {ee} --image {image}", 1, "{ee}: holds an execution engine; give it as --ee"),
    # Pictures.
    ("{run} --program {count} --draw picture.gif", 2, "does not end in one of .png, .svg, .pdf"),
    ("{run} --program {count} --draw {broken}/a.png", 1, "its directory is a file"),
    ("{run} --program {count} --draw {folder}.png", 2, "is a directory"),
]


@pytest.mark.parametrize(("arguments", "code", "words"), REFUSED)
def test_refused_input_is_one_line(parts, runs, tmp_path, arguments: str, code: int, words: str):
    (tmp_path / "broken.png").write_bytes(IMAGE.read_bytes()[:500])
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder.png").mkdir()
    names = {"pg": parts[1], "ee": parts[3], "run": f"--ee {parts[3]} --image {IMAGE}", "image": IMAGE}
    names |= {"count": f"'{COUNT}'", "other": runs["pg"]}
    names |= {"broken": tmp_path / "broken.png", "folder": tmp_path / "folder", "pipe": tmp_path / "pipe"}
    assert_one_error(iep_ask(*shlex.split(arguments.format(**names))), words.format(**names), code=code)


def test_a_picture_in_a_missing_directory_is_written_there(parts, tmp_path):
    path = tmp_path / "missing" / "deeper" / "a.png"
    for given in ([COUNT], [COUNT, COUNT]):
        programs = [argument for text in given for argument in ("--program", text)]
        answered("--ee", parts[3], "--image", IMAGE, *programs, "--draw", path)
    assert sorted(each.name for each in path.parent.iterdir()) == ["a-1.png", "a-2.png", "a.png"]


@pytest.mark.parametrize("option", ["--top", "--json"])
def test_a_terminal_without_utf8_gets_plain_text(parts, option):
    arguments = ("--ee", parts[3], "--image", IMAGE, "--program", COUNT, "--question", "Wie groß?", "--device", "cpu")
    command = [sys.executable, "-m", "iep.cli.ask", *arguments, option, *(["1"] if option == "--top" else [])]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    output = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True, env=environment).stdout
    if option == "--json":
        assert json.loads(output)["question"] == "Wie groß?"
    else:
        assert output.splitlines()[0] == "Wie gro??"
        assert output.splitlines()[-4:-1] == ["  count", "  `- filter_size[small]", "     `- scene"]


def test_question_words_are_the_generators_and_answers_the_engines(parts, tmp_path):
    vocab = load_checkpoint(parts[3])["vocab"]
    fewer = {**vocab, "question_token_to_idx": dict(list(vocab["question_token_to_idx"].items())[:10])}
    other = changed(parts[3], tmp_path / "ee.pt", vocab=fewer)
    question = ("--image", IMAGE, "--question", QUESTION)
    assert answered(*parts[:2], "--ee", other, *question) == answered(*parts[:4], *question)


def test_a_checkpoint_without_a_recipe_is_taken_for_patches_where_its_shape_says_so(parts, tmp_path):
    old = changed(parts[3], tmp_path / "old.pt", features=None)
    asked = ("--pg", parts[1], "--ee", old, "--image", IMAGE, "--question", QUESTION)
    result = iep_ask(*asked)
    assert result.exit_code == 0, result.output
    assumed = "does not record how its features were made; they are assumed to be 14x14 patches of 2x2 pixels"
    assert f"{old}: {assumed}" in result.stderr
    assert "--patch-size does not go with --backbone resnet101" in iep_ask(*asked, "--patch-size", 2).output
    told = iep_ask(*asked, "--backbone", "patches", "--patch-size", 2)
    assert (told.stderr, told.stdout) == ("", result.stdout)
    wrong = iep_ask(*asked, "--backbone", "patches", "--patch-size", 4)
    assert_one_error(wrong, "(48, 14, 14) an image, but the engine is made for (12, 14, 14)", str(IMAGE))
    recorded = iep_ask(*parts, "--question", QUESTION, "--backbone", "resnet18")
    assert_one_error(recorded, "records how its features were made (by patches); another backbone does not apply")


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ({"backbone": "vgg16"}, "by the backbone 'vgg16', which this version does not know"),
        ({"backbone": "patches", "patch_size": 2, "dtype": "int8"}, "dtype int8, expected float32 or float16"),
        ([1], "features is of type list, expected dict"),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_refused(parts, tmp_path, recipe, expected):
    other = changed(parts[3], tmp_path / "other.pt", features=recipe)
    result = iep_ask("--pg", parts[1], "--ee", other, "--image", IMAGE, "--question", QUESTION)
    assert_one_error(result, str(other), expected)


def test_patches_do_without_torchvision(parts):
    program = "import sys; from iep.cli.ask import main; main(sys.argv[1:], standalone_mode=False); "
    program += "print('torchvision' in sys.modules)"
    arguments = [str(argument) for argument in (*parts, "--question", QUESTION, "--device", "cpu")]
    output = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert output.stdout.splitlines()[-1] == "False"
    assert QUESTION in output.stdout


@pytest.mark.parametrize("model", ["lstm", "cnn-lstm", "cnn-lstm-sa"])
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


@pytest.fixture
def command(parts) -> list[str]:
    """`iep-ask` as a process."""
    arguments = (*parts, "--device", "cpu")
    return [sys.executable, "-m", "iep.cli.ask", *map(str, arguments)]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b"?", "the question '?' has no word"),
        (b"blah, blah", "the question 'blah, blah' has no word of the vocabulary"),
        (b"\xff\xfe How", "the question is not UTF-8 text"),
    ],
)
def test_a_bad_line_among_piped_ones_is_named_and_the_others_are_answered(parts, bad, said):
    typed = b"\n".join([QUESTION.encode(), b"", bad, OTHER.encode()])
    result = iep_ask(*parts, typed=typed)
    good = answered(*parts, "--question", QUESTION, "--question", OTHER)
    assert result.stdout == good
    assert result.stderr == f"Error: standard input, line 3: {said}\n"
    assert result.exit_code == 1


def test_at_a_terminal_a_bad_line_is_told_and_the_next_is_asked_for(command):
    ours, its = pty.openpty()
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=subprocess.PIPE)
    os.write(ours, b"?\n\xff?\n" + OTHER.encode() + b"\n\n")
    _, errors = process.communicate(timeout=120)
    output = os.read(ours, 100_000).decode(errors="replace")
    os.close(ours)
    os.close(its)
    assert process.returncode == 0
    assert errors.decode().splitlines() == [
        "Error: the question '?' has no word",
        "Error: the question is not UTF-8 text",
    ]
    assert "%  (then " in output


def test_without_a_standard_input_there_is_no_question(parts, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    main(list(map(str, parts)), standalone_mode=False)
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_goes_away_ends_it_without_a_word(command):
    ours, its = os.pipe()
    os.close(ours)
    process = subprocess.run([*command, "--question", QUESTION], stdout=its, stderr=subprocess.PIPE, timeout=120)
    os.close(its)
    assert (process.returncode, process.stderr) == (1, b"")


def test_an_image_is_not_drawn_over(parts, tmp_path):
    image, link = tmp_path / "image-2.png", tmp_path / "link.png"
    shutil.copy(IMAGE, image)
    link.symlink_to(image)
    before, asked = image.read_bytes(), ("--ee", parts[3], "--image", image, "--program", COUNT, "--draw")
    for target in (image, link):
        assert_one_error(iep_ask(*asked, target), f"{target}: --image reads this file")
    several = iep_ask(*asked, tmp_path / "image.png", "--program", COUNT)
    assert_one_error(several, f"{image}: --image reads this file")
    questions = ("--pg", parts[1], *asked[:4], "--draw", tmp_path / "image.png")
    lines = iep_ask(*questions, typed=f"{QUESTION}\n{OTHER}\n{OTHER}\n")
    assert_one_error(lines, f"standard input, line 2: {image}: --image reads this file")
    assert len(answers_of(lines.stdout)) == 3
    assert {path.name for path in tmp_path.iterdir()} == {image.name, link.name, "image-1.png", "image-3.png"}
    assert image.read_bytes() == before


def stdin(text: str) -> TextIOWrapper:
    return TextIOWrapper(BytesIO(text.encode()))


@pytest.mark.parametrize(("typed", "expected"), [(["a?", "b?"], 2), (["a?", " ", "b?"], 1)])
def test_at_a_terminal_questions_are_prompted_for_until_its_end_or_an_empty_line(monkeypatch, typed, expected):
    def line(prompt: str) -> str:
        prompts.append(prompt)
        if not lines:
            raise EOFError
        return lines.pop(0)

    lines, prompts = [*typed], []
    monkeypatch.setattr("builtins.input", line)
    monkeypatch.setattr("sys.stdin", stdin(""))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert [question for _, question in typed_questions(True)] == typed[:expected]
    assert prompts == ["question: "] * (expected + 1)


def test_at_a_terminal_whose_output_goes_to_a_file_the_prompt_stays_out_of_it(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", stdin("a?\nb?\n\n"))
    assert [text.strip() for _, text in typed_questions(True)] == ["a?", "b?"]
    assert capsys.readouterr() == ("", "question: " * 3)


# Features of a ResNet


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An engine trained on features of a ResNet with random weights, and its data."""
    root = tmp_path_factory.mktemp("resnet")
    flags = ("--backbone", "resnet18", "--stage", 2, "--image-size", 64, "--weights", "random", "--seed", 5)
    data = sample_data(root / "data", *flags)
    return trained(data, "ee", root / "ee", 5), data


def test_a_resnet_with_random_weights_is_made_again_of_its_seed(resnet, tmp_path):
    ee, data = resnet
    _, rows, _ = evaluate(tmp_path, "--ee", ee, "--data", data, "--workers", 0)
    row = next(row for row in rows if row["image_index"] == 2)
    output = answered("--ee", ee, "--image", IMAGE, "--program", " ".join(row["program"]), "--json")
    found = json.loads(output)["answers"][0]
    assert found["answer"] == row["predicted_answer"]
    assert found["probability"] == pytest.approx(row["probability"], rel=1e-3)


def test_weights_of_a_file_are_asked_for_and_must_be_that_file(resnet, tmp_path):
    ee, _ = resnet
    torch.manual_seed(5)
    model = torchvision.models.resnet18(weights=None)
    randomize(model)
    torch.save(model.state_dict(), tmp_path / "a.pth")
    torch.save({}, tmp_path / "b.pth")
    asked = ("--image", IMAGE, "--program", COUNT, "--ee")
    expected, given = answered(*asked, ee), ("--weights", tmp_path / "a.pth")
    recipe = load_checkpoint(ee)["features"]
    digest = f"file {file_digest(tmp_path / 'a.pth')}"
    of_file = changed(ee, tmp_path / "file.pt", features=recipe | {"weights": digest})
    assert_one_error(iep_ask(*asked, of_file), "give --weights FILE")
    assert_one_error(iep_ask(*asked, of_file, "--weights", tmp_path / "b.pth"), "made with weights file")
    assert answered(*asked, of_file, *given) == expected
    pretrained = changed(ee, tmp_path / "ee.pt", features=recipe | {"weights": "torchvision IMAGENET1K_V1"})
    result = iep_ask(*asked, pretrained, *given)
    assert result.exit_code == 0, result.output
    assert f"made with torchvision IMAGENET1K_V1; {tmp_path / 'a.pth'} is used in its place" in result.stderr
    assert result.stdout == expected


def test_an_engine_of_unknown_features_is_taken_for_the_original_toolkits(resnet, tmp_path, monkeypatch):
    def offline(*arguments: object, **options: object) -> None:
        raise OSError("no network here")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(torch.hub, "urlopen", offline)
    old = changed(resnet[0], tmp_path / "old.pt", features=None)
    result = iep_ask("--ee", old, "--image", IMAGE, "--program", COUNT)
    assert "assumed to be resnet101 to stage 3, 224x224 pixels, default weights" in result.stderr
    assert_one_error(result, "the weights of resnet101 cannot be downloaded (no network here)")


def test_at_a_terminal_the_question_is_not_repeated(parts):
    answer = iep.load(parts[3], parts[1], "cpu").ask(IMAGE, QUESTION)
    assert str(answer) == describe(answer, 3)
    assert describe(answer, 3) == f"{QUESTION}\n{describe(answer, 3, with_question=False)}"
