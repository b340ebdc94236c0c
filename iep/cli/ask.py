"""`iep-ask`: questions about one image -> answers, programs as trees, and pictures of where each function looked."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from iep.cli.command import Command
from iep.cli.options import BACKBONE_OPTIONS, PicturePath, backbone_options, chosen_backbone, decoding_options
from iep.config import DEFAULT_LOOK, LOOKS, Evaluation
from iep.errors import InputError
from iep.runtime.files import check_writable

if TYPE_CHECKING:
    from iep.asking.answers import Answer, Asker


@click.command(cls=Command)
@click.option("--pg", type=click.Path(path_type=Path), help="Checkpoint or run of a program generator.")
@click.option("--ee", type=click.Path(path_type=Path), help="Checkpoint or run of an execution engine.")
@click.option(
    "--baseline", type=click.Path(path_type=Path), help="Checkpoint or run of a baseline, which answers alone."
)
@click.option(
    "--image",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The image: PNG, JPEG, ... Only a baseline that does not look does without.",
)
@click.option(
    "--question",
    "questions",
    multiple=True,
    help="May be given several times. Without any, questions are read line by line; at a terminal an empty line ends.",
)
@click.option(
    "--program",
    "programs",
    multiple=True,
    metavar="TOKENS",
    help='Run this instead of a predicted program, in prefix order, such as "count filter_color[red] scene"; may be '
    "given several times, with as many questions or none.",
)
@click.option("--top", type=click.IntRange(min=1), default=3, show_default=True, help="Answers shown, the likeliest.")
@decoding_options
@click.option(
    "--draw",
    type=PicturePath(),
    help="Picture to write of image, answer and program, and of where each function looked: .png, .svg or .pdf. Of "
    "several questions, and of those read line by line: FILE-1.png, FILE-2.png, ...",
)
@click.option(
    "--look",
    type=click.Choice(list(LOOKS)),
    help="What --draw shows of a function: the norm of its output, or of the gradient of the answer's score by that.  "
    f"[default: {DEFAULT_LOOK}]",
)
@click.option("--json", "as_json", is_flag=True, help="Write a line with a JSON object for each question.")
@click.option("--device", default=Evaluation.device, show_default=True, help="auto, cpu, cuda, cuda:1, ...")
@backbone_options(None)
def main(
    image: Path | None,
    pg: Path | None,
    ee: Path | None,
    baseline: Path | None,
    questions: tuple[str, ...],
    programs: tuple[str, ...],
    top: int,
    draw: Path | None,
    look: str | None,
    beam_size: int | None,
    max_program_length: int | None,
    device: str,
    as_json: bool,
    **of_backbone: Any,
) -> None:
    """Answer questions about one image.

    The image's features are made as those were that the engine was trained on. Checkpoints say how; for one that does
    not, such as the original toolkit's, --backbone and the options after it do.
    """
    decoding = {"beam_size": beam_size, "max_program_length": max_program_length}
    _check_options(image, pg, ee, baseline, questions, programs, {**decoding, "draw": draw, "look": look})
    inputs = {"--image": image, "--pg": pg, "--ee": ee, "--baseline": baseline}
    inputs["--weights"] = Path(of_backbone["weights"]) if of_backbone["weights"] else None
    num_given = len(programs or questions)
    pictures = _pictures(draw, num_given)
    if draw is not None:
        for picture in islice(_pictures(draw, num_given), num_given):
            _check_not_read(picture, inputs)
        check_writable([draw])
    # Imported late: `--help` should not wait for torch.
    from iep.asking.loading import Asking, make_asker

    given = {name: of_backbone[name] for name in BACKBONE_OPTIONS if of_backbone[name] is not None}
    backbone = chosen_backbone(given) if given else None
    flags = tuple(_flag(name) for name in given if name != "weights")
    lengths = {name: getattr(Evaluation, name) if value is None else value for name, value in decoding.items()}
    asking = Asking(image, ee, pg, baseline, backbone, given.get("weights"), flags, device=device, **lengths)
    asker = make_asker(asking, say=lambda line: click.echo(line, err=True))
    is_typed = not questions and not programs and sys.stdin.isatty()
    is_echoed = is_typed and sys.stdout.isatty()  # by the terminal, above its answer
    show = _Shown(asker, image, pictures, inputs, look or DEFAULT_LOOK, top, as_json, with_question=not is_echoed)
    if programs or questions:
        for answer in asker.run(programs, questions) if programs else asker.ask(questions):
            show(answer)
    elif not _answer_lines(asker, show, is_typed):
        click.get_current_context().exit(1)


@dataclass
class _Shown:
    """Prints answers, one after the other, and draws them where that is asked for."""

    asker: "Asker"
    image: Path | None
    pictures: Iterator[Path | None]
    inputs: Mapping[str, Path | None]
    look: str
    top: int
    as_json: bool
    with_question: bool

    def __call__(self, answer: "Answer") -> None:
        """Show one.

        Raises:
            InputError, OSError: it cannot be drawn; it is printed before.
        """
        from iep.asking.answers import describe, to_json

        failure, missing = None, ""
        picture = next(self.pictures)
        if picture is not None:
            from iep.asking.picture import draw_answer  # matplotlib takes a second

            try:
                _check_not_read(picture, self.inputs)
                missing = draw_answer(picture, self.image, self.asker, answer, self.look, self.top)
            except (InputError, OSError) as error:
                picture, failure = None, error
        if self.as_json:
            told = to_json(answer, self.top, self.asker.vocab.program, picture)
            click.echo(json.dumps(told, ensure_ascii=False))
        else:
            click.echo(describe(answer, self.top, picture, self.with_question) + "\n")
        if missing:
            click.echo(f"{picture}: no installed font has {missing}; boxes stand for them", err=True)
        if failure is not None:
            raise failure


def _answer_lines(asker: "Asker", show: _Shown, is_terminal: bool) -> bool:
    """Answer the questions of the standard input. A bad one is a line on the standard error and ends nothing.

    Returns:
        whether all is well: at a terminal whatever was typed, elsewhere if no question was bad.
    """
    is_well = True
    for number, line in typed_questions(is_terminal):
        try:
            for answer in asker.ask([line]):
                show(answer)
        except InputError as error:
            where = "" if is_terminal else f"standard input, line {number}: "
            click.echo(f"Error: {where}{' '.join(str(error).split())}", err=True)
            is_well = is_terminal
    return is_well


def _pictures(draw: Path | None, given: int) -> Iterator[Path | None]:
    """The picture of one answer after the other; FILE-1.png and so on, but of a single question or program."""
    if draw is None or given == 1:
        return repeat(draw)
    return (draw.with_stem(f"{draw.stem}-{number}") for number in count(1))


def _check_not_read(picture: Path, inputs: Mapping[str, Path | None]) -> None:
    """`inputs` are files and directories that are read, by option.

    Raises:
        InputError: the picture would be written over one of them.
    """
    for option, path in inputs.items():
        if path is not None and path.exists() and picture.exists() and path.samefile(picture):
            raise InputError(f"{picture}: is what {option} reads, and would be overwritten by --draw")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_options(
    image: Path | None,
    pg: Path | None,
    ee: Path | None,
    baseline: Path | None,
    questions: Sequence[str],
    programs: Sequence[str],
    of_programs: Mapping[str, Any],
) -> None:
    """`of_programs` are options by name that say something of programs."""
    decoding = [_flag(name) for name in ("beam_size", "max_program_length") if of_programs[name] is not None]
    if baseline is not None:
        others = {"pg": pg, "ee": ee, "program": programs or None, **of_programs}
        if given := [_flag(name) for name, value in others.items() if value is not None]:
            raise click.UsageError(f"--baseline answers alone and runs no program: {given[0]} does not go with it")
        return
    if ee is None:
        raise click.UsageError("nothing answers: give --ee CKPT, or --baseline CKPT")
    if programs and pg is not None:
        raise click.UsageError("--program runs instead of what --pg would predict; give one of them")
    if not programs and pg is None:
        raise click.UsageError("nothing makes programs: give --pg CKPT, or --program TOKENS")
    if image is None:
        raise click.UsageError("there is nothing to look at: give --image FILE")
    if programs and decoding:
        raise click.UsageError(f"--program runs instead of what would be decoded: {decoding[0]} does not go with it")
    if of_programs["look"] is not None and of_programs["draw"] is None:
        raise click.UsageError("--look says what is drawn: give --draw FILE too")
    if programs and len(questions) not in (0, len(programs)):
        raise click.UsageError(f"{len(questions)} --question for {len(programs)} --program: give as many, or none")


def typed_questions(is_terminal: bool) -> Iterator[tuple[int, str]]:
    """Questions from the standard input, a line each, with the line's number, until it ends; at a terminal an empty
    line ends them too, elsewhere it is passed over. At a terminal they are prompted for; where the answers go
    elsewhere the prompt stays out of them. What is not UTF-8 comes as surrogates."""
    sys.stdin.reconfigure(errors="surrogateescape")
    is_edited = is_terminal and sys.stdout.isatty()
    if is_edited:
        import readline  # noqa: F401 - lines that can be edited
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
