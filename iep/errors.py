"""The exception for invalid input, which the command line reports in one line, and hints at mistyped names."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """An error in the user's input. Its one line names the file, index or token, and what was expected."""


SIMILARITY = 0.75
"""The lowest similarity of a name to the suggested one. Typing errors have 0.78 or more."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint such as ``; did you mean 'batch_size'?`` for a mistyped name, or "" if no known name is similar."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=SIMILARITY)
    return f"; did you mean {matches[0]!r}?" if matches else ""
