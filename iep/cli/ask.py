"""`iep-ask`: questions about one image -> answers, programs as trees, and pictures of where each function looked."""

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import click

from iep.asking import LOOKS
from iep.cli.common import Command
from iep.cli.options import PicturePath, backbone_options, chosen_backbone
from iep.config import Config
from iep.errors import InputError
from iep.files import check_writable

OF_BACKBONE = ("backbone", "stage", "weights", "seed", "image_size", "patch_size")


@click.command(cls=Command)
@click.option("--pg", type=click.Path(path_type=Path), help="Checkpoint or run of a program generator.")
@click.option("--ee", type=click.Path(path_type=Path), help="Checkpoint or run of an execution engine.")
@click.option(
    "--baseline", type=click.Path(path_type=Path), help="Checkpoint or run of a baseline, which answers alone."
)
@click.option(
    "--image", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The image: PNG, JPEG, ..."
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
@click.option("--beam-size", type=click.IntRange(min=1), default=1, show_default=True, help="Decode by beam search.")
@click.option(
    "--max-program-length",
    type=click.IntRange(2, 1000),
    default=Config.max_program_length,
    show_default=True,
    help="Tokens after which decoding stops.",
)
@click.option(
    "--draw",
    type=PicturePath(),
    help="Picture to write of image, answer and program, and of where each function looked: .png, .svg or .pdf. Of "
    "several questions, and of those read line by line: FILE-1.png, FILE-2.png, ...",
)
@click.option(
    "--look",
    type=click.Choice(list(LOOKS)),
    default="norm",
    show_default=True,
    help="What --draw shows of a function: the norm of its output, or of the gradient of the answer's score by that.",
)
@click.option("--json", "as_json", is_flag=True, help="Write a line with a JSON object for each question.")
@click.option("--device", default=Config.device, show_default=True, help="auto, cpu, cuda, cuda:1, ...")
@backbone_options(None)
def main(
    image: Path,
    pg: Path | None,
    ee: Path | None,
    baseline: Path | None,
    questions: tuple[str, ...],
    programs: tuple[str, ...],
    top: int,
    draw: Path | None,
    look: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Answer questions about one image.

    The image's features are made as those were that the engine was trained on. Checkpoints say how; for one that does
    not, such as the original toolkit's, --backbone and the options after it do.
    """
    _check_options(pg, ee, baseline, questions, programs, draw)
    if draw is not None:
        check_writable([draw])
    # Imported late: `--help` should not wait for torch.
    from iep.asking.loading import Asking, make_asker
    from iep.asking.telling import describe, to_json

    of_backbone = {name: value for name in OF_BACKBONE if (value := options.pop(name)) is not None}
    backbone = chosen_backbone(of_backbone) if of_backbone else None
    flags = tuple(f"--{name.replace('_', '-')}" for name in of_backbone if name != "weights")
    asking = Asking(image, ee, pg, baseline, backbone, of_backbone.get("weights"), flags, **options)
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
        if picture is not None:
            from iep.asking.picture import draw_answer  # matplotlib takes a second

            draw_answer(picture, image, asker, answer, look, top)
        if as_json:
            click.echo(json.dumps(to_json(answer, top, asker.vocab.program, picture), ensure_ascii=False))
        else:
            click.echo(describe(answer, top, picture, with_question=not is_echoed) + "\n")


def _check_options(
    pg: Path | None,
    ee: Path | None,
    baseline: Path | None,
    questions: Sequence[str],
    programs: Sequence[str],
    draw: Path | None,
) -> None:
    if baseline is not None:
        others = {"--pg": pg, "--ee": ee, "--program": programs, "--draw": draw}
        if given := [flag for flag, value in others.items() if value]:
            raise click.UsageError(f"--baseline answers alone and runs no program: {given[0]} does not go with it")
        return
    if ee is None:
        raise click.UsageError("nothing answers: give --ee CKPT, or --baseline CKPT")
    if programs and pg is not None:
        raise click.UsageError("--program runs instead of what --pg would predict; give one of them")
    if not programs and pg is None:
        raise click.UsageError("nothing makes programs: give --pg CKPT, or --program TOKENS")
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
