"""A page in the browser to ask in, by Gradio: an image, questions, programs, and where each function looked.

The page computes nothing by itself: `loading.Model` answers, and the maps are drawn as in `picture.py`. It needs the
extra `web` and no network.
"""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from secrets import randbits
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before Gradio is imported

import gradio as gr
import numpy as np
from markupsafe import Markup, escape
from matplotlib.colors import to_hex
from PIL import Image
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from iep.asking.answers import Answer
from iep.asking.loading import Model
from iep.asking.picture import lit
from iep.errors import InputError
from iep.execution_engine.choices import DEFAULT_SALIENCY, SALIENCY
from iep.preprocess.images import open_image
from iep.programs import named, tree_lines
from iep.runtime.pictures import HEAT, data_uri
from iep.synth.renderer import render, visible_share
from iep.synth.scenes import SceneRules, sample_scene

HOST = "127.0.0.1"
ALLOWED_HOSTS = HOST, "localhost"
"""Host names that requests may give. Without this check, a website whose name resolves to `HOST` could use the page."""
QUESTION = "How many red things are there?"
MOST_BYTES = 32 << 20
"""The greatest size of an upload."""
MOST_CHARACTERS = 4_000
"""The greatest length of a question or program. Every function of a program is a map in the response."""
SIZE = 480, 320
"""Width and height of generated images, in pixels."""
FONTS = ("system-ui", "sans-serif")
"""Fonts of the system: those of Gradio's themes would be fetched from a server."""
SCALE = ", ".join(to_hex(HEAT(step / 8)) for step in range(9))
MAPS = f"""<h3>Where each function looked</h3>
<p class="scale">0 <span></span> 1: {SALIENCY[DEFAULT_SALIENCY]}</p>
<div class="maps">{{}}</div>"""
CSS = f"""
.maps {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 240px), 1fr)); gap: 12px }}
.maps figure {{ margin: 0 }}
.maps img {{ width: 100%; display: block }}
.maps figcaption {{ font-family: monospace }}
.notes p {{ margin: 0; color: #b03a2e }}
.scale span {{ display: inline-block; width: 8em; height: 0.8em; background: linear-gradient(90deg, {SCALE}) }}
"""


def make_page(model: Model, image: Path | None, directory: Path) -> gr.Blocks:
    """Return the page of an engine with a program generator.

    Args:
        image: the image that is shown first; None for a generated one.
        directory: Gradio's cache, which receives uploads and generated images. The page reads no image outside it.
    """
    directory = directory.resolve()

    def generate(objects: int) -> str:
        """Draw a random scene, and return the file of its image."""
        rules, number = SceneRules(min_objects=int(objects), max_objects=int(objects)), randbits(64)
        pixels_HWC = render(sample_scene(Random(number), rules, visible_share), *SIZE)
        Image.fromarray(pixels_HWC).save(directory / f"{number}.png")
        return str(directory / f"{number}.png")

    def file_of(image: dict[str, Any] | None) -> Path:
        if not (image and image.get("path")):
            raise InputError("There is no image: choose or generate one.")
        path = Path(image["path"]).resolve()
        if not path.is_relative_to(directory):
            raise InputError("This page has no such image: upload, choose or generate one.")
        return path

    def answered(is_run: bool, image: dict[str, Any] | None, text: str) -> tuple[Any, ...]:
        """Answer a question, or run a program, and return the values of `outputs`.

        Errors and notes are shown below the text that they are about, which is kept. Running a program clears the
        question, which it does not answer.
        """
        question = gr.skip()
        try:
            if len(text) > MOST_CHARACTERS:
                raise InputError(f"The text has {len(text):,} characters, expected at most {MOST_CHARACTERS:,}.")
            (answer,) = model.ask(file_of(image), **{"program" if is_run else "question": [text]})
            results, notes = _shown(answer), answer.warning.splitlines()
            question = "" if is_run else question
        except InputError as error:
            results, notes = (None, "", gr.skip(), ""), [str(error)]
        html = Markup().join(Markup("<p>{}</p>").format(note) for note in notes)
        return (*results, question, *(("", html) if is_run else (html, "")))

    with gr.Blocks(title="iep") as page:
        gr.Markdown("# Ask about an image of CLEVR's world")
        with gr.Row():
            with gr.Column(min_width=300):
                shown = gr.Image(generate(6) if image is None else str(image), type="filepath", label="Image")
                with gr.Row():
                    objects = gr.Slider(3, 10, 6, step=1, label="Objects", min_width=140)
                    button = gr.Button("Generate an image", min_width=140)
                question = gr.Textbox(QUESTION, label="Question", submit_btn="Ask")
                about_question = gr.HTML(elem_classes="notes")
            with gr.Column(min_width=300):
                answers = gr.Label(label="Answer", num_top_classes=5)
                tree = gr.Code(
                    label="Program that ran, as a tree", language=None, interactive=False, show_line_numbers=False
                )
                program = gr.Textbox(label="Program in prefix order, to edit and run again", submit_btn="Run")
                about_program = gr.HTML(elem_classes="notes")
        maps = gr.HTML()
        results = [answers, tree, program, maps]
        shown.change(
            lambda: (None, *[""] * 5), None, [*results, about_question, about_program], api_visibility="private"
        )
        button.click(generate, objects, shown, api_name="generate")
        how: dict[str, Any] = {
            "preprocess": False,  # Gradio would open any file that a request names
            "concurrency_id": "model",
            "concurrency_limit": 1,  # maps are found by hooks on shared modules
        }
        outputs = [*results, question, about_question, about_program]
        question.submit(partial(answered, False), [shown, question], outputs, api_name="ask", **how)
        program.submit(partial(answered, True), [shown, program], outputs, api_name="run", **how)
    return page


