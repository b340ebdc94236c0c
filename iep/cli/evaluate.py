"""`iep-eval`: evaluate checkpoints on a split, and write a table, predictions, answers and an HTML report."""

from collections.abc import Set
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from iep.cli.command import Command
from iep.cli.options import (
    PATH,
    DirectoryPath,
    decoding_options,
    device_settings,
    execution_options,
    modules_option,
    network_options,
)
from iep.config import PROGRAM_SOURCES, Config
from iep.evaluation.settings import SYMBOLIC, AnswerSettings, NetworkSettings, Selection, SymbolicSettings

SELECTION = {"data", "split", "families", "skip_samples", "num_samples"}
"""The options of the questions."""
OUTPUT = {"out", "report_dir", "images", "name", "others"}
"""The options of what is written and shown."""
GENERATOR = {"pg", "beam_size", "max_program_length", "batch_size", "workers", "device"}
ENGINE = {"ee", "modules", "programs", "batching", "sharing", "execution", "precision", "placement", "devices"}
READING = {"batch_size", "workers", "device", "features_in_memory"}


@click.command(cls=Command)
@network_options
@modules_option
@click.option("--data", type=PATH, help="Directory written by iep-preprocess.")
@click.option(
    "--answers",
    type=PATH,
    metavar="FILE",
    help="Score the answers of any model in place of networks: .jsonl, .json, .csv, .tsv, .xlsx, .parquet, or text "
    "with one answer per line. Rows have a question_index or are in the order of the questions, and their answers may "
    "be marked by <answer> or \\boxed.",
)
@click.option(
    "--questions", type=PATH, metavar="FILE", help="Question file in CLEVR's format for --answers, not --data."
)
@click.option(
    "--backbone",
    callback=lambda context, parameter, value: "default" if value == "synth" else value,
    metavar="synth|FILE",
    help="Backbone to evaluate alone, on --scenes, or to find the objects of --ee symbolic: the one that comes with "
    "this package, a .safetensors file, or a checkpoint or run directory of iep-train --model backbone.",
)
@click.option("--scenes", type=PATH, metavar="CLEVR_DIR", help="Directory in CLEVR's layout with images and scenes.")
@click.option("--split", help=f"Split to evaluate on.  [default: {Selection.split}]")
@click.option(
    "--programs",
    type=click.Choice(PROGRAM_SOURCES),
    help="Programs that the engine runs.  [default: predicted where --pg is given]",
)
@execution_options
@decoding_options
@click.option(
    "--batch-size", type=click.IntRange(min=1), help=f"Questions per batch.  [default: {NetworkSettings.batch_size}]"
)
@click.option("--skip-samples", type=click.IntRange(min=0), help="Skip the first N questions, after --families.")
@click.option(
    "--num-samples",
    type=click.IntRange(min=1),
    help="Evaluate on the first N of the remaining questions, or with --backbone on the first N images.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=0),
    help=f"Processes that read and plan batches; 0 for the main process.  [default: {Config.workers}]",
)
@click.option(
    "--out",
    type=DirectoryPath(),
    help="Directory for report.json, predictions.jsonl, answers.json, and answers.txt, which CLEVR's evaluation reads.",
)
@click.option(
    "--report",
    "report_dir",
    type=DirectoryPath(),
    metavar="DIR",
    help="Directory for report.html: accuracies and the worst questions on one page.",
)
@click.option(
    "--images",
    type=PATH,
    metavar="CLEVR_DIR",
    help="Directory in CLEVR's layout with the images of the split, which the report shows and --ee symbolic reads.",
)
@click.option("--name", default="model", show_default=True, help="Heading of the new evaluation's column.")
@click.option(
    "--against",
    "others",
    type=(str, PATH),
    multiple=True,
    metavar="NAME REPORT",
    help="Column for an earlier report.json (or its directory), or for a file as for --answers; may be given several "
    "times.",
)
def main(
    out: Path | None,
    name: str,
    others: tuple[tuple[str, Path], ...],
    report_dir: Path | None,
    scenes: Path | None,
    **options: Any,
) -> None:
    """Evaluate trained models: accuracy overall and by question type, exact match of programs, questions per second.

    With --answers, score the answers of any other model. With --ee symbolic, execute programs on the objects that a
    backbone finds in --images. With --backbone and --scenes, evaluate a backbone: precision and recall of the objects
    that it finds, and the accuracy of each attribute.
    """
    is_symbolic = options["ee"] == Path(SYMBOLIC)
    if scenes is not None or (options["backbone"] is not None and not is_symbolic):
        _evaluate_backbone(options["backbone"], scenes, options)
        return
    _check_options(options, is_symbolic)
    if report_dir is None and not (is_symbolic or options["images"] is None):
        raise click.UsageError("--images is for the HTML report and for --ee symbolic: give one of them too")
    # Imported late: `--help` should not wait for torch.
    from iep.evaluation.html_report import PAGE, ReportOptions
    from iep.evaluation.json_report import Report, format_table, is_report, read_report
    from iep.evaluation.outcome import OUTPUTS, REPORT
    from iep.evaluation.question_cards import Pictures
    from iep.evaluation.run_evaluation import evaluate
    from iep.runtime.distributed import is_main, joined
    from iep.runtime.locks import alone_in

    settings = _settings(options, is_symbolic)
    earlier: list[tuple[str, Any]] = [
        (label, read_report(path / REPORT if path.is_dir() else path))
        if path.is_dir() or is_report(path)
        else (label, evaluate(_answer_settings(options | {"answers": path})))
        for label, path in others
    ]
    page = None
    if report_dir is not None:
        images, split = options["images"], options["split"] or Selection.split
        page = ReportOptions(report_dir, name, tuple(earlier), None if images is None else Pictures(images, split))

    def show(report: Report) -> None:
        click.echo(format_table([*earlier, (name, report)]))
        if report.selection:
            click.echo(f"Of the {report.split} split: {report.selection}.")
        if report.accuracy is None and (options["ee"] or options["baseline"]):
            click.echo(f"The {report.split} split has no answers: accuracies are unknown.")
        if report.program_exact_match is None and options["pg"]:
            click.echo(f"The {report.split} split has no programs: their exact match is unknown.")

    with joined(), ExitStack() as held:
        if is_main():
            for directory in {path.resolve(): path for path in (out, report_dir) if path is not None}.values():
                held.enter_context(alone_in(directory))
        report = evaluate(settings, out, page, show)
    if report is None:  # of several processes only the first prints
        return
    if out is not None:
        click.echo(f"Wrote {', '.join(str(out / name) for name in OUTPUTS if (out / name).exists())}")
    if report_dir is not None:
        click.echo(f"Wrote {report_dir / PAGE}")


