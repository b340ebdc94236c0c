"""`iep-ask`: questions about one image -> answers, programs as trees, and pictures of where each function looked."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from iep.asking import LOOKS
from iep.cli.common import Command
from iep.cli.options import PicturePath, backbone_options, chosen_backbone
from iep.config import Config
from iep.errors import InputError
from iep.files import check_writable

if TYPE_CHECKING:
    from iep.asking.answers import Answer, Asker

OF_BACKBONE = ("backbone", "stage", "weights", "seed", "image_size", "patch_size")


@click.command(cls=Command)
@click.option("--pg", type=click.Path(path_type=Path), help="Checkpoint or run of a program generator.")
@click.option("--ee", type=click.Path(path_type=Path), required=True, help="Checkpoint or run of an execution engine.")
@click.option(
    "--image", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The image: PNG, JPEG, ..."
)
@click.option(
    "--question",
    "questions",
    multiple=True,
    help="May be given several times. Without any, questions are read line by line.",
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
    pg: Path | None,
    ee: Path,
    image: Path,
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
    _check_options(pg, questions, programs)
    if draw is not None:
        check_writable([draw])
    # Imported late: `--help` should not wait for torch.
    from iep.asking.answers import Asking, make_asker

    of_backbone = {name: value for name in OF_BACKBONE if (value := options.pop(name)) is not None}
    backbone = chosen_backbone(of_backbone) if of_backbone else None
    flags = tuple(f"--{name.replace('_', '-')}" for name in of_backbone if name != "weights")
    asking = Asking(image, ee, pg, backbone, of_backbone.get("weights"), flags, **options)
    asker = make_asker(asking, say=lambda line: click.echo(line, err=True))
    if programs:
        rounds = iter([asker.run(programs, questions)])
    elif questions:
        rounds = iter([asker.ask(questions)])
    else:
        rounds = (asker.ask([question]) for question in typed_questions())
    number, one_file = 0, len(programs or questions) == 1
    for answers in rounds:
        for answer in answers:
            number += 1
            picture = draw if draw is None or one_file else draw.with_stem(f"{draw.stem}-{number}")
            if picture is not None:
                _draw(picture, image, asker, answer, look, top)
            if as_json:
                click.echo(json.dumps(_to_json(answer, top, picture, asker.vocab.program), ensure_ascii=False))
            else:
                click.echo("\n".join(_described(answer, top, picture)) + "\n")


def _check_options(pg: Path | None, questions: Sequence[str], programs: Sequence[str]) -> None:
    if programs and pg is not None:
        raise click.UsageError("--program runs instead of what --pg would predict; give one of them")
    if not programs and pg is None:
        raise click.UsageError("nothing makes programs: give --pg CKPT, or --program TOKENS")
    if programs and len(questions) not in (0, len(programs)):
        raise click.UsageError(f"{len(questions)} --question for {len(programs)} --program: give as many, or none")


def typed_questions() -> Iterator[str]:
    """Questions from the standard input, a line each, until it ends or a line is empty."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 - lines that can be edited
    while True:
        try:
            line = input("question: ") if is_terminal else sys.stdin.readline()
        except EOFError:
            click.echo()
            return
        except UnicodeDecodeError as error:
            raise InputError(f"standard input: not UTF-8 text at byte {error.start}") from None
        if not line.strip():
            return
        yield line.strip()


def _draw(path: Path, image: Path, asker: "Asker", answer: "Answer", look: str, top: int) -> None:
    from iep.asking.looks import look_maps, to_unit
    from iep.asking.picture import check_drawable, draw
    from iep.execution_engine.trace import trace
    from iep.preprocess.images import open_image

    check_drawable(answer.tree)
    traced = trace(asker.predictor.engine, asker.features, answer.program)
    attentions = [look == "norm" and output.shape[1] == 1 for output in traced.outputs]
    maps = [to_unit(*pair) for pair in zip(look_maps(traced, look), attentions, strict=True)]
    draw(path, open_image(image), answer, maps, look, top)


def _described(answer: "Answer", top: int, picture: Path | None) -> list[str]:
    """The lines that are shown of an answer."""
    from iep.program_tree import named, tree_lines

    lines = [answer.question.text] if answer.question else []
    for word, near in answer.question.unknown if answer.question else ():
        hint = f"; the nearest known word is {near!r}" if near else ""
        lines.append(f"  the vocabulary lacks {word!r}, taken as <UNK>{hint}")
    (best, probability), *others = answer.ranked[:top]
    rest = "".join(f", {name} {_percent(value)}" for name, value in others)
    lines.append(f"  {best} {_percent(probability)}{rest and f'  (then {rest[2:]})'}")
    lines += [f"  {line}" for line in tree_lines(answer.tree, named)]
    if answer.tree.ignored:
        lines.append(f"  ignored, after the tree was complete: {' '.join(answer.tree.ignored)}")
    return [*lines, *([f"  Wrote {picture}"] if picture else [])]


def _percent(probability: float) -> str:
    return f"{100 * probability:.1f}%"


def _to_json(answer: "Answer", top: int, picture: Path | None, program_tokens: Sequence[str]) -> dict[str, Any]:
    """The program as predicted, in the form of predictions.jsonl, and the functions run, both in prefix order."""
    from iep.evaluation.prediction_file import words

    question = answer.question
    return {
        **({"question": question.text, "unknown_words": [word for word, _ in question.unknown]} if question else {}),
        "answers": [{"answer": name, "probability": round(value, 6)} for name, value in answer.ranked[:top]],
        "program": words(answer.program, program_tokens),
        "run": [node.token for node in answer.tree.nodes],
        **({"picture": str(picture)} if picture else {}),
    }


if __name__ == "__main__":
    main()
