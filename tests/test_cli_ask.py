"""`iep-ask` from the command line: answers, words, programs, prompt, and what is said about bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ask_cases import COUNT, IMAGE, SAMPLE, answered, answers_of, changed, iep_ask, sample_data, trained
from clevr_files import write_images
from evaluate_cases import evaluate
from tiny_data import assert_one_error, newest

from iep.asking import loading
from iep.asking.answers import describe, nearest_word
from iep.asking.loading import Asking, make_asker
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


def test_the_image_is_looked_at_once_for_all_questions(parts, monkeypatch):
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
    assert "the vocabulary lacks 'smal', taken as <UNK>; the nearest known word is 'small'" in output
    assert output.count("lacks 'zzz', taken as <UNK>\n") == 1
    asked = answered(
        *parts, "--question", "How many <UNK> qqq things?", "--question", "How many xxx yyy things?", "--json"
    )
    first, second = (json.loads(line) for line in asked.splitlines())
    assert first["unknown_words"] == ["<UNK>", "qqq"]
    assert first["answers"] == second["answers"]


def test_a_word_that_differs_in_case_alone_is_suggested_first(parts):
    output = answered(*parts, "--question", "What Color is it?")
    assert "lacks 'Color', taken as <UNK>; the nearest known word is 'color'" in output
    assert nearest_word("what", ["", "hat", "whats", "What"]) == "What"
    assert nearest_word("teh", ["The", "the"]) == "the"
    assert nearest_word("Teh", ["The", "the"]) == "The"
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


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("count filter_colour[red] scene", "program token 1 ('filter_colour[red]') is not in"),
        ("count filter_colour[red] scene", "did you mean 'filter_color[red]'?"),
        ("count <END> scene", "program token 1 ('<END>') is a special token, expected a function"),
        ("count scene <END>", "program token 2 ('<END>') is a special token, expected a function"),
        ("count", "ends after 1 token, inside its tree"),
        ("count scene scene", "program token 2 (scene) comes after the tree is complete"),
        ("", "ends after 0 tokens"),
    ],
)
def test_a_program_that_is_no_tree_of_known_tokens_is_refused(parts, program, expected):
    assert_one_error(iep_ask("--ee", parts[3], "--image", IMAGE, "--program", program), expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "give --pg CKPT, or --program TOKENS"),
        (("--program", COUNT, "--pg", "x"), "give one of them"),
        (("--program", COUNT, "--question", "a", "--question", "b"), "2 --question for 1 --program"),
        (("--program", COUNT, "--draw", "picture.gif"), "does not end in one of .png, .svg, .pdf"),
        (("--program", COUNT, "--look", "gradient"), "--look says what is drawn: give --draw FILE too"),
        (("--program", COUNT, "--beam-size", 2), "--beam-size does not go with it"),
        (("--program", COUNT, "--max-program-length", 9), "--max-program-length does not go with it"),
        (("--program", COUNT, "--backbone", "patches", "--stage", 2), "--stage does not go with --backbone patches"),
    ],
)
def test_options_that_do_not_go_together_are_refused(parts, arguments, expected):
    assert_one_error(iep_ask("--ee", parts[3], "--image", IMAGE, *arguments), expected, code=2)


def test_a_question_of_no_word_is_refused(parts):
    assert_one_error(iep_ask(*parts, "--question", "  "), "the question is empty")
    assert_one_error(iep_ask(*parts, "--question", "  ? "), "the question '?' has no word")


def test_an_image_that_is_none_is_named(parts, tmp_path):
    missing, broken = tmp_path / "missing.png", tmp_path / "broken.png"
    broken.write_bytes(IMAGE.read_bytes()[:500])
    for image, expected in ((missing, "no such file"), (broken, "not an image"), (SAMPLE, "directory")):
        result = iep_ask(*parts[:5], image, "--question", QUESTION)
        assert_one_error(result, str(image), expected, code=2 if image == SAMPLE else 1)


def test_an_image_of_any_size_and_kind_can_be_asked_about(parts, tmp_path):
    (path,) = write_images(tmp_path, "val", 1, size=(37, 91))
    assert len(answers_of(answered(*parts[:5], path, "--question", QUESTION))) == 1


def test_checkpoints_that_do_not_fit_together_are_refused(parts, runs, tmp_path):
    _, _, _, ee, *image = parts
    expected = f"{runs['pg']}: trained with another vocabulary: program token 12 is"
    assert_one_error(iep_ask("--pg", runs["pg"], "--ee", ee, *image, "--question", "a"), expected, f"in {ee}")
    assert_one_error(iep_ask("--pg", ee, "--ee", ee, *image, "--question", "a"), f"{ee}: holds an execution engine")


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
    assert f"{old}: does not say how its features were made; taken for 14x14 patches of 2x2 pixels" in result.stderr
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
        ([1], "how its features were made is a list"),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_refused(parts, tmp_path, recipe, expected):
    other = changed(parts[3], tmp_path / "other.pt", features=recipe)
    result = iep_ask("--pg", parts[1], "--ee", other, "--image", IMAGE, "--question", QUESTION)
    assert_one_error(result, str(other), expected)


def test_a_recipe_leaves_nothing_for_options_to_say(parts):
    result = iep_ask(*parts, "--question", QUESTION, "--backbone", "resnet18")
    assert_one_error(result, "says itself how its features were made (by patches); give no --backbone")


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
    assert ("does not look at the image" in result.stderr) == (model == "lstm")
    for row, line in zip(rows, result.stdout.splitlines(), strict=True):
        assert json.loads(line)["answers"][0]["answer"] == row["predicted_answer"]
        assert json.loads(line)["answers"][0]["probability"] == pytest.approx(row["probability"], abs=2e-6)
        assert "program" not in json.loads(line)
    shown = answered("--baseline", run, "--image", IMAGE, "--question", QUESTION)
    assert len(shown.strip().splitlines()) == 2


def test_a_baseline_that_does_not_look_needs_no_image_and_takes_no_option_of_looking(sample, tmp_path):
    run = trained(sample, "lstm", tmp_path / "run", 1)
    without = iep_ask("--baseline", run, "--question", QUESTION)
    assert (without.exit_code, without.stderr) == (0, "")
    assert without.stdout == answered("--baseline", run, "--question", QUESTION, "--image", IMAGE)
    for flags in (("--backbone", "resnet18"), ("--weights", "random")):
        result = iep_ask("--baseline", run, "--question", QUESTION, *flags)
        assert_one_error(result, f"{run}: does not look at an image; give no {flags[0]}")


def test_who_looks_needs_an_image(parts, sample, tmp_path):
    assert_one_error(iep_ask("--ee", parts[3], "--program", COUNT), "nothing to look at: give --image FILE", code=2)
    run = trained(sample, "cnn-lstm", tmp_path / "run", 1)
    assert_one_error(iep_ask("--baseline", run, "--question", "a"), f"{run}: looks at an image; give --image FILE")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--pg", "y"), ("--ee", "y"), ("--program", "y"), ("--draw", "y.png"), ("--look", "norm")),
        *(("--beam-size", "1"), ("--max-program-length", "9")),
    ],
)
def test_a_baseline_takes_no_other_part(flag, value):
    result = iep_ask("--baseline", "x", "--image", IMAGE, flag, value)
    assert_one_error(result, f"--baseline answers alone and runs no program: {flag} does not go with it", code=2)


def test_without_networks_nothing_answers():
    assert_one_error(iep_ask("--image", IMAGE), "give --ee CKPT, or --baseline CKPT", code=2)


def test_a_checkpoint_without_a_baseline_is_none(parts):
    assert_one_error(iep_ask("--baseline", parts[3], "--image", IMAGE), "expected a checkpoint with a baseline")


def test_at_a_terminal_the_question_is_not_told_again(parts):
    asker = make_asker(
        Asking(IMAGE, ee=parts[3], pg=parts[1], beam_size=1, max_program_length=30, device="cpu"), say=print
    )
    (answer,) = asker.ask([QUESTION])
    with_it, without = describe(answer, 3), describe(answer, 3, with_question=False)
    assert with_it == f"{QUESTION}\n{without}"
