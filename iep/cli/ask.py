"""`iep-ask`: answer questions about one image, and show the programs and each function's saliency map."""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from iep.cli.command import Command
from iep.cli.options import (
    PicturePath,
    backbone_options,
    chosen_backbone,
    decoding_options,
    modules_option,
    network_options,
)
from iep.config import Evaluation
from iep.errors import InputError
from iep.execution_engine.choices import DEFAULT_SALIENCY, SALIENCY
from iep.runtime.files import check_writable

if TYPE_CHECKING:
    from iep.asking.answers import Answer, Asker


PORT, TOP = 7860, 3


@click.command(cls=Command)
@network_options
@modules_option
@click.option(
    "--image",
    type=click.Path(path_type=Path, dir_okay=False),
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
@click.option("--top", type=click.IntRange(min=1), help=f"Number of most likely answers to show.  [default: {TOP}]")
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
    help="Map of a function that --draw shows: its attention, or the norm of its output (norm); or the norm of the "
    f"gradient of the answer's score with respect to its output (gradient).  [default: {DEFAULT_SALIENCY}]",
)
@click.option("--serve", is_flag=True, help="Show a page to ask in, in the browser (pip install 'iep[web]').")
@click.option("--port", type=click.IntRange(1, 65535), help=f"Port of --serve.  [default: {PORT}]")
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
    top: int | None,
    draw: Path | None,
    saliency: str | None,
    serve: bool,
    port: int | None,
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
    inputs = {"--image": image, "--pg": pg, "--ee": ee, "--baseline": baseline}
    inputs["--weights"] = Path(of_backbone["weights"]) if of_backbone["weights"] else None
    num_given = len(programs or questions)
    pictures = _pictures(draw, num_given)
    if draw is not None:
        for picture in islice(_pictures(draw, num_given), num_given):
            _check_not_read(picture, inputs)
        check_writable([draw])
    # Imported late: `--help` should not wait for torch.
    from iep.asking.loading import DEFAULT, load_model

    if not (ee or baseline):  # then --pg is not given either
        click.echo("The networks that come with the package answer (see --ee).", err=True)
        ee = DEFAULT
    given = {name: value for name, value in of_backbone.items() if value is not None}
    model = load_model(
        ee or baseline,
        kind="engine" if ee else "baseline",
        pg=pg,
        predicts=not programs,
        modules=modules,
        backbone=partial(chosen_backbone, given) if given else None,
        weights=given.get("weights"),
        options=[_flag(context, name) for name in given if name != "weights"],
        beam_size=Evaluation.beam_size if beam_size is None else beam_size,
        max_program_length=Evaluation.max_program_length if max_program_length is None else max_program_length,
        device=device,
        say=lambda line: click.echo(line, err=True),
    )
    if serve:
        try:
            from iep.asking.page import serve as show
        except ImportError:
            raise InputError("the page needs Gradio: pip install 'iep[web]'") from None
        show(model, image, port or PORT, click.echo)
        return
    if model.backbone is None and image is not None:
        click.echo(f"{model.path}: does not read the image", err=True)
    asker = model.about(image)
    if asker.warning:
        click.echo(f"{image}: {asker.warning}", err=True)
    is_typed = not questions and not programs and sys.stdin.isatty()
    is_echoed = is_typed and sys.stdout.isatty()  # by the terminal, above its answer
    saliency = saliency or DEFAULT_SALIENCY
    printer = _Printer(asker, image, pictures, inputs, saliency, top or TOP, as_json, with_question=not is_echoed)
    if programs or questions:
        for answer in asker.run(programs, questions) if programs else asker.ask(questions):
            printer.show(answer)
    elif not _answer_lines(asker, printer, is_typed):
        context.exit(1)


@dataclass
class _Printer:
    """Prints answers one after the other, and draws them if `pictures` has files for them."""

    asker: "Asker"
    image: Path | None
    pictures: Iterator[Path | None]
    inputs: Mapping[str, Path | None]
    saliency: str
    top: int
    as_json: bool
    with_question: bool

    def show(self, answer: "Answer") -> None:
        """Print and draw one answer.

        Raises:
            InputError, OSError: the answer cannot be drawn; it has been printed all the same.
        """
        from iep.asking.answers import describe, to_json

        failure, missing = None, ""
        picture = next(self.pictures)
        if picture is not None:
            from iep.asking.picture import draw_answer  # matplotlib takes a second

            try:
                _check_not_read(picture, self.inputs)
                missing = draw_answer(picture, self.image, self.asker, answer, self.saliency, self.top)
            except (InputError, OSError) as error:
                picture, failure = None, error
        is_plain = not (sys.stdout.encoding or "").lower().startswith("utf")
        if self.as_json:
            content = to_json(answer, self.top, self.asker.vocab.program, picture)
            click.echo(json.dumps(content, ensure_ascii=is_plain))
        else:
            text = describe(answer, self.top, picture, self.with_question)
            if is_plain:
                text = text.translate(PLAIN_BRANCHES).encode(sys.stdout.encoding, "replace").decode(sys.stdout.encoding)
            click.echo(text + "\n")
        if missing:
            click.echo(f"{picture}: no installed font has {missing}; boxes replace them", err=True)
        if failure is not None:
            raise failure


