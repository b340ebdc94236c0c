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
from tiny_data import assert_one_error

gradio_client = pytest.importorskip("gradio_client")
httpx = pytest.importorskip("httpx")


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    """The address of a page with the networks of the package, in a process of its own that a signal ends at last.

    No test may cause a traceback in the terminal, and no file may be left in the temporary directory.
    """
    temporary, port = tmp_path_factory.mktemp("temporary"), str(20_000 + os.getpid() % 9999)
    command = [sys.executable, "-m", "iep.cli.ask", "--serve", "--image", str(IMAGE), "--port", port]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(temporary)}
    )
    yield process.stdout.readline().split()[0]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors, errors
    assert [path for path in temporary.rglob("*") if path.is_file()] == []


@pytest.fixture(scope="module")
def client(address: str) -> gradio_client.Client:
    return gradio_client.Client(address, verbose=False)


def test_a_question_has_the_answer_of_the_command_with_its_program_and_a_map_of_each_function(client):
    question = "Is there a sphere?"
    label, tree, program, maps, *_ = client.predict(gradio_client.handle_file(IMAGE), question, api_name="/ask")
    printed = iep_ask("--image", IMAGE, "--question", question).stdout
    assert f"  {label['label']} " in printed
    assert tree.replace("\n", "\n  ") in printed
    assert re.findall("<figcaption>(.*?)</figcaption>", maps) == program.split()
    changed = program.replace("sphere", "cube")
    again = client.predict(gradio_client.handle_file(IMAGE), changed, api_name="/run")
    assert again[2] == changed


def test_an_answer_that_the_found_objects_contradict_has_the_reason_below_its_field(client):
    image = gradio_client.handle_file(IMAGE)
    about_question, about_program = client.predict(image, "Is there a cube left of the red thing?", api_name="/ask")[
        -2:
    ]
    assert (about_question, about_program) == ("<p>no red thing was found</p>", "")
    about_question, about_program = client.predict(image, "less_than count scene count scene", api_name="/run")[-2:]
    assert about_question == ""
    assert "the objects found in the image give the answer" in about_program


def called(address: str, function: str, *data: object) -> str:
    """The last event of a function that is called without Gradio's client, which uploads files and names their type."""
    api = f"{address}gradio_api"
    event = httpx.post(f"{api}/call/{function}", json={"data": data}, timeout=60).json()["event_id"]
    return httpx.get(f"{api}/call/{function}/{event}", timeout=60).text.split("event: ")[-1]


@pytest.mark.parametrize(("function", "text"), [("ask", "Is there a sphere?"), ("run", "count scene")])
def test_a_request_reads_images_of_the_page_and_no_other_files(address, function, text):
    own = re.search('"path": ?"(.*?)"', called(address, "generate", 3))[1]
    assert "<figcaption>" in called(address, function, {"path": own}, text)
    for path in (IMAGE, Path(own).parent / os.path.relpath(IMAGE, Path(own).parent)):
        assert "This page has no such image" in called(address, function, {"path": str(path)}, text)
    assert "There is no image: choose or generate one" in called(address, function, None, text)
    assert "has no word" in called(address, "ask", {"path": own}, " ")
    long = called(address, "run", {"path": own}, "count " + 5_000 * "unique " + "scene")
    assert "expected at most 4,000" in long
    assert len(long) < 2_000


def test_an_upload_above_the_limit_is_refused(address):
    response = httpx.post(f"{address}gradio_api/upload", files={"files": ("a.png", bytes(33 << 20))}, timeout=60)
    assert response.status_code == 413


@pytest.mark.parametrize(("host", "status"), [("localhost", 200), ("example.org", 400), ("0.0.0.0", 400)])
def test_requests_to_other_host_names_fail(address, host, status):
    assert httpx.get(f"{address}config", headers={"Host": f"{host}:7860"}).status_code == status


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


def test_errors_stand_below_their_field_and_the_question_shown_is_the_one_answered(address):
    with chromium() as browser:
        page = browser.new_page()
        page.goto(address)
        question, program = page.get_by_label("Question"), page.get_by_label("Program in prefix order")
        question.fill("How many cubez are there?")
        question.press("Enter")
        page.wait_for_selector(".maps img")
        assert "'cubez' is not in the vocabulary" in page.locator(".notes p").first.inner_text()
        program.fill("count filter_colr[red] scene")
        program.press("Enter")
        told = page.locator(".notes p", has_text="did you mean 'filter_color[red]'?").first
        told.wait_for()
        assert told.bounding_box()["y"] >= program.bounding_box()["y"] + program.bounding_box()["height"]
        assert page.locator(".maps img").count() == 0
        assert program.input_value() == "count filter_colr[red] scene"
        program.fill("count filter_color[red] scene")  # which nothing covers
        program.press("Enter")
        page.wait_for_selector(".maps img")
        assert (question.input_value(), page.locator(".notes p").count()) == ("", 0)


def test_a_port_that_is_in_use_is_one_line(address):
    result = iep_ask("--serve", "--image", IMAGE, "--port", address.rstrip("/").rpartition(":")[2])
    assert_one_error(result, "cannot be opened", "choose another --port")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--serve", "--question", "What?"), "--question does not apply with --serve"),
        (("--serve", "--pg", "runs/pg"), "--pg needs --ee"),
        (("--port", "80", "--image", IMAGE), "--port needs --serve"),
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
