"""`iep-ask`: questions about one image -> answers, programs as trees, and pictures of where each function looked."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import click

from iep.asking import DEFAULT_LOOK, LOOKS
from iep.cli.common import Command
from iep.cli.options import BACKBONE_OPTIONS, PicturePath, backbone_options, chosen_backbone, decoding_options
from iep.errors import InputError
from iep.evaluation.settings import Evaluation
from iep.files import check_writable


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
    if draw is not None:
        check_writable([draw])
    # Imported late: `--help` should not wait for torch.
    from iep.asking.loading import Asking, make_asker
    from iep.asking.telling import describe, to_json

    given = {name: of_backbone[name] for name in BACKBONE_OPTIONS if of_backbone[name] is not None}
    backbone = chosen_backbone(given) if given else None
    flags = tuple(_flag(name) for name in given if name != "weights")
    lengths = {name: getattr(Evaluation, name) if value is None else value for name, value in decoding.items()}
    asking = Asking(image, ee, pg, baseline, backbone, given.get("weights"), flags, device=device, **lengths)
    asker = make_asker(asking, say=lambda line: click.echo(line, err=True))
    is_typed = not questions and not programs and sys.stdin.isatty()
    if programs:
        rounds = iter([asker.run(programs, questions)])
    else:
        rounds = map(asker.ask, [questions] if questions else typed_questions(is_typed))
    is_echoed = is_typed and sys.stdout.isatty()  # by the terminal, above its answer
    is_one = len(programs or questions) == 1
    for number, answer in enumerate(chain.from_iterable(rounds), start=1):
        picture = draw if draw is None or is_one else draw.with_stem(f"{draw.stem}-{number}")
        failure, missing = None, ""
        if picture is not None:
            from iep.asking.picture import draw_answer  # matplotlib takes a second

            try:
                missing = draw_answer(picture, image, asker, answer, look or DEFAULT_LOOK, top)
            except (InputError, OSError) as error:
                picture, failure = None, error  # the answer stands all the same, and is told first
        if as_json:
            click.echo(json.dumps(to_json(answer, top, asker.vocab.program, picture), ensure_ascii=False))
        else:
            click.echo(describe(answer, top, picture, with_question=not is_echoed) + "\n")
        if missing:
            click.echo(f"{picture}: no installed font has {missing}; boxes stand for them", err=True)
        if failure is not None:
            raise failure


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


def typed_questions(is_terminal: bool) -> Iterator[list[str]]:
    """Questions from the standard input, a line each, until it ends; at a terminal an empty line ends them too,
    elsewhere it is passed over. At a terminal they are prompted for; where the answers go elsewhere the prompt stays
    out of them."""
    is_edited = is_terminal and sys.stdout.isatty()
    if is_edited:
        import readline  # noqa: F401 - lines that can be edited
    while True:
        if is_terminal and not is_edited:
            click.echo("question: ", nl=False, err=True)
        try:
            line = input("question: ") if is_edited else sys.stdin.readline()
        except EOFError:
            click.echo()
            return
        except UnicodeDecodeError as error:
            raise InputError(f"standard input: not UTF-8 text at byte {error.start}") from None
        if not line or (is_terminal and not line.strip()):
            return
        if line.strip():
            yield [line]


if __name__ == "__main__":
    main()
