"""The one exception for what a user gave: the command line turns it into a line and an exit code."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Bad input. The message is one line that names the file, index or token and what was expected."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'batch_size'?`` for a mistyped name, or nothing."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
