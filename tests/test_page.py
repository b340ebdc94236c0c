"""The page of `iep-ask --serve`: its functions by Gradio's client, the page in a browser, and wrong options."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ask_cases import IMAGE, iep_ask
from pages import chromium
from PIL import Image
from tiny_data import assert_one_error

gradio_client = pytest.importorskip("gradio_client")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a page with the networks of the demo, in a process of its own that a signal ends at last."""
    command = [
        sys.executable,
        "-m",
        "iep.cli.ask",
        "--serve",
        "--image",
        IMAGE,
        "--port",
        str(20_000 + os.getpid() % 9999),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process.stdout.readline().split()[0]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors, errors


@pytest.fixture(scope="module")
def client(address: str) -> gradio_client.Client:
    return gradio_client.Client(address, verbose=False)


def test_a_question_has_the_answer_of_the_command_with_its_program_and_a_map_of_each_function(client):
    question = "Is there a sphere?"
    label, tree, program, maps = client.predict(gradio_client.handle_file(IMAGE), question, api_name="/ask")
    printed = iep_ask("--image", IMAGE, "--question", question).stdout
    assert f"  {label['label']} " in printed
    assert tree.replace("\n", "\n  ") in printed
    assert re.findall("<figcaption>(.*?)</figcaption>", maps) == [
        token for token in program.split() if token != "scene"
    ]
    changed = program.replace("sphere", "cube")
    again = client.predict(gradio_client.handle_file(IMAGE), changed, api_name="/run")
    assert again[2] == changed


@pytest.mark.parametrize(
    ("function", "text", "message"),
    [
        ("/ask", " ", "the question is empty"),
        ("/run", "count filter_colr[red] scene", "did you mean 'filter_color[red]'"),
        ("/run", "count union scene", "inside its tree"),
    ],
)
def test_bad_input_is_told_on_the_page(client, function, text, message):
    with pytest.raises(Exception, match=re.escape(message)):
        client.predict(gradio_client.handle_file(IMAGE), text, api_name=function)


@pytest.mark.parametrize(("function", "text"), [("/ask", "Is there a sphere?"), ("/run", "count scene")])
def test_a_missing_image_is_reported_in_the_words_of_the_page(client, function, text):
    with pytest.raises(gradio_client.exceptions.AppError, match="There is no image: choose or generate one"):
        client.predict(None, text, api_name=function)


def test_every_generated_image_is_another_one(client):
    made = [Image.open(client.predict(objects, api_name="/generate")) for objects in (2, 2)]
    assert [image.size for image in made] == [(480, 320)] * 2
    assert made[0].tobytes() != made[1].tobytes()


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_a_desktop_and_a_phone_and_asks_no_other_server(address, width):
    requests = []
    with chromium() as browser:
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        question = page.get_by_label("Question")
        question.fill("How many cubes are there?")
        question.press("Enter")
        page.wait_for_selector(".maps img")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        boxes = [each.bounding_box() for each in page.locator(".maps img").all()]
        assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
    assert [url for url in requests if not url.startswith((address, "data:", "blob:"))] == []


def test_a_port_that_is_in_use_is_one_line(address):
    result = iep_ask("--serve", "--image", IMAGE, "--port", address.rstrip("/").rpartition(":")[2])
    assert_one_error(result, "cannot be opened", "choose another --port")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--serve", "--question", "What?"), "--serve shows a page to ask in: --question does not apply"),
        (("--serve", "--pg", "runs/pg"), "no network answers: give --ee CKPT"),
        (("--port", "80", "--image", IMAGE), "--port is for --serve"),
    ],
)
def test_options_that_do_not_go_with_the_page_are_one_line(arguments, message):
    assert_one_error(iep_ask(*arguments), message, code=2)


def test_without_gradio_or_with_a_file_that_is_no_image_there_is_one_line(monkeypatch, tmp_path: Path):
    (tmp_path / "text.png").write_text("not an image")
    assert_one_error(iep_ask("--serve", "--image", tmp_path / "text.png"), "text.png: not an image")
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.delitem(sys.modules, "iep.asking.page")
    assert_one_error(iep_ask("--serve"), "the page needs Gradio: pip install 'iep[web]'")
