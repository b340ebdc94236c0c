"""Question files -> vocab.json and {split}_questions.h5 in the original toolkit's format.

Decides what is already done, which vocabulary is used, and writes each file whole or not at all. Reading and encoding
questions is `encode_questions.py`.
"""

import io
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from iep.data.hdf5 import read_attributes
from iep.data.question_file import CONTENT_DIGEST
from iep.data.question_file import read_questions as read_questions_file
from iep.errors import InputError
from iep.preprocess.encode_questions import QuestionSet, build_vocab, check_images, encode, expand_vocab, load_questions
from iep.preprocess.recipe import FORMAT, Recipe, file_digest, is_current, is_sound, opened, write_recipe
from iep.runtime.files import arrays_digest, atomic_path, os_errors_name
from iep.vocab import Vocab


@dataclass(frozen=True)
class QuestionOptions:
    """How questions are encoded.

    Args:
        vocab: a vocab.json to use as it is, instead of building one.
        expand_vocab: add the question tokens that `vocab` lacks.
        unk_threshold: a question token enters the vocabulary when it occurs at least this many times.
        encode_unk: encode question tokens outside the vocabulary as <UNK> rather than refuse them.
    """

    vocab: Path | None = None
    expand_vocab: bool = False
    unk_threshold: int = 1
    encode_unk: bool = False


def preprocess_questions(
    files: dict[str, Path],
    out: Path,
    options: QuestionOptions,
    num_images: Mapping[str, int],
    overwrite: bool,
    say: Callable[[str], None],
    verify: bool = False,
) -> None:
    """Encode the question files of some splits into `out`. Everything is read and checked before anything is written.

    The vocabulary is `options.vocab`, or made from the questions of the first split whose name begins with `train`,
    or else the `vocab.json` that an earlier run left in `out`.

    Args:
        files: split -> question file.
        out: the directory of `vocab.json` and `{split}_questions.h5`.
        num_images: split -> how many images there are; a split without images is checked against its features file.
        overwrite: replace files made from other questions or with other options, instead of refusing.
        say: gets one line for each file.
        verify: read what is done already, and see that it is undamaged.

    Raises:
        InputError: bad questions or vocabulary, or a file in `out` was made otherwise or is damaged.
        OSError: a file cannot be written (names it).
    """
    load = cache(lambda split: load_questions(files[split]))
    digests = {split: file_digest(path) for split, path in files.items()}
    vocab, source, made_from = _vocabulary(files, digests, out, options, load)
    common = {"vocab_digest": vocab.digest, "encode_unk": int(options.encode_unk)}
    recipes = {split: {"questions_digest": digest, **common} for split, digest in digests.items()}
    todo = [split for split in files if not _is_done(_target(out, split), recipes[split], overwrite, vocab, verify)]
    vocab_is_done = _vocab_is_done(out / "vocab.json", vocab, overwrite)

    arrays = {}
    for split in todo:
        count = num_images.get(split) or _num_features(out / f"{split}_features.h5")
        if count is not None:
            check_images(load(split), count)
        arrays[split] = encode(load(split), vocab, source, options.encode_unk)

    made = {}
    with ExitStack() as stack:  # all are written beside their targets before any takes its name
        if not vocab_is_done:
            vocab.save(_temporary(stack, out / "vocab.json"))
            sizes = f"{len(vocab.question)} question, {len(vocab.program)} program, {len(vocab.answer)} answer tokens"
            made["vocab.json"] = sizes
        for split in todo:
            path = _target(out, split)
            _write(_temporary(stack, path), arrays[split], recipes[split] | {"vocab_from": made_from})
            made[path.name] = f"{len(arrays[split]['questions'])} questions"
    for name in ("vocab.json", *(_target(out, split).name for split in files)):
        say(f"{out / name}: {made.get(name, 'already done')}")
    for path in _encoded_otherwise(out, common["vocab_digest"]):
        say(f"{path}: encoded with another vocabulary than the new vocab.json, preprocess that split again")


