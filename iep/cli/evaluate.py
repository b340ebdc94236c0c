"""`iep-eval`: checkpoints on a preprocessed split -> a table, report.json, predictions.jsonl and answers."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from iep.cli.common import Command
from iep.cli.options import families_option, placement_options, where
from iep.config import BATCHING, PRECISIONS, PROGRAM_SOURCES, Config
from iep.locks import alone_in


@click.command(cls=Command)
@click.option("--pg", type=click.Path(path_type=Path), help="Checkpoint or run of a program generator.")
@click.option("--ee", type=click.Path(path_type=Path), help="Checkpoint or run of an execution engine.")
@click.option("--baseline", type=click.Path(path_type=Path), help="Checkpoint or run of a baseline of any kind, alone.")
@click.option("--data", type=click.Path(path_type=Path), required=True, help="Directory that iep-preprocess wrote.")
@click.option("--split", help="Split to evaluate on.  [default: val]")
@click.option(
    "--programs",
    type=click.Choice(PROGRAM_SOURCES),
    help="Programs that the engine runs.  [default: predicted where --pg is given]",
)
@click.option(
    "--batching", type=click.Choice(BATCHING), help=f"Scheduler of the module calls.  [default: {Config.batching}]"
)
@click.option(
    "--sharing/--no-sharing",
    default=None,
    help="Run each image's stem, and equal subtrees over one image, once a batch.  [default: sharing]",
)
@click.option(
    "--precision", type=click.Choice(PRECISIONS), help=f"What networks compute in.  [default: {Config.precision}]"
)
@click.option(
    "--order-by-image",
    is_flag=True,
    default=None,
    help="Visit questions image by image: those of one image share a batch. Results stay in the file's order.",
)
@click.option("--beam-size", type=click.IntRange(min=1), help="Decode programs by beam search.  [default: 1, greedy]")
@click.option(
    "--max-program-length",
    type=click.IntRange(2, 1000),
    help=f"Tokens after which decoding stops.  [default: {Config.max_program_length}]",
)
@click.option("--batch-size", type=click.IntRange(min=1), help="Questions a batch.  [default: 256]")
@families_option
@click.option("--skip-samples", type=click.IntRange(min=0), help="Leave out the first N questions, of those families.")
@click.option("--num-samples", type=click.IntRange(min=1), help="Evaluate on N questions, the first that are left.")
@click.option(
    "--workers",
    type=click.IntRange(min=0),
    help=f"Processes that read and plan batches; 0: this one.  [default: {Config.workers}]",
)
@click.option(
    "--features-in-memory",
    is_flag=True,
    default=None,
    help="Read all features into memory first, once for all workers.",
)
@click.option("--device", help=f"auto, cpu, cuda, cuda:1, ...  [default: {Config.device}]")
@placement_options
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for report.json, predictions.jsonl, and answers.txt, as CLEVR's evaluation takes it.",
)
@click.option("--name", default="model", show_default=True, help="Heading of this evaluation's column.")
@click.option(
    "--against",
    "others",
    type=(str, click.Path(path_type=Path)),
    multiple=True,
    metavar="NAME REPORT",
    help="Column for an earlier report.json (or its directory); may be given several times.",
)
def main(out: Path | None, name: str, others: tuple[tuple[str, Path], ...], **options: Any) -> None:
    """Evaluate trained models: accuracy overall and by question type, program exact match, questions per second."""
    # Imported late: `--help` should not wait for torch.
    from iep.distributed import is_main, joined
    from iep.evaluation.outputs import ANSWERS, OUTPUTS, REPORT
    from iep.evaluation.report import format_table, read_report
    from iep.evaluation.run import Evaluation, evaluate

    earlier = [(label, read_report(path / REPORT if path.is_dir() else path)) for label, path in others]
    options |= where(options)
    settings = Evaluation(**{key: value for key, value in options.items() if value is not None})
    with joined(), nullcontext() if out is None or not is_main() else alone_in(out, *OUTPUTS):
        report = evaluate(settings, out)
    if report is None:  # one of several processes, and not the one that speaks
        return
    click.echo(format_table([*earlier, (name, report)]))
    if report.selection:
        click.echo(f"Of the {report.split} split: {report.selection}.")
    if report.accuracy is None and (options["ee"] or options["baseline"]):
        written = "" if out is None else f", the answers are in {out / ANSWERS}"
        click.echo(f"The {report.split} split has no answers: accuracies are unknown{written}.")
    if report.program_exact_match is None and options["pg"]:
        click.echo(f"The {report.split} split has no programs: their exact match is unknown.")
    if out is not None:
        click.echo(f"Wrote {', '.join(str(out / name) for name in OUTPUTS if (out / name).exists())}")


if __name__ == "__main__":
    main()
