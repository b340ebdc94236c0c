"""Question files -> vocab.json and {split}_questions.h5 in the original toolkit's format.

This module chooses the vocabulary, skips files that are already done, and writes each file whole or not at all.
`encode_questions.py` reads and encodes the questions.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from iep.data.hdf5 import open_hdf5, read_attributes
from iep.data.question_file import CONTENT_DIGEST, split_files
from iep.data.question_file import read_questions as read_questions_file
from iep.errors import InputError
from iep.models.checkpoint import load_checkpoint, vocab_of
from iep.preprocess.encode_questions import (
    CLEVR,
    QuestionSet,
    build_vocab,
    encode,
    expand_vocab,
    load_questions,
)
from iep.preprocess.recipe import FORMAT, Recipe, check_same, file_digest, is_current, write_recipe
from iep.runtime.files import arrays_digest, write_bytes
from iep.vocab import Vocab


@dataclass(frozen=True)
class QuestionOptions:
    """The options of encoding questions.

    Args:
        vocab: a vocab.json, or a checkpoint or run whose vocabulary to use, instead of building one; `clevr` is that of
            CLEVR v1.0.
        expand_vocab: add new question tokens to `vocab`.
        unk_threshold: a question token enters the vocabulary if it occurs at least this many times.
        encode_unk: encode question tokens that are not in the vocabulary as <UNK>; otherwise they are an error.
        also: tokens that a vocabulary that is built contains even if they do not occur.
    """

    vocab: Path | None = None
    expand_vocab: bool = False
    unk_threshold: int = 1
    encode_unk: bool = False
    also: Vocab | None = None


def preprocess_questions(
    files: dict[str, Path],
    out: Path,
    options: QuestionOptions,
    overwrite: bool,
    say: Callable[[str], None],
    verify: bool = False,
) -> None:
    """Encode the question files of some splits into `out`, after reading and checking all of them.

    The vocabulary is `options.vocab`, or is built from the questions of the first split whose name begins with `train`,
    or else is the `vocab.json` that an earlier run wrote to `out`.

    Args:
        files: split -> question file.
        out: the directory of `vocab.json` and `{split}_questions.h5`.
        overwrite: replace files made from other questions or with other options; otherwise they are errors.
        say: a function that is called with one line for each file.
        verify: read the files that are already done, and check that they are undamaged.

    Raises:
        InputError: the questions or the vocabulary are invalid, or a file in `out` was made differently or is damaged.
        OSError: a file cannot be written (names it).
    """
    load = cache(lambda split: load_questions(files[split]))
    digests = {split: file_digest(path) for split, path in files.items()}
    vocab, source, made_from = _vocabulary(files, digests, out, options, load)
    common: dict[str, str | int] = {"vocab_digest": vocab.digest, "encode_unk": int(options.encode_unk)}
    recipes = {split: {"questions_digest": digest, **common} for split, digest in digests.items()}

    def check(path: Path, recipe: Recipe) -> None:
        check_same(path, _recorded(path), recipe)
        if verify:
            read_questions_file(path, vocab)

    def check_vocab() -> None:
        check_same(vocab_path, {"tokens": Vocab.load(vocab_path).digest}, {"tokens": vocab.digest})

    vocab_path, targets = out / "vocab.json", {split: split_files(out, split)[0] for split in files}
    todo = [s for s, path in targets.items() if not is_current(path, partial(check, path, recipes[s]), overwrite)]
    vocab_is_done = is_current(vocab_path, check_vocab, overwrite)

    arrays = {split: encode(load(split), vocab, source, options.encode_unk) for split in todo}
    if not vocab_is_done:
        vocab.save(vocab_path)
    for split in todo:
        _write(targets[split], arrays[split], recipes[split] | {"vocab_from": made_from})
    sizes = f"{len(vocab.question)} question, {len(vocab.program)} program, {len(vocab.answer)} answer tokens"
    say(f"{vocab_path}: {'already done' if vocab_is_done else sizes}")
    for split, path in targets.items():
        say(f"{path}: {len(arrays[split]['questions'])} questions" if split in todo else f"{path}: already done")
    for path in sorted(out.glob("*_questions.h5")):
        if _recorded_if_sound(path).get("vocab_digest", vocab.digest) != vocab.digest:
            say(f"{path}: encoded with another vocabulary than the new vocab.json; preprocess that split again")


def _vocabulary(
    files: dict[str, Path],
    digests: dict[str, str],
    out: Path,
    options: QuestionOptions,
    load: Callable[[str], QuestionSet],
) -> tuple[Vocab, str, str]:
    """Return the vocabulary to encode with, the name of its source for messages, and its recipe for `vocab_from`."""
    train = next((split for split in files if split.startswith("train")), None)
    given = options.vocab or (None if train else out / "vocab.json")
    split = train or next(iter(files))
    made_from = f"questions {digests[split]} unk_threshold {options.unk_threshold}"
    if given is not None:
        if options.vocab is None and not given.exists():
            raise InputError(f"{given}: no such file, preprocess the train split first or give --vocab FILE")
        known = _loaded(given)
        if not options.expand_vocab:
            return known, str(given), f"vocabulary {known.digest}"
        made_from = f"vocabulary {known.digest} expanded by {made_from}"
    if (vocab := _made_before(out, split, made_from)) is not None:
        return vocab, str(out / "vocab.json"), made_from
    if given is not None:
        vocab = expand_vocab(known, load(split), options.unk_threshold)
        return vocab, f"{given} expanded by {files[split]}", made_from
    return build_vocab(load(split), options.unk_threshold, options.also), f"of {files[split]}", made_from


def _made_before(out: Path, split: str, made_from: str) -> Vocab | None:
    """Return the vocabulary in `out` if it was made by the recipe `made_from` and `split` was encoded with it."""
    found = _recorded_if_sound(split_files(out, split)[0])
    if found.get("vocab_from") != made_from:
        return None
    try:
        vocab = Vocab.load(out / "vocab.json")
    except InputError:
        return None  # the vocabulary is made again, and then compared with the file
    return vocab if found.get("vocab_digest") == vocab.digest else None


def _loaded(given: Path) -> Vocab:
    """Return the vocabulary that `QuestionOptions.vocab` names."""
    if str(given) == CLEVR:
        return Vocab.clevr()
    if given.suffix == ".json":
        return Vocab.load(given)
    return vocab_of(load_checkpoint(given), given)


def _recorded(path: Path) -> dict[str, Any]:
    with open_hdf5(path) as file:
        return read_attributes(file)


def _recorded_if_sound(path: Path) -> dict[str, Any]:
    try:
        return _recorded(path)
    except InputError:
        return {}


def _write(path: Path, arrays: dict[str, np.ndarray], recipe: Recipe) -> None:
    # The file is made in memory, because HDF5 reports a full disk late and in unclear words.
    image = io.BytesIO()
    with h5py.File(image, "w", libver=FORMAT) as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array)
        write_recipe(file, {**recipe, CONTENT_DIGEST: arrays_digest(arrays)})
    write_bytes(path, image.getvalue())