def _check_options(options: dict[str, Any], is_symbolic: bool) -> None:
    """Check that there are questions, and that no option is given that this kind of evaluation does not have.

    Raises:
        click.UsageError: an option is missing, or would have no effect.
    """
    if options["questions"] is not None and options["answers"] is None:
        raise click.UsageError("--questions is for --answers FILE")
    if options["answers"] is not None:
        _only("--answers", {"answers", "questions", *SELECTION, *OUTPUT})
        if options["questions"] is not None:
            _only("--questions", {"answers", "questions", "skip_samples", "num_samples", *OUTPUT})
    elif is_symbolic:
        used = {"ee", "programs", "backbone", *GENERATOR, *SELECTION, *OUTPUT}
        _only("--ee symbolic", used)
        if options["pg"] is None:
            _only("--ee symbolic without --pg", used - {"batch_size", "beam_size", "max_program_length"})
    elif options["baseline"] is not None:
        _only("--baseline", {"baseline", "precision", *READING, *SELECTION, *OUTPUT})
    elif options["ee"] is not None:
        used = {*ENGINE, *READING, *SELECTION, *OUTPUT}
        _only("--ee", used | GENERATOR)
        if options["pg"] is None:
            _only("--ee without --pg", used)
    elif options["pg"] is not None:
        _only("--pg without --ee", {*GENERATOR, *SELECTION, *OUTPUT})
    if options["data"] is None and options["questions"] is None:
        what = "--questions FILE with --answers, or --backbone and --scenes"
        raise click.UsageError(f"give --data DIR, a directory written by iep-preprocess, or {what}")


def _settings(options: dict[str, Any], is_symbolic: bool) -> AnswerSettings | SymbolicSettings | NetworkSettings:
    """Return the settings of the kind of evaluation that the options ask for.

    Raises:
        click.UsageError: `--ee symbolic` has no images.
        InputError: there is nothing to evaluate, or two options contradict each other.
    """
    if options["answers"] is not None:
        return _answer_settings(options)
    given = {key: value for key, value in (options | device_settings(options)).items() if value is not None}
    selection = Selection(**{key: value for key, value in given.items() if key in SELECTION})
    if is_symbolic:
        if options["images"] is None:
            raise click.UsageError("--ee symbolic needs images: give --images CLEVR_DIR")
        used = {"images", "backbone", "programs", *GENERATOR}
        return SymbolicSettings(selection, **{key: value for key, value in given.items() if key in used})
    used = {"baseline", *ENGINE, *GENERATOR, *READING}
    return NetworkSettings(selection, **{key: value for key, value in given.items() if key in used})


def _answer_settings(options: dict[str, Any]) -> AnswerSettings:
    """Return the settings of an evaluation of the file that `--answers` names."""
    given = {key: options[key] for key in SELECTION if options[key] is not None}
    if options["questions"] is None:
        return AnswerSettings(options["answers"], Selection(**given))
    return AnswerSettings(options["answers"], questions=options["questions"], **given)


def _only(flag: str, used: Set[str]) -> None:
    """Check that no options are given but those that are `used`.

    Raises:
        click.UsageError: another option is given.
    """
    context = click.get_current_context()
    for option in context.command.params:
        if context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE and option.name not in used:
            raise click.UsageError(f"{option.opts[0]} does not go with {flag}")


def _evaluate_backbone(backbone: str | None, scenes: Path | None, options: dict[str, Any]) -> None:
    """Print the scores of a backbone.

    Raises:
        click.UsageError: an option is missing, or does not apply to backbones.
        InputError: the scenes, the images or the backbone's weights cannot be read.
    """
    _only("--backbone" if scenes is None else "--scenes", {"backbone", "scenes", "split", "num_samples", "device"})
    if backbone is None or scenes is None:
        raise click.UsageError("--backbone and --scenes go together, or --backbone and --ee symbolic")
    from iep.evaluation.objects import evaluate_backbone
    from iep.preprocess.backbones import Scenes
    from iep.runtime.devices import resolve_device
    from iep.runtime.distributed import by_main, is_main, joined

    def scores() -> str:
        split, device = options["split"] or Selection.split, resolve_device(options["device"] or Config.device)
        return evaluate_backbone(Scenes(backbone), scenes, split, options["num_samples"], device)

    with joined():
        text = by_main(scores)
        if is_main():
            click.echo(text)


if __name__ == "__main__":
    main()