def _target(out: Path, split: str) -> Path:
    return out / f"{split}_questions.h5"


def _vocabulary(
    files: dict[str, Path],
    digests: dict[str, str],
    out: Path,
    options: QuestionOptions,
    load: Callable[[str], QuestionSet],
) -> tuple[Vocab, str, str]:
    """The vocabulary to encode with, the name of its source for errors, and how it is made, for `vocab_from`."""
    train = next((split for split in files if split.startswith("train")), None)
    given = options.vocab or (None if train else out / "vocab.json")
    if given is not None and not options.expand_vocab:
        if options.vocab is None and not given.exists():
            raise InputError(f"{given}: no such file, preprocess the train split first or give --vocab FILE")
        return Vocab.load(given), str(given), f"file {file_digest(given)}"
    split = train or next(iter(files))
    made_from = f"questions {digests[split]} unk_threshold {options.unk_threshold}"
    if given is not None:
        made_from = f"file {file_digest(given)} expanded by {made_from}"
    if (vocab := _made_before(out, split, made_from)) is not None:
        return vocab, str(out / "vocab.json"), made_from
    if given is not None:
        vocab = expand_vocab(Vocab.load(given), load(split), options.unk_threshold)
        return vocab, f"{given} expanded by {files[split]}", made_from
    return build_vocab(load(split), options.unk_threshold), f"of {files[split]}", made_from


def _made_before(out: Path, split: str, made_from: str) -> Vocab | None:
    """The vocabulary in `out`, when `split` was encoded with it and it was made as `made_from` says."""
    found = _recorded_if_sound(_target(out, split))
    if found.get("vocab_from") != made_from:
        return None
    try:
        vocab = Vocab.load(out / "vocab.json")
    except InputError:
        return None  # then it is made again, and `_vocab_is_done` decides about the file
    return vocab if found.get("vocab_digest") == vocab.digest else None


def _vocab_is_done(path: Path, vocab: Vocab, overwrite: bool) -> bool:
    wanted = {"tokens": vocab.digest}
    return is_current(path, lambda: {"tokens": Vocab.load(path).digest}, wanted, overwrite)


def _is_done(path: Path, recipe: Recipe, overwrite: bool, vocab: Vocab, verify: bool) -> bool:
    if not is_current(path, lambda: _recorded(path), recipe, overwrite):
        return False
    return not verify or is_sound(lambda: read_questions_file(path, vocab), overwrite)


def _recorded(path: Path) -> dict[str, Any]:
    with opened(path) as file:
        return read_attributes(file)


def _num_features(path: Path) -> int | None:
    """How many images the features file has, or None when there is no such file or it holds no features."""
    if not path.exists():
        return None
    with opened(path) as file:
        return len(file["features"]) if "features" in file else None


def _encoded_otherwise(out: Path, vocab_digest: str) -> list[Path]:
    """The question files in `out` that were encoded with another vocabulary."""
    paths = sorted(out.glob("*_questions.h5"))
    return [path for path in paths if _recorded_if_sound(path).get("vocab_digest", vocab_digest) != vocab_digest]


def _recorded_if_sound(path: Path) -> dict[str, Any]:
    try:
        return _recorded(path)
    except InputError:
        return {}


def _write(path: Path, arrays: dict[str, np.ndarray], recipe: Recipe) -> None:
    # Laid out in memory, because HDF5 reports a full disk late and without saying so plainly.
    image = io.BytesIO()
    with h5py.File(image, "w", libver=FORMAT) as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array)
        write_recipe(file, {**recipe, CONTENT_DIGEST: arrays_digest(arrays)})
    path.write_bytes(image.getbuffer())


def _temporary(stack: ExitStack, target: Path) -> Path:
    """A temporary file beside `target` that becomes it when `stack` closes without an error."""
    stack.enter_context(os_errors_name(target))
    return stack.enter_context(atomic_path(target))
