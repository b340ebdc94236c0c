"""`iep-ask`: answer questions about one image, and show the programs and each function's saliency map."""

import json
import sys
from collections.abc import Iterator
from functools import partial
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
from iep.config import SYMBOLIC, Evaluation
from iep.errors import InputError
from iep.execution_engine.choices import DEFAULT_SALIENCY, SALIENCY
from iep.runtime.files import check_writable

if TYPE_CHECKING:
    from iep.asking.answers import Answer


def _one_image(context: click.Context, option: click.Parameter, images: tuple[Path, ...]) -> Path | None:
    """Return the image of `--image`, or None.

    Raises:
        click.BadParameter: there are several.
    """
    if len(images) > 1:
        raise click.BadParameter("given more than once, but all questions are about one image")
    return images[0] if images else None


@click.command(cls=Command)
@network_options
@modules_option
@click.option(
    "--image",
    type=NamedPath(dir_okay=False),
    multiple=True,
    callback=_one_image,
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
@click.option("--device", default=Evaluation.device, show_default=True, help="Device: auto, cpu, cuda, cuda:1, ...")
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
    context = click.get_current_context()
    _check_options(context)
    pictures = _pictures(draw, len(programs or questions))
    if draw is not None:
        check_writable([draw])
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
            from iep.asking.page import serve as show
        except ImportError:
            raise InputError("the page needs Gradio: pip install 'iep[web]'") from None
        show(model, image, port, click.echo)
        return
    if model.backbone is None and image is not None:
        click.echo(f"{model.path}: does not read the image", err=True)
    seen = model.see(image)
    if seen.warning:
        click.echo(f"{image}: {seen.warning}", err=True)
    is_typed = not questions and not programs and sys.stdin.isatty() and sys.stdout.isatty()
    show = partial(_show, image=image, saliency=saliency, top=top, as_json=as_json, with_question=not is_typed)
    if programs or questions:
        answers = model.ask(seen, list(questions) or None, program=list(programs) or None)
        for answer, picture in zip(answers, pictures, strict=False):
            show(answer, picture)
        return
    is_well = True
    for number, line in typed_questions(is_typed):
        try:
            show(model.ask(seen, line), next(pictures))
        except InputError as error:
            where = "" if is_typed else f"standard input, line {number}: "
            click.echo(f"Error: {where}{' '.join(str(error).split())}", err=True)
            is_well = is_typed
    if not is_well:
        context.exit(1)


def _show(
    answer: "Answer",
    picture: Path | None,
    image: Path | None,
    saliency: str,
    top: int,
    as_json: bool,
    with_question: bool,
) -> None:
    """Print one answer, and draw it into a file unless `picture` is None.

    Raises:
        InputError: the answer cannot be drawn, or would be drawn over the image that the questions are about.
        OSError: the picture cannot be written.
    """
    from iep.asking.answers import describe, to_json

    if picture is not None:
        if image is not None and image.exists() and picture.exists() and image.samefile(picture):
            raise InputError(f"{picture}: --image reads this file, and --draw would overwrite it")
        answer.draw(picture, saliency, top)
    if as_json:
        click.echo(json.dumps(to_json(answer, top, picture)))
    else:
        click.echo(describe(answer, top, picture, with_question) + "\n")


def _pictures(draw: Path | None, given: int) -> Iterator[Path | None]:
    """Return the picture of each answer: `draw` for a single question or program, else FILE-1.png and so on."""
    if draw is None or given == 1:
        return repeat(draw)
    return (draw.with_stem(f"{draw.stem}-{number}") for number in count(1))


def _check_options(context: click.Context) -> None:
    """Check that the options are consistent.

    Raises:
        click.UsageError: two options contradict each other, or one is missing.
    """
    options = {option.name: option.opts[0] for option in context.command.params}
    given = {name for name in options if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    programs, questions = (len(context.params[name]) for name in ("programs", "questions"))

    def first(*names: str) -> str:
        """Return the first of these options that was given, or an empty text."""
        return next((options[name] for name in names if name in given), "")

    no_network = "no network answers: give --ee CKPT"
    symbolic = "symbolic executes programs on the objects in a split's images, as iep-eval --ee symbolic --images DIR"
    problems: list[tuple[Any, str]] = [
        ("port" in given and "serve" not in given, "--port is for --serve"),
        (str(context.params["ee"]) == SYMBOLIC, f"{symbolic}; expected a checkpoint, a run or default"),
    ]
    if "serve" in given:
        wrong = first("questions", "programs", "top", "draw", "saliency", "as_json", "baseline")
        problems += [
            (wrong, f"--serve shows a page to ask in: {wrong} does not apply"),
            ("pg" in given and "ee" not in given, no_network),
        ]
    elif "baseline" in given:
        own = ("pg", "ee", "modules", "programs", "beam_size", "max_program_length", "draw", "saliency")
        wrong = first(*own)
        problems.append((wrong, f"--baseline answers alone and runs no program: {wrong} does not apply"))
    else:
        decoding = first("beam_size", "max_program_length")
        problems += [
            ("pg" in given and "ee" not in given, f"{no_network}, or --baseline CKPT"),
            (programs and "pg" in given, "--program replaces the programs that --pg predicts: give one of them"),
            ("image" not in given, "there is no image: give --image FILE"),
            (programs and decoding, f"--program replaces decoded programs: {decoding} does not apply"),
            ("saliency" in given and "draw" not in given, "--saliency is for pictures: give --draw FILE too"),
            (
                programs and questions not in (0, programs),
                f"{questions} --question for {programs} --program: give as many, or none",
            ),
        ]
    for is_wrong, message in problems:
        if is_wrong:
            raise click.UsageError(message)


def typed_questions(is_terminal: bool) -> Iterator[tuple[int, str]]:
    """Yield the questions of the standard input, one per line, with the line numbers.

    At a terminal, there is a prompt, and an empty line ends the questions; elsewhere it is skipped. Bytes that are not
    UTF-8 become surrogates.
    """
    sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]  # it is a TextIOWrapper
    if is_terminal:
        import readline  # noqa: F401 - makes lines editable
    for number in count(1):
        try:
            line = input("question: ") if is_terminal else sys.stdin.readline()
        except EOFError:
            click.echo()
            return
        if not line.strip() and (is_terminal or not line):
            return
        if line.strip():
            yield number, line


if __name__ == "__main__":
    main()
