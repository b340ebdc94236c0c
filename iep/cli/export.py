"""`iep-export`: write a CLEVR directory as training data of another tool."""

from pathlib import Path

import click

from iep.cli.command import Command
from iep.cli.options import DirectoryPath
from iep.preprocess.export_questions import FORMATS, PROMPTED, export


@click.command(cls=Command)
@click.argument("clevr_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    required=True,
    help="Columns and files as these read them: hf (datasets, plain columns), trl, easyr1, verl, swift (ms-swift) or "
    "llava.",
)
@click.option("--out", type=DirectoryPath(), required=True, help="Output directory, which must be new or empty.")
@click.option(
    "--split", "splits", multiple=True, help="Export this split; can be repeated.  [default: all with answers]"
)
@click.option(
    "--trace",
    is_flag=True,
    help="Add the column trace: what each function of the program returns, in words.",
)
@click.option(
    "--think",
    is_flag=True,
    help=f"Ask for <think> </think> and <answer> </answer> in the prompts of {', '.join(PROMPTED)}.",
)
def main(
    clevr_dir: Path,
    form: str,
    out: Path,
    splits: tuple[str, ...],
    trace: bool,
    think: bool,
) -> None:
    """Write the questions of CLEVR_DIR, a directory of CLEVR v1.0, with answers and images as training data.

    Formats hf, trl, easyr1 and verl are parquet files with the images inside (pip install 'iep[export]'); the others
    are JSON files beside the images, which are hard links where the file system allows them. The splits are those of
    CLEVR_DIR. Equal questions about one image are written once.
    """
    if think and form not in PROMPTED:
        raise click.UsageError(f"--think has no effect on {form}, whose prompts are the questions")
    export(clevr_dir, out, form, tuple(dict.fromkeys(splits)), trace, think, click.echo)


if __name__ == "__main__":
    main()
