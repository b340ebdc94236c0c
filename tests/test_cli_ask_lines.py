"""`iep-ask` and questions that are typed or piped: bad ones among them, the prompt, a reader that goes away; and
pictures that would be written over what is read."""

import os
import pty
import shutil
import subprocess
import sys
from io import BytesIO, TextIOWrapper

import pytest
from ask_cases import COUNT, IMAGE, answered, answers_of, iep_ask, sample_data, trained
from tiny_data import assert_one_error

from iep.cli.ask import typed_questions

QUESTION = "How many small things are there?"
OTHER = "Are there any blue cubes?"


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """A generator and an engine."""
    root = tmp_path_factory.mktemp("runs")
    data = sample_data(root / "data", "--backbone", "patches", "--patch-size", 2)
    return "--pg", trained(data, "pg", root / "pg", 20), "--ee", trained(data, "ee", root / "ee", 5)


@pytest.fixture
def command(nets) -> list[str]:
    """`iep-ask` as a process."""
    arguments = (*nets, "--image", IMAGE, "--device", "cpu")
    return [sys.executable, "-m", "iep.cli.ask", *map(str, arguments)]


@pytest.mark.parametrize(
    ("bad", "said"), [(b"?", "the question '?' has no word"), (b"\xff\xfe How", "the question is not UTF-8 text")]
)
def test_a_bad_line_among_piped_ones_is_named_and_the_others_are_answered(nets, bad, said):
    typed = b"\n".join([QUESTION.encode(), b"", bad, OTHER.encode()])
    result = iep_ask(*nets, "--image", IMAGE, typed=typed)
    good = answered(*nets, "--image", IMAGE, "--question", QUESTION, "--question", OTHER)
    assert result.stdout == good
    assert result.stderr == f"Error: standard input, line 3: {said}\n"
    assert result.exit_code == 1


def test_a_picture_that_cannot_be_drawn_is_named_by_its_line(nets, tmp_path):
    (tmp_path / "a-1.png").symlink_to(shutil.copy(IMAGE, tmp_path / "image.png"))
    asked = (*nets, "--image", tmp_path / "image.png", "--draw", tmp_path / "a.png")
    result = iep_ask(*asked, typed=f"{QUESTION}\n{OTHER}\n")
    assert result.exit_code == 1
    assert "Error: standard input, line 1:" in result.stderr
    assert "--image reads this file" in result.stderr
    assert len(answers_of(result.stdout)) == 2
    assert (tmp_path / "image.png").read_bytes() == IMAGE.read_bytes()
    assert (tmp_path / "a-2.png").exists()


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


def test_a_reader_that_goes_away_ends_it_without_a_word(command):
    for arguments in (("--question", QUESTION), ("--question", QUESTION, "--json")):
        ours, its = os.pipe()
        os.close(ours)
        process = subprocess.run([*command, *arguments], stdout=its, stderr=subprocess.PIPE, timeout=120)
        os.close(its)
        assert process.stderr == b""
        assert process.returncode == 1


def test_an_image_or_a_network_is_not_drawn_over(nets, tmp_path):
    image, ee = tmp_path / "image.png", tmp_path / "ee.png"
    shutil.copy(IMAGE, image)
    shutil.copy(nets[3] / "best.pt", ee)
    (tmp_path / "link.png").symlink_to(image)
    asked = ("--ee", ee, "--image", image, "--program", COUNT, "--draw")
    for target, option in ((image, "--image"), (tmp_path / "link.png", "--image"), (ee, "--ee")):
        before = target.read_bytes()
        assert_one_error(iep_ask(*asked, target), f"{target}: {option} reads this file")
        assert target.read_bytes() == before
    assert "Wrote" in answered(*asked, tmp_path / "other.png")


def test_none_of_several_pictures_is_drawn_over_the_image(nets, tmp_path):
    image = tmp_path / "a-2.png"
    shutil.copy(IMAGE, image)
    asked = ("--ee", nets[3], "--image", image, "--draw", tmp_path / "a.png")
    assert_one_error(iep_ask(*asked, "--program", COUNT, "--program", COUNT), f"{image}: --image reads this file")
    assert [path.name for path in tmp_path.iterdir()] == ["a-2.png"]


def stdin(text: str) -> TextIOWrapper:
    return TextIOWrapper(BytesIO(text.encode()))


@pytest.mark.parametrize(("typed", "expected"), [(["a?", "b?"], ["a?", "b?"]), (["a?", " ", "b?"], ["a?"]), ([], [])])
def test_at_a_terminal_questions_are_prompted_for_until_its_end_or_an_empty_line(monkeypatch, capsys, typed, expected):
    lines = iter(typed)
    prompts = []

    def line(prompt: str) -> str:
        prompts.append(prompt)
        for text in lines:
            return text
        raise EOFError

    monkeypatch.setattr("builtins.input", line)
    monkeypatch.setattr("sys.stdin", stdin(""))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert [question for _, question in typed_questions(True)] == expected
    assert prompts == ["question: "] * (len(expected) + 1)


def test_at_a_terminal_whose_output_goes_to_a_file_the_prompt_stays_out_of_it(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", stdin("a?\nb?\n\n"))
    assert [text.strip() for _, text in typed_questions(True)] == ["a?", "b?"]
    assert capsys.readouterr() == ("", "question: " * 3)


def test_lines_are_counted_with_the_blank_ones(monkeypatch):
    monkeypatch.setattr("sys.stdin", stdin("a?\n\n \nb?"))
    assert [(number, text.strip()) for number, text in typed_questions(False)] == [(1, "a?"), (4, "b?")]


def test_help_says_when_options_of_looking_count():
    told = " ".join(iep_ask("--help").stdout.split())
    assert told.count("[default if the checkpoint does not record it: ") == 5
    assert "[default: 224]" not in told
    assert "for checkpoints that do not record it" in told
