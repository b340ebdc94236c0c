"""What every command shares: errors and signals are one line and an exit code, never a traceback."""

import errno
import os
import select
import sys
from typing import Any, TextIO

import click

from iep.errors import InputError
from iep.runtime.allocator import keep_freed_memory
from iep.runtime.signals import Stopped, handled

FULL_DISK = {
    errno.ENOSPC: "no space left on the device",
    errno.EFBIG: "file size limit reached",
    errno.EDQUOT: "disk quota exceeded",
}


LOST_WORKER = "DataLoader worker (pid"
"""How torch begins its error, wherever the main process is, when the system has killed one that loads data."""


def describe_os_error(error: OSError) -> str:
    """One line for an operating system error: what happened, and to which file when that is known."""
    what = FULL_DISK.get(error.errno) or error.strerror or str(error)
    line = f"{error.filename}: {what}" if error.filename else what
    return " ".join(line.split())


class _Stoppable(click.Command):
    """A click command that ends on Ctrl-C or SIGTERM with a line and exit code 130 or 143."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        keep_freed_memory()
        if sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?" for what it lacks
        with handled():
            try:
                return super().main(*args, **kwargs)
            except Stopped as stop:
                if os.environ.get("RANK", "0") == "0":  # of torchrun's processes the first speaks
                    click.echo(stop, err=True)
                sys.exit(stop.exit_code)


class Group(_Stoppable, click.Group):
    """A group of commands."""


class Command(_Stoppable):
    """A click command that reports `InputError`, `OSError` and a loader's death as `Error: ...` with exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        """What the command returns.

        Raises:
            click.ClickException: instead of an `InputError`, an `OSError` or a loader's death, with the line to show.
        """
        try:
            return super().invoke(ctx)
        except InputError as error:
            if os.environ.get("RANK", "0") != "0":
                click.echo(err=True)  # the first process may have a progress bar on this line
            raise click.ClickException(" ".join(str(error).split())) from error
        except OSError as error:
            if isinstance(error, BrokenPipeError) and _is_unread(sys.stdout):
                raise  # click ends without a word, as other programs do in a pipe
            raise click.ClickException(describe_os_error(error)) from error
        except MemoryError as error:
            raise click.ClickException(f"not enough memory: {first_line(error) or 'for what was asked'}") from error
        except RuntimeError as error:
            if "allocate memory" in str(error) or "Storage size calculation overflowed" in str(error):
                raise click.ClickException(f"not enough memory: {first_line(error)}") from error
            if not str(error).startswith(LOST_WORKER):
                raise
            what = first_line(error).rstrip(".")
            raise click.ClickException(
                f"a process that loads data was lost, perhaps because memory ran out ({what}): lower workers, prefetch "
                "or the batch size; training goes on with --resume"
            ) from error


def _is_unread(stream: TextIO) -> bool:
    """Whether the stream is a pipe whose reader is gone."""
    try:
        descriptor = stream.fileno()
    except OSError:  # a stream in memory
        return False
    asked = select.poll()
    asked.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in asked.poll(0))


def first_line(error: Exception) -> str:
    """Of what it says."""
    return next(iter(str(error).strip().splitlines()), "").strip()
