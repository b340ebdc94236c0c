"""The one exception for what a user gave: the command line turns it into a line and an exit code."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Bad input. The message is one line that names the file, index or token and what was expected."""


SIMILARITY = 0.75
"""The least similarity of a name to the one that is suggested for it: typing errors have 0.78 and more."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint such as ``; did you mean 'batch_size'?`` for a mistyped name; nothing if no known name is near."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=SIMILARITY)
    return f"; did you mean {matches[0]!r}?" if matches else ""
