"""Where a CLEVR directory keeps its images and questions: directory -> splits, image paths by index, question objects.

Covers CLEVR v1.0 (and directories of the same layout, such as CLEVR-CoGenT) and CLEVR-Humans' question files. What
the questions mean is `encode_questions.py`; decoding images, `images.py`.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from iep.errors import InputError
from iep.runtime.files import not_json, read_json_text

_ORDER = ("train", "val", "test")
_IMAGE_NUMBER = re.compile(r"_(\d+)\.png$")
_QUESTION_FILES = (
    ("questions", re.compile(r"^CLEVR_(?P<split>.+)_questions\.json$")),
    (".", re.compile(r"^CLEVR-Humans-(?P<split>.+)\.json$")),
)
_SPACE = re.compile(r"[ \t\n\r]*")


def image_number(filename: str) -> int | None:
    """The image index in a file name such as `CLEVR_val_000012.png`, or None."""
    match = _IMAGE_NUMBER.search(filename)
    return int(match[1]) if match else None


def image_directories(clevr_dir: Path) -> dict[str, Path]:
    """Split -> directory of its images; those of train, val and test first. Empty when `clevr_dir` has no `images`."""
    root = clevr_dir / "images"
    return _in_order({path.name: path for path in root.iterdir() if path.is_dir()} if root.is_dir() else {})


def question_files(clevr_dir: Path) -> dict[str, Path]:
    """Split -> question file, of CLEVR or CLEVR-Humans; those of train, val and test first."""
    found = {}
    for folder, pattern in _QUESTION_FILES:
        directory = clevr_dir / folder
        for path in sorted(directory.iterdir()) if directory.is_dir() else ():
            match = pattern.match(path.name)
            if match:
                found.setdefault(match["split"], path)
    return _in_order(found)


def _in_order(by_split: dict[str, Path]) -> dict[str, Path]:
    def place(split: str) -> tuple[int, str]:
        return next((i for i, kind in enumerate(_ORDER) if split.startswith(kind)), len(_ORDER)), split

    return {split: by_split[split] for split in sorted(by_split, key=place)}


def count_images(directory: Path) -> int:
    """How many PNG files `directory` holds, whatever their names."""
    return sum(1 for _ in png_files(directory))


def png_files(directory: Path) -> Iterator[Path]:
    """The PNG files of `directory`, but for hidden ones: some systems leave them beside what they copy."""
    return (path for path in directory.glob("*.png") if not path.name.startswith("."))


def image_paths(directory: Path) -> list[Path]:
    """The PNG files of `directory`, the one with image index i at position i.

    Raises:
        InputError: there is none, one has no number in its name, two share an index, or an index is missing.
    """
    by_index: dict[int, Path] = {}
    for path in sorted(png_files(directory)):
        index = image_number(path.name)
        if index is None:
            raise InputError(f"{path}: no image index in the name, expected a name like CLEVR_train_000000.png")
        if index in by_index:
            raise InputError(f"{path}: image index {index} is also that of {by_index[index].name}")
        by_index[index] = path
    if not by_index:
        raise InputError(f"{directory}: no images, expected files like CLEVR_train_000000.png")
    missing = next((index for index in range(len(by_index)) if index not in by_index), None)
    if missing is not None:
        raise InputError(f"{directory}: image index {missing} is missing, while {max(by_index)} is there")
    return [by_index[index] for index in range(len(by_index))]


def read_questions(path: Path) -> Iterator[dict]:
    """The objects in the list `questions` of a question file, one after the other.

    The text is decoded question by question: the 700,000 of CLEVR's train split at once would take several GB.

    Raises:
        InputError: the file is missing, not JSON, or has no list `questions` of objects.
    """
    text = read_json_text(path)
    try:
        position = _enter_questions(text, path)
        count = 0
        while not text.startswith("]", position):
            if count:
                position = _expect(text, position, ",")
            question, position = _value(text, position)
            if not isinstance(question, dict):
                raise InputError(f"{path}: question {count} is {question!r:.60}, expected an object with 'question'")
            yield question
            count += 1
    except json.JSONDecodeError as error:
        raise not_json(path, error) from None
    if not count:
        raise InputError(f"{path}: the list 'questions' is empty")


def _enter_questions(text: str, path: Path) -> int:
    """The position of the first question (or of the `]` of an empty list) in a question file's text."""
    start = _skip(text, 0)
    if not text.startswith("{", start):
        _value(text, start)  # says so when it is not JSON at all
        raise InputError(f"{path}: not a CLEVR question file, expected an object with a list 'questions'")
    position = _skip(text, start + 1)
    keys: list[str] = []
    while not text.startswith("}", position):
        if keys:
            position = _expect(text, position, ",")
        key, position = _value(text, position)
        position = _expect(text, position, ":")
        if key == "questions" and text.startswith("[", position):
            return _skip(text, position + 1)
        keys.append(str(key))
        _, position = _value(text, position)
    found = ", ".join(keys[:5]) or "nothing"
    raise InputError(f"{path}: not a CLEVR question file, expected the key 'questions' with a list, found {found}")


_DECODER = json.JSONDecoder()


def _value(text: str, position: int) -> tuple[object, int]:
    value, end = _DECODER.raw_decode(text, position)
    return value, _skip(text, end)


def _expect(text: str, position: int, mark: str) -> int:
    if not text.startswith(mark, position):
        raise json.JSONDecodeError(f"Expecting {mark!r}", text, position)
    return _skip(text, position + 1)


def _skip(text: str, position: int) -> int:
    return _SPACE.match(text, position).end()
