"""`iep-ask`: answer questions about one image, and show the programs and each function's saliency map."""

import json
import sys
from collections.abc import Iterator
from itertools import count, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from iep.cli.command import Command
from iep.cli.options import (
    NamedPath,
    PicturePath,
    backbone_options,
    chosen_backbone,
    decoding_options,
    modules_option,
    network_options,
)
from iep.config import Config
from iep.errors import InputError
from iep.execution_engine.choices import DEFAULT_SALIENCY, SALIENCY

if TYPE_CHECKING:
    from iep.asking.answers import Answer


@click.command(cls=Command)
@network_options
@modules_option
@click.option(
    "--image",
    type=NamedPath(dir_okay=False),
    help="Image file, such as PNG or JPEG. Only a baseline that does not read images can do without.",
)
@click.option(
    "--question",
    "questions",
    multiple=True,
    help="Question; may be given several times. Without this option, questions are read from the standard input, each "
    "from a line; at a terminal, an empty line ends them.",
)
@click.option(
    "--program",
    "programs",
    multiple=True,
    metavar="TOKENS",
    help='Program to run instead of a predicted one, in prefix order: "count filter_color[red] scene". May be given '
    "several times, with as many questions or none.",
)
@click.option("--top", type=click.IntRange(min=1), default=3, show_default=True, help="Number of answers to show.")
@decoding_options
@click.option(
    "--draw",
    type=PicturePath(),
    help="Draw the image, the answer, the program and the saliency map of each function into this .png, .svg or .pdf "
    "file. Several questions, and those of the standard input, are drawn into FILE-1.png, FILE-2.png, ...",
)
@click.option(
    "--saliency",
    type=click.Choice(list(SALIENCY)),
    default=DEFAULT_SALIENCY,
    show_default=True,
    help="Map of a function that --draw shows: its attention, or the norm of its output (norm); or the norm of the "
    "gradient of the answer's score with respect to its output (gradient).",
)
@click.option("--serve", is_flag=True, help="Show a page to ask in, in the browser (pip install 'iep[web]').")
@click.option("--port", type=click.IntRange(1, 65535), default=7860, show_default=True, help="Port of --serve.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line for each question.")
@click.option("--device", default=Config.device, show_default=True, help="Device: auto, cpu, cuda, cuda:1, ...")
@backbone_options
def main(
    image: Path | None,
    pg: Path | None,
    ee: Path | None,
    baseline: Path | None,
    modules: str | None,
    questions: tuple[str, ...],
    programs: tuple[str, ...],
    top: int,
    draw: Path | None,
    saliency: str,
    serve: bool,
    port: int,
    beam_size: int | None,
    max_program_length: int | None,
    device: str,
    as_json: bool,
    **of_backbone: Any,
) -> None:
    """Answer questions about one image, by the networks that come with the package unless others are given.

    The image's features are computed as they were for the training of the network. Checkpoints record how. --backbone
    and the options after it, except --weights, are only for checkpoints that do not, such as the original toolkit's.
    """
    _check_options(click.get_current_context())
    # Imported late: `--help` should not wait for torch.
    from iep.asking.loading import DEFAULT, load

    if not (ee or baseline):  # then --pg is not given either
        click.echo("The networks that come with the package answer (see --ee).", err=True)
    weights = of_backbone.pop("weights")
    is_chosen = any(value is not None for value in of_backbone.values())
    decoding: dict[str, Any] = {"beam_size": beam_size, "max_program_length": max_program_length}
    model = load(
        ee or baseline or DEFAULT,
        pg=pg,
        device=device,
        modules=modules,
        backbone=chosen_backbone(of_backbone | {"weights": weights}) if is_chosen else None,
        weights=None if is_chosen else weights,
        say=lambda line: click.echo(line, err=True),
        **{name: value for name, value in decoding.items() if value is not None},
    )
    if (model.predictor.baseline is None) != (baseline is None):
        found, expected = ("a baseline", "--baseline") if ee else ("an execution engine", "--ee")
        raise InputError(f"{model.path}: holds {found}; give it as {expected}")
    if not programs:
        model.check_answers()
    if serve:
        try:
            from iep.asking.page import serve as show_page
        except ImportError:
            raise InputError("the page needs Gradio: pip install 'iep[web]'") from None
        show_page(model, image, port, click.echo)
        return
    if model.backbone is None and image is not None:
        click.echo(f"{model.path}: does not read the image", err=True)
    seen = model.see(image)

    def show(answer: "Answer", picture: Path | None) -> None:
        """Print one answer, and draw it into a file unless `picture` is None."""
        if picture is not None:
            if image is not None and picture.exists() and image.samefile(picture):
                raise InputError(f"{picture}: --image reads this file, and --draw would overwrite it")
            answer.draw(picture, saliency, top)
        if as_json:
            click.echo(json.dumps(answer.to_json(top) | ({} if picture is None else {"picture": str(picture)})))
        else:
            wrote = "" if picture is None else f"  Wrote {picture}\n"
            click.echo(f"{answer.text(top)}\n{wrote}")

    if programs or questions:
        answers = model.ask(seen, list(questions) or None, program=list(programs) or None)
        for answer, picture in zip(answers, _pictures(draw, len(answers)), strict=False):
            show(answer, picture)
        return
    is_terminal, failed = sys.stdin.isatty() and sys.stdout.isatty(), False
    pictures = _pictures(draw)
    for number, line in typed_questions(is_terminal):
        try:
            show(model.ask(seen, line), next(pictures))
        except InputError as error:
            where = "" if is_terminal else f"standard input, line {number}: "
            click.echo(f"Error: {where}{' '.join(str(error).split())}", err=True)
            failed = not is_terminal
    sys.exit(int(failed))


