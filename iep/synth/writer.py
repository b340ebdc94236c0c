"""Writes pictures and long JSON lists, whole or not at all; an error of the disk names the file."""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from iep.runtime.files import atomic_path, os_errors_name

PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"


@contextmanager
def list_file(path: Path, head: str) -> Iterator[Callable[[str], None]]:
    """A JSON file whose list's entries are added as text, written whole or not at all."""
    with atomic_path(path) as temporary, open(temporary, "w", encoding="ascii") as file:
        separator = ""

        def write(text: str) -> None:
            with os_errors_name(path):  # here, because another list's file may be open inside this one's block
                file.write(text)

        def add(text: str) -> None:
            nonlocal separator
            write(separator + text)
            separator = ", "

        write(head)
        yield add
        write("]}\n")


def write_png(path: Path, image_HW3: np.ndarray) -> None:
    """Write a picture, (height, width, 3) uint8, as PNG: whole or not at all."""
    content = io.BytesIO()
    Image.fromarray(image_HW3).save(content, "PNG", compress_level=1)
    # Not flushed to disk one by one, which would cost more than drawing them: a picture that a power cut left short
    # is found by its end, and made again.
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with os_errors_name(path):
            temporary.write_bytes(content.getvalue())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def is_whole_png(path: Path) -> bool:
    """Whether a picture stands there to its last byte."""
    try:
        with open(path, "rb") as file:
            file.seek(-len(PNG_END), io.SEEK_END)
            return file.read() == PNG_END
    except OSError:  # absent, or shorter than a PNG's end
        return False
