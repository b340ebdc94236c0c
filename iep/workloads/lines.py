"""Files of text -> their lines."""

from pathlib import Path

from iep.errors import InputError


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file, without their ends; a line ends with a line feed, and nothing else ends one.

    Raises:
        InputError: the file is missing, a directory or not UTF-8.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: a directory, expected a file of text") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text at byte {error.start}") from None
    return text.removesuffix("\n").split("\n") if text else []