def _pictures(draw: Path | None, answers: int | None = None) -> Iterator[Path | None]:
    """Return the picture of each answer: `draw` for a single question or program, else FILE-1.png and so on."""
    if draw is None or answers == 1:
        return repeat(draw)
    return (draw.with_stem(f"{draw.stem}-{number}") for number in count(1))


CONFLICTS = {
    "serve": ("questions", "programs", "top", "draw", "saliency", "as_json", "baseline"),
    "baseline": ("ee", "pg", "modules", "programs", "beam_size", "max_program_length", "draw", "saliency"),
    "programs": ("pg", "beam_size", "max_program_length"),
}
"""Options, and those that have no effect beside them."""
NEEDS = {"port": "serve", "saliency": "draw", "pg": "ee"}
"""Options, and those without which they have no effect."""


def _check_options(context: click.Context) -> None:
    """Check that each given option has an effect.

    Raises:
        click.UsageError: two options contradict each other, or one is missing.
    """
    flags = {option.name: option.opts[0] for option in context.command.params}
    given = {name for name in flags if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    for name, others in CONFLICTS.items():
        for other in others:
            if {name, other} <= given:
                raise click.UsageError(f"{flags[other]} does not apply with {flags[name]}")
    for name, needed in NEEDS.items():
        if name in given and needed not in given:
            raise click.UsageError(f"{flags[name]} needs {flags[needed]}")


def typed_questions(is_terminal: bool) -> Iterator[tuple[int, str]]:
    """Yield the questions of the standard input, one per line, with the line numbers.

    At a terminal, there is a prompt, and an empty line ends the questions; elsewhere it is skipped.
    """
    sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]  # it is a TextIOWrapper
    if is_terminal:
        import readline  # noqa: F401 - makes lines editable
    for number in count(1):
        try:
            line = input("question: " if is_terminal else "")
        except EOFError:
            click.echo(nl=is_terminal)
            return
        if line.strip():
            yield number, line
        elif is_terminal:
            return


if __name__ == "__main__":
    main()
