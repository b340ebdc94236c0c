"""`iep-ask` from the command line: answers, words, programs, prompt, and what is said about bad input."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ask_cases import COUNT, IMAGE, answered, answers_of, changed, iep_ask, sample_data, trained
from clevr_files import write_images
from evaluate_cases import evaluate
from tiny_data import assert_one_error, newest

from iep.asking import loading
from iep.asking.answers import describe, nearest_word
from iep.asking.loading import make_asker
from iep.evaluation.predict import Predictor
from iep.models.checkpoint import load_checkpoint

QUESTION = "How many small things are there?"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_data(
        tmp_path_factory.mktemp("sample"), "--backbone", "patches", "--patch-size", 2, "--dtype", "float16"
    )


@pytest.fixture(scope="module")
def parts(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """A generator, good enough to be run, an engine, and the image that is asked about."""
    root = tmp_path_factory.mktemp("runs")
    pg, ee = trained(sample, "pg", root / "pg", 150), trained(sample, "ee", root / "ee", 20)
    return "--pg", pg, "--ee", ee, "--image", IMAGE


def test_answers_and_programs_are_those_of_iep_eval(parts, sample, tmp_path):
    _, pg, _, ee, _, _ = parts
    _, rows, _ = evaluate(tmp_path / "eval", "--pg", pg, "--ee", ee, "--data", sample, "--workers", 0)
    rows = [row for row in rows if row["image_index"] == 2]
    questions = [argument for row in rows for argument in ("--question", row["question"])]
    asked = [json.loads(line) for line in answered(*parts, *questions, "--json").splitlines()]
    assert len(asked) == len(rows) == 20
    assert len({tuple(row["predicted_program"]) for row in rows}) > 3
    for row, found in zip(rows, asked, strict=True):
        assert found["question"] == row["question"]
        assert found["answers"][0]["answer"] == row["predicted_answer"]
        assert found["answers"][0]["probability"] == pytest.approx(row["probability"], abs=2e-6)
        assert found["program"] == row["predicted_program"]
        assert found["run"][0] == row["predicted_program"][0]
        assert found["unknown_words"] == []


def test_beam_search_finds_the_programs_of_iep_evals(parts, sample, tmp_path):
    _, pg, _, ee, _, _ = parts
    _, rows, _ = evaluate(tmp_path, "--pg", pg, "--ee", ee, "--data", sample, "--workers", 0, "--beam-size", 3)
    row = next(row for row in rows if row["image_index"] == 2)
    (found,) = answered(*parts, "--question", row["question"], "--json", "--beam-size", 3).splitlines()
    assert json.loads(found)["answers"][0]["probability"] == pytest.approx(row["probability"], abs=2e-6)


def test_an_answer_is_shown_with_runners_up_and_its_program_as_a_tree(parts):
    lines = answered("--ee", parts[3], "--image", IMAGE, "--program", COUNT, "--question", QUESTION).splitlines()
    assert lines[0] == QUESTION
    shares = [float(word.strip("%,)")) for word in lines[1].split() if "%" in word]
    assert len(shares) == 3
    assert shares == sorted(shares, reverse=True)
    assert lines[2:5] == ["  count", "  └─ filter_size[small]", "     └─ scene"]


def test_top_says_how_many_answers_are_shown(parts):
    (line,) = answered(*parts, "--question", QUESTION, "--top", 5, "--json").splitlines()
    assert len(json.loads(line)["answers"]) == 5
    shown = answered("--ee", parts[3], "--image", IMAGE, "--program", COUNT, "--top", 1)
    assert "then" not in shown


def test_questions_asked_together_are_answered_as_one_by_one(parts):
    questions = [QUESTION, "What color is the large sphere?", "Are there any blue cubes?"]
    together = answered(*parts, *(argument for text in questions for argument in ("--question", text)))
    alone = "".join(answered(*parts, "--question", text) for text in questions)
    assert together == alone
    assert len(answers_of(together)) == 3


def test_the_images_features_are_computed_once_for_all_questions(parts, monkeypatch):
    seen = []

    def counted(*arguments: object, look=loading.image_features) -> torch.Tensor:
        seen.append(arguments)
        return look(*arguments)

    monkeypatch.setattr(loading, "image_features", counted)
    answered(*parts, typed=f"{QUESTION}\n{QUESTION}\nAre there any blue cubes?\n")
    assert len(seen) == 1


@pytest.mark.parametrize("end", ["", "\n", "\n\n  \n"])
@pytest.mark.parametrize("between", ["\n", "\n\n \t\n"])
def test_without_a_question_they_are_read_line_by_line_until_the_end_but_for_blank_lines(parts, between, end):
    questions = ("--question", QUESTION, "--question", "Are there any blue cubes?")
    assert answered(*parts, typed=f"{QUESTION}{between}Are there any blue cubes?{end}") == answered(*parts, *questions)


def test_no_question_at_all_is_no_error(parts):
    assert answered(*parts, typed="") == ""


def test_unknown_words_are_named_once_with_the_nearest_known_one_and_taken_as_unk(parts, tmp_path):
    output = answered(*parts, "--question", "how many smal zzz zzz are there?")
    assert "'smal' is not in the vocabulary and is read as <UNK>; the nearest known word is 'small'" in output
    assert output.count("'zzz' is not in the vocabulary and is read as <UNK>\n") == 1
    asked = answered(
        *parts, "--question", "How many <UNK> qqq things?", "--question", "How many xxx yyy things?", "--json"
    )
    first, second = (json.loads(line) for line in asked.splitlines())
    assert first["unknown_words"] == ["<UNK>", "qqq"]
    assert first["answers"] == second["answers"]


def test_a_word_that_differs_in_case_alone_is_suggested_first(parts):
    output = answered(*parts, "--question", "What Color is it?")
    assert "'Color' is not in the vocabulary and is read as <UNK>; the nearest known word is 'color'" in output
    assert nearest_word("what", ["", "hat", "whats", "What"]) == "What"
    assert nearest_word("spehre", ["Sphere", "sphere"]) == "sphere"
    assert nearest_word("Spehre", ["Sphere", "sphere"]) == "Sphere"
    assert nearest_word("xylophone", ["The", "the"]) is None


def test_spaces_around_and_between_words_do_not_matter(parts):
    spaced, plain = (answered(*parts, "--question", text, "--json") for text in (f"  {QUESTION} ", QUESTION))
    assert spaced == plain


@pytest.mark.parametrize(
    ("program", "tree", "said"),
    [
        ("count filter_size[small]", ["count", "└─ filter_size[small]", "   └─ scene (filled in)"], ""),
        ("scene count", ["scene"], "ignored, after the tree was complete: count"),
    ],
)
def test_an_ill_formed_prediction_is_completed_and_its_rest_is_named(parts, monkeypatch, program, tree, said):
    tokens = load_checkpoint(parts[3])["vocab"]["program_token_to_idx"]
    predicted_BL = torch.tensor([[tokens[token] for token in program.split()]])
    monkeypatch.setattr(Predictor, "programs", lambda self, batch: predicted_BL)
    lines = [line[2:] for line in answered(*parts, "--question", QUESTION).splitlines()[2:]]
    assert lines == [*tree, *([said] if said else []), ""]


def test_programs_run_instead_of_predicted_ones_and_need_no_generator(parts):
    both = answered("--ee", parts[3], "--image", IMAGE, "--program", COUNT, "--program", "exist scene", "--json")
    first, second = (json.loads(line) for line in both.splitlines())
    assert first["program"] == COUNT.split()
    assert second["program"] == ["exist", "scene"]
    assert first["answers"] != second["answers"]
    assert "question" not in first


REFUSED = [
    # Options that do not go together.
    ("--image {image}", 2, "give --ee CKPT, or --baseline CKPT"),
    ("--ee {ee} --image {image}", 2, "give --pg CKPT, or --program TOKENS"),
    ("--ee {ee} --program {count}", 2, "there is no image: give --image FILE"),
    ("{run} --program {count} --pg x", 2, "give one of them"),
    ("{run} --program {count} --question a --question b", 2, "2 --question for 1 --program"),
    ("{run} --program {count} --saliency gradient", 2, "--saliency is for pictures: give --draw FILE too"),
    ("{run} --program {count} --look gradient", 2, "give --draw FILE too"),
    ("{run} --program {count} --beam-size 2", 2, "--beam-size does not apply"),
    ("{run} --program {count} --max-program-length 9", 2, "--max-program-length does not apply"),
    ("{run} --program {count} --backbone patches --stage 2", 2, "--stage does not go with --backbone patches"),
    *(
        (f"--baseline x --image {{image}} {option}", 2, f"runs no program: {option.split()[0]} does not apply")
        for option in ("--pg y", "--ee y", "--program y", "--draw y.png", "--saliency norm", "--beam-size 1")
    ),
    ("--baseline x --max-program-length 9", 2, "runs no program: --max-program-length does not apply"),
    # Programs, questions and files.
    ("{run} --program 'count filter_colour[red] scene'", 1, "program token 1 ('filter_colour[red]') is not in"),
    ("{run} --program 'count filter_colour[red] scene'", 1, "did you mean 'filter_color[red]'?"),
    ("{run} --program 'count <END> scene'", 1, "program token 1 ('<END>') is a special token, expected a function"),
    ("{run} --program 'count scene <END>'", 1, "program token 2 ('<END>') is a special token, expected a function"),
    ("{run} --program count", 1, "ends after 1 token, inside its tree"),
    ("{run} --program 'count scene scene'", 1, "program token 2 (scene) comes after the tree is complete"),
    ("{run} --program ''", 1, "ends after 0 tokens"),
    ("{run} --program {count} --program count", 1, "program 2: the program ends after 1 token"),
    ("{run} --pg {pg} --question '  '", 1, "the question is empty"),
    ("{run} --pg {pg} --question '  ? '", 1, "the question '?' has no word"),
    ("{run} --pg {pg} --question a --question ' ? '", 1, "question 2: the question '?' has no word"),
    ("--ee {ee} --image missing.png --program {count}", 1, "missing.png: no such file"),
    ("--ee {ee} --image {broken} --program {count}", 1, "broken.png: not an image"),
    ("--ee {ee} --image {pipe} --program {count}", 1, "pipe: is not a regular file, expected an image"),
    ("--ee {ee} --image {folder} --program {count}", 2, "is a directory"),
    ("{run} --pg {ee} --question a", 1, "{ee}: holds an execution engine"),
    ("--baseline {ee} --image {image}", 1, "expected a checkpoint with a baseline"),
    # Pictures.
    ("{run} --program {count} --draw picture.gif", 2, "does not end in one of .png, .svg, .pdf"),
    ("{run} --program {count} --draw {broken}/a.png", 1, "its directory is a file"),
    ("{run} --program {count} --draw {folder}.png", 2, "is a directory"),
]


@pytest.mark.parametrize(("arguments", "code", "words"), REFUSED)
def test_refused_input_is_one_line(parts, tmp_path, arguments: str, code: int, words: str):
    (tmp_path / "broken.png").write_bytes(IMAGE.read_bytes()[:500])
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder.png").mkdir()
    names = {"pg": parts[1], "ee": parts[3], "run": f"--ee {parts[3]} --image {IMAGE}", "image": IMAGE}
    names |= {
        "count": f"'{COUNT}'",
        "broken": tmp_path / "broken.png",
        "folder": tmp_path / "folder",
        "pipe": tmp_path / "pipe",
    }
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


def test_an_image_of_any_size_and_kind_can_be_asked_about(parts, tmp_path):
    (path,) = write_images(tmp_path, "val", 1, size=(37, 91))
    assert len(answers_of(answered(*parts[:5], path, "--question", QUESTION))) == 1


def test_checkpoints_that_do_not_fit_together_are_refused(parts, runs, tmp_path):
    _, _, _, ee, *image = parts
    expected = f"{runs['pg']}: trained with another vocabulary: program token 12 is"
    assert_one_error(iep_ask("--pg", runs["pg"], "--ee", ee, *image, "--question", "a"), expected, f"in {ee}")


def test_question_words_are_the_generators_and_answers_the_engines(parts, tmp_path):
    _, pg, _, ee, *image = parts
    vocab = load_checkpoint(ee)["vocab"]
    fewer = {**vocab, "question_token_to_idx": dict(list(vocab["question_token_to_idx"].items())[:10])}
    other = changed(ee, tmp_path / "ee.pt", vocab=fewer)
    plain = answered(*parts, "--question", QUESTION)
    assert answered("--pg", pg, "--ee", other, *image, "--question", QUESTION) == plain


def test_a_checkpoint_without_a_recipe_is_taken_for_patches_where_its_shape_says_so(parts, tmp_path):
    old = changed(parts[3], tmp_path / "old.pt", features=None)
    result = iep_ask("--pg", parts[1], "--ee", old, "--image", IMAGE, "--question", QUESTION)
    assert result.exit_code == 0, result.output
    assert (
        f"{old}: does not record how its features were made; they are assumed to be 14x14 patches of 2x2 pixels"
        in result.stderr
    )
    given = iep_ask(*("--pg", parts[1], "--ee", old, "--image", IMAGE, "--question", QUESTION, "--patch-size", 2))
    assert given.exit_code == 2
    flags = ("--backbone", "patches", "--patch-size", 2)
    told = iep_ask("--pg", parts[1], "--ee", old, "--image", IMAGE, "--question", QUESTION, *flags)
    assert told.stderr == ""
    assert told.stdout == result.stdout


def test_features_of_another_shape_than_the_engines_are_refused(parts, tmp_path):
    old = changed(parts[3], tmp_path / "old.pt", features=None)
    flags = ("--backbone", "patches", "--patch-size", 4)
    result = iep_ask("--pg", parts[1], "--ee", old, "--image", IMAGE, "--question", QUESTION, *flags)
    assert_one_error(result, "(48, 14, 14) an image, but the engine is made for (12, 14, 14)", str(IMAGE))


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ({"backbone": "vgg16"}, "by the backbone 'vgg16', which this version does not know"),
        ({"backbone": "patches", "patch_size": "large"}, "patch_size large, expected a whole number"),
        ({"backbone": "patches", "patch_size": 2, "dtype": "int8"}, "dtype int8, expected float32 or float16"),
        ([1], "features is of type list, expected dict"),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_refused(parts, tmp_path, recipe, expected):
    other = changed(parts[3], tmp_path / "other.pt", features=recipe)
    result = iep_ask("--pg", parts[1], "--ee", other, "--image", IMAGE, "--question", QUESTION)
    assert_one_error(result, str(other), expected)


def test_a_recipe_leaves_nothing_for_options_to_say(parts):
    result = iep_ask(*parts, "--question", QUESTION, "--backbone", "resnet18")
    assert_one_error(result, "records how its features were made (by patches); --backbone does not apply")


def test_patches_do_without_torchvision(parts):
    program = "import sys; from iep.cli.ask import main; main(sys.argv[1:], standalone_mode=False); "
    program += "print('torchvision' in sys.modules)"
    arguments = [str(argument) for argument in (*parts, "--question", QUESTION, "--device", "cpu")]
    output = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert output.stdout.splitlines()[-1] == "False"
    assert QUESTION in output.stdout


def test_a_run_and_its_checkpoint_answer_alike(parts):
    assert answered("--ee", newest(parts[3]), "--image", IMAGE, "--program", COUNT) == answered(
        "--ee", parts[3], "--image", IMAGE, "--program", COUNT
    )


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
    shown = answered("--baseline", run, "--image", IMAGE, "--question", QUESTION)
    assert len(shown.strip().splitlines()) == 2


def test_a_baseline_that_reads_no_image_needs_none_and_takes_no_option_for_features(sample, tmp_path):
    run = trained(sample, "lstm", tmp_path / "run", 1)
    without = iep_ask("--baseline", run, "--question", QUESTION)
    assert (without.exit_code, without.stderr) == (0, "")
    assert without.stdout == answered("--baseline", run, "--question", QUESTION, "--image", IMAGE)
    for flags in (("--backbone", "resnet18"), ("--weights", "random")):
        result = iep_ask("--baseline", run, "--question", QUESTION, *flags)
        assert_one_error(result, f"{run}: reads no image; {flags[0]} does not apply")


def test_a_baseline_that_reads_images_needs_one(sample, tmp_path):
    run = trained(sample, "cnn-lstm", tmp_path / "run", 1)
    assert_one_error(iep_ask("--baseline", run, "--question", "a"), f"{run}: needs an image; give --image FILE")


def test_at_a_terminal_the_question_is_not_repeated(parts):
    asker = make_asker(
        image=IMAGE, ee=parts[3], pg=parts[1], beam_size=1, max_program_length=30, device="cpu", say=print
    )
    (answer,) = asker.ask([QUESTION])
    with_it, without = describe(answer, 3), describe(answer, 3, with_question=False)
    assert with_it == f"{QUESTION}\n{without}"