PLAIN_BRANCHES = str.maketrans("├└─│", "|`-|")
"""The lines of a tree for a terminal without UTF-8."""


def _answer_lines(asker: "Asker", printer: _Printer, is_terminal: bool) -> bool:
    """Answer the questions of the standard input, and print an error for each that fails.

    Returns:
        whether the command succeeds: always at a terminal, elsewhere if no question failed.
    """
    is_well = True
    for number, line in typed_questions(is_terminal):
        try:
            for answer in asker.ask([line]):
                printer.show(answer)
        except InputError as error:
            where = "" if is_terminal else f"standard input, line {number}: "
            click.echo(f"Error: {where}{' '.join(str(error).split())}", err=True)
            is_well = is_terminal
    return is_well


def _pictures(draw: Path | None, given: int) -> Iterator[Path | None]:
    """Return the picture of each answer: `draw` for a single question or program, else FILE-1.png and so on."""
    if draw is None or given == 1:
        return repeat(draw)
    return (draw.with_stem(f"{draw.stem}-{number}") for number in count(1))


def _check_not_read(picture: Path, inputs: Mapping[str, Path | None]) -> None:
    """Check that a picture does not overwrite one of `inputs`, the files and directories that are read, by option.

    Raises:
        InputError: the picture is one of the inputs.
    """
    for option, path in inputs.items():
        if path is not None and path.exists() and picture.exists() and path.samefile(picture):
            raise InputError(f"{picture}: {option} reads this file, and --draw would overwrite it")


def _flag(context: click.Context, name: str) -> str:
    """Return the option that sets a parameter, such as `--program` for `programs`."""
    return next(option.opts[0] for option in context.command.params if option.name == name)


def _check_options(context: click.Context) -> None:
    """Check that the options are consistent.

    Raises:
        click.UsageError: two options contradict each other, or one is missing.
    """
    given = {name: value for name, value in context.params.items() if value not in (None, (), False)}
    if "serve" in given:
        others = ("questions", "programs", "top", "draw", "saliency", "as_json", "baseline")
        if wrong := [_flag(context, name) for name in others if name in given]:
            raise click.UsageError(f"--serve shows a page to ask in: {wrong[0]} does not apply")
        if "pg" in given and "ee" not in given:
            raise click.UsageError("no network answers: give --ee CKPT")
        return
    if "port" in given:
        raise click.UsageError("--port is for --serve")
    decoding = [_flag(context, name) for name in ("beam_size", "max_program_length") if name in given]
    programs, questions = len(given.get("programs", ())), len(given.get("questions", ()))
    if "baseline" in given:
        others = ["pg", "ee", "modules", "programs", "beam_size", "max_program_length", "draw", "saliency"]
        wrong = [_flag(context, name) for name in others if name in given]
        problems = [(wrong, f"--baseline answers alone and runs no program: {''.join(wrong[:1])} does not apply")]
    else:
        problems = [
            ("pg" in given and "ee" not in given, "no network answers: give --ee CKPT, or --baseline CKPT"),
            (programs and "pg" in given, "--program replaces the programs that --pg predicts: give one of them"),
            ("image" not in given, "there is no image: give --image FILE"),
            (programs and decoding, f"--program replaces decoded programs: {''.join(decoding[:1])} does not apply"),
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

    At a terminal, an empty line ends the questions; elsewhere it is skipped. A terminal shows a prompt, which goes to
    the standard error if the standard output is a file. Bytes that are not UTF-8 become surrogates.
    """
    sys.stdin.reconfigure(errors="surrogateescape")
    is_edited = is_terminal and sys.stdout.isatty()
    if is_edited:
        import readline  # noqa: F401 - makes lines editable
    for number in count(1):
        if is_terminal and not is_edited:
            click.echo("question: ", nl=False, err=True)
        try:
            line = input("question: ") if is_edited else sys.stdin.readline()
        except EOFError:
            click.echo()
            return
        if not line or (is_terminal and not line.strip()):
            return
        if line.strip():
            yield number, line


if __name__ == "__main__":
    main()