def serve(model: Model, image: Path | None, port: int, say: Callable[[str], None]) -> None:
    """Show the page at `HOST`:`port` until a signal ends the process.

    Args:
        model: an engine with a program generator.
        image: as in `make_page`.
        port: a free port.
        say: is called with the page's address.

    Raises:
        InputError: the image cannot be read, or the port is in use.
    """
    if image is not None:
        open_image(image)
    theme = gr.themes.Default(font=FONTS, font_mono=("monospace",))
    with tempfile.TemporaryDirectory() as directory:
        os.environ["GRADIO_TEMP_DIR"] = directory
        page = make_page(model, image, Path(directory))
        how: dict[str, Any] = {
            "prevent_thread_lock": True,
            "quiet": True,
            "theme": theme,
            "css": CSS,
            "ssr_mode": False,
            "show_error": True,
            "max_file_size": MOST_BYTES,
            "app_kwargs": {"middleware": [Middleware(TrustedHostMiddleware, allowed_hosts=ALLOWED_HOSTS)]},
        }
        try:
            _, address, _ = page.launch(server_name=HOST, server_port=port, **how)
            say(f"{address} (Ctrl-C ends it)")
            page.block_thread()
        except OSError:
            raise InputError(f"port {port} of {HOST} cannot be opened; choose another --port") from None
        finally:
            page.close(verbose=False)


def _shown(answer: Answer) -> tuple[Any, ...]:
    """Return the page's results: probabilities, the program's tree, its tokens, and maps."""
    image, tree, engine = answer.seen.pixels, answer.tree, answer.engine
    assert image is not None  # an engine answers
    assert tree is not None
    assert engine is not None
    picture, maps = image.copy(), []
    picture.thumbnail(SIZE)
    for node, map_HW in zip(tree.nodes, answer.maps(), strict=True):
        if engine.module_set.role(node.token) is None:
            continue
        uri = data_uri(Image.fromarray((255 * lit(picture, map_HW)).astype(np.uint8)))
        maps.append(f'<figure><img src="{uri}" alt=""><figcaption>{escape(named(node))}</figcaption></figure>')
    lines = "\n".join(tree_lines(tree, named))
    return dict(answer.probabilities), lines, answer.program, MAPS.format("".join(maps))
