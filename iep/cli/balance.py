"""`python -m iep.cli.balance`: print the accuracy of blind guessing on CLEVR questions files."""

from pathlib import Path

import click

from iep.cli.command import Command
from iep.synth.tally import table, tally_file


@click.command(cls=Command)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
def main(files: tuple[Path, ...]) -> None:
    """Print the share of the most common answer to each question type in CLEVR questions FILES."""
    for path in files:
        click.echo(f"{path}\n{table(tally_file(path))}")


if __name__ == "__main__":
    main()
