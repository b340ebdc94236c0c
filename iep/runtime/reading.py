"""The one boundary for files that a user gives: every failure to read one becomes one line that names the file.

JSON and YAML are parsed here as well.
"""

import json
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import yaml

from iep.errors import InputError


@contextmanager
def reading(path: Path | str, what: str) -> Iterator[None]:
    """Report every failure of the block, which reads the file `path`, in one line that names the file.

    Args:
        path: the file.
        what: the expected kind of file with its article, such as "a checkpoint".

    Raises:
        InputError: the file is missing, cannot be read, or is not `what`. The file's name is added to an `InputError`
            of the block that does not begin with it.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise InputError(f"is a directory, expected {what}")
        yield
    except FileNotFoundError as error:
        missing = Path(error.filename or path)
        expected = f", expected {what}" if missing == path else ""
        raise InputError(f"{missing}: no such file{expected}") from None
    except InputError as error:
        text = str(error)
        raise (error if text.startswith(str(path)) else InputError(f"{path}: {text}")) from None
    except Exception as error:  # libraries raise all kinds of errors for damaged files
        reason = shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
        raise InputError(f"{path}: not {what} ({reason})") from None


def read_json(path: Path | str, what: str = "a JSON file") -> Any:
    """Return the JSON value in the file `path`.

    Raises:
        InputError: the file is missing, cannot be read, or is not JSON (names the line and column).
    """
    with reading(path, what):
        return json.loads(Path(path).read_bytes())


def read_yaml(path: Path | str, what: str = "a YAML file") -> Any:
    """Return the YAML value in the file `path`.

    Raises:
        InputError: the file is missing, cannot be read, is not YAML, or repeats a key.
    """
    with reading(path, what):
        return parse_yaml(Path(path).read_text(encoding="utf-8"))


def parse_yaml(text: str) -> Any:
    """Return the YAML value in `text`.

    Raises:
        InputError: the text is not YAML, or repeats a key.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except InputError:
        raise
    except Exception as error:  # PyYAML raises KeyError, ValueError and others for wrong tags and dates
        raise InputError(f"not YAML ({shorten(str(error), 300, placeholder=' ...')})") from None


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader, for which a repeated key is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise InputError(f"line {key.start_mark.line + 1}: the key {key.value!r} is repeated")
            seen.add(key.value)
        return super().construct_mapping(node, deep)
