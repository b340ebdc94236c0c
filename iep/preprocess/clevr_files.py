"""A CLEVR directory -> its splits, the paths of its images by index, and its questions and scenes as objects.

This covers CLEVR v1.0, directories of the same layout such as CLEVR-CoGenT, and the question files of CLEVR-Humans and
of CLOSURE. `encode_questions.py` encodes questions, and `images.py` decodes images.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from iep.errors import InputError
from iep.programs import CLOSURE_GROUPS
from iep.runtime.reading import reading

_ORDER = ("train", "val", "test")
_IMAGE_NUMBER = re.compile(r"_(\d+)\.png$")
_QUESTION_FILES = (
    ("questions", re.compile(r"^CLEVR_(?P<split>.+)_questions\.json$")),
    (".", re.compile(r"^CLEVR-Humans-(?P<split>.+)\.json$")),
    (".", re.compile(rf"^(?P<split>({'|'.join(CLOSURE_GROUPS)})_[a-z]+)\.json$")),
)
_SEPARATOR = re.compile(r"\s*(?:,\s*|(?=\]))")


def image_number(filename: str) -> int | None:
    """Return the image index in a file name such as `CLEVR_val_000012.png`, or None."""
    match = _IMAGE_NUMBER.search(filename)
    return int(match[1]) if match else None


def image_directories(clevr_dir: Path) -> dict[str, Path]:
    """Return the directory of each split's images, with the splits of train, val and test first."""
    root = clevr_dir / "images"
    return _in_order({path.name: path for path in root.iterdir() if path.is_dir()} if root.is_dir() else {})


def question_files(clevr_dir: Path) -> dict[str, Path]:
    """Return the question file of each split of CLEVR, CLEVR-Humans or CLOSURE; train, val and test are first."""
    found: dict[str, Path] = {}
    for folder, pattern in _QUESTION_FILES:
        directory = clevr_dir / folder
        for path in sorted(directory.iterdir()) if directory.is_dir() else ():
            match = pattern.match(path.name)
            if match:
                found.setdefault(match["split"], path)
    return _in_order(found)


def _in_order(by_split: dict[str, Path]) -> dict[str, Path]:
    """Return the splits ordered by their kind in `_ORDER`, with others last, and then by name."""
    return dict(sorted(by_split.items(), key=lambda item: ([not item[0].startswith(kind) for kind in _ORDER], item[0])))


def select_splits(
    found: dict[str, Path], splits: tuple[str, ...], clevr_dir: Path, what: str, hint: str = ""
) -> dict[str, Path]:
    """Return the files of the splits that the user named, or all that were found.

    Args:
        found: the files or directories of each split.
        what: their content for the message, to whose end `hint` is added.

    Raises:
        InputError: a split was not found, or none.
    """
    for split in splits or ([] if found else ["train"]):
        if split not in found:
            there = ", ".join(found) or "none"
            raise InputError(f"{clevr_dir}: no {what} of split {split!r} (found: {there}){hint}")
    return {split: found[split] for split in splits} if splits else found


def png_files(directory: Path) -> Iterator[Path]:
    """Return the PNG files of `directory` except hidden ones, which some systems leave beside the files they copy."""
    return (path for path in directory.glob("*.png") if not path.name.startswith("."))


def image_paths(directory: Path) -> list[Path]:
    """Return the PNG files of `directory`, with image i at position i.

    Raises:
        InputError: there are no images, a name has no number, two images share an index, or an index is missing.
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


def scenes_path(clevr_dir: Path, split: str) -> Path:
    """Return the path of a split's scenes file in a CLEVR directory."""
    return clevr_dir / "scenes" / f"CLEVR_{split}_scenes.json"


def read_questions(path: Path, show_progress: bool = False) -> Iterator[dict]:
    """Yield the objects in the list `questions` of a question file.

    The text is parsed one question at a time, because the 700,000 of CLEVR's train split would take several GB. With
    `show_progress`, a bar shows how much of it has been parsed.

    Raises:
        InputError: the file cannot be read, it has no list `questions` of objects, or the list is empty.
    """
    return _read_list(path, "a CLEVR question file", "question", "question", show_progress)


def read_scenes(path: Path) -> Iterator[dict]:
    """Yield the objects in the list `scenes` of a scenes file, parsed one at a time.

    Raises:
        InputError: the file cannot be read, it has no list `scenes` of objects, or the list is empty.
    """
    return _read_list(path, "a CLEVR scenes file", "scene", "objects")


def _read_list(path: Path, what: str, item: str, key: str, show_progress: bool = False) -> Iterator[dict]:
    bar = tqdm(desc=path.name, unit="B", unit_scale=True, delay=1, disable=not show_progress)
    with reading(path, what), bar:
        text = path.read_text(encoding="utf-8")
        bar.total = len(text)
        start = re.search(rf'"{item}s"\s*:\s*\[\s*', text)
        if start is None:
            raise InputError(f"not {what}, expected JSON with a list under the key '{item}s'")
        parse, position, count = json.JSONDecoder().raw_decode, start.end(), 0
        while not text.startswith("]", position):
            entry, position = parse(text, position)
            if not isinstance(entry, dict):
                raise InputError(f"{item} {count} is {entry!r:.60}, expected an object with {key!r}")
            separator = _SEPARATOR.match(text, position)
            if separator is None:
                raise json.JSONDecodeError("Expecting ',' delimiter", text, position)
            yield entry
            position, count = separator.end(), count + 1
            bar.update(position - bar.n)
        if not count:
            raise InputError(f"the list '{item}s' is empty")
