"""The base of all commands: `--version`, and errors and signals as one line and an exit code, not a traceback."""

import errno
import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click
from tqdm import tqdm

import iep
from iep.errors import InputError
from iep.runtime.signals import Stopped, handled

FULL_DISK = {
    errno.ENOSPC: "no space left on the device",
    errno.EFBIG: "file size limit reached",
    errno.EDQUOT: "disk quota exceeded",
}


LOST_WORKER = "DataLoader worker (pid"
"""The beginning of the error that PyTorch raises when the system has killed a process that loads data."""


def describe_os_error(error: OSError) -> str:
    """Return one line about an operating system error, with the file if it is known."""
    what = FULL_DISK.get(error.errno or 0) or error.strerror or str(error)
    line = f"{error.filename}: {what}" if error.filename else what
    return " ".join(line.split())


class _Stoppable(click.Command):
    """A click command with `--version` that ends on Ctrl-C or SIGTERM with a line and exit code 130 or 143."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        click.version_option(iep.__version__, prog_name="iep")(self)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        os.environ["MPLBACKEND"] = "agg"  # pictures are only written to files, and other backends may be missing
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?" for other characters
        tqdm.get_lock()  # creates it before a signal can interrupt the first `tqdm.write`, which would fail without it
        with handled():
            try:
                return super().main(*args, **kwargs)
            except Stopped as stop:
                if os.environ.get("RANK", "0") == "0":  # only the first process of torchrun prints
                    click.echo(stop, err=True)
                sys.exit(stop.exit_code)


class CommandGroup(_Stoppable, click.Group):
    """A group of commands."""


class Command(_Stoppable):
    """A click command that reports errors that a user can cause as `Error: ...` with exit code 1.

    Args:
        sections: headings of `--help`, each with the names of the options below it; the others come last.
    """

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str]] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.sections = sections or {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of `--help` below their headings."""
        records = {
            each.name: each.get_help_record(ctx) for each in self.get_params(ctx) if isinstance(each, click.Option)
        }
        others = [name for name in records if not any(name in names for names in self.sections.values())]
        for heading, names in {**self.sections, "Options": others}.items():
            with formatter.section(heading):
                formatter.write_dl([record for name in names if (record := records[name]) is not None])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and return its result.

        Raises:
            click.ClickException: the input was invalid, a file operation failed, memory ran out, or a process that
                loads data was killed.
        """
        try:
            return super().invoke(ctx)
        except InputError as error:
            if os.environ.get("RANK", "0") != "0":
                click.echo(err=True)  # the first process may have a progress bar on this line
            raise click.ClickException(" ".join(str(error).split())) from error
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise  # click exits silently, as other programs do in a pipe
            raise click.ClickException(describe_os_error(error)) from error
        except (MemoryError, RuntimeError) as error:
            from iep.runtime.devices import is_out_of_memory  # imports torch, which is loaded by now

            if is_out_of_memory(error):
                raise click.ClickException(f"not enough memory: {first_line(error)}{_advice(ctx)}") from error
            if not str(error).startswith(LOST_WORKER):
                raise
            what = first_line(error).rstrip(".")
            raise click.ClickException(
                f"a process that loads data was lost, perhaps because memory ran out ({what}): lower workers, prefetch "
                "or the batch size; training resumes with --resume"
            ) from error


def _advice(ctx: click.Context) -> str:
    """Return advice to lower an option of the command when memory runs out, if there is such an option."""
    options = {parameter.name for parameter in ctx.command.params}
    return next((f"; lower --{name.replace('_', '-')}" for name in ("batch_size", "beam_size") if name in options), "")


def first_line(error: Exception) -> str:
    """Return the first line of the error's text."""
    return next(iter(str(error).strip().splitlines()), "for this").strip()
