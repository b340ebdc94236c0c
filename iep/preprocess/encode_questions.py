"""Question files -> vocab.json and {split}_questions.h5 in the original toolkit's format.

A question file is read once into a `QuestionSet`, which numbers the distinct tokens in the order of their first use.
Counting tokens for a vocabulary and encoding with one are then array operations. `iep.vocab.tokenize` and
`iep.programs.json_to_prefix` define the tokens. Files that are already done are skipped, and each file is written whole
or not at all.

Shapes: N questions, T question tokens, L program tokens.
"""

import io
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from zlib import crc32

import h5py
import numpy as np

from iep.data.features import open_hdf5, read_attributes
from iep.data.question_file import CONTENT_DIGEST, split_files
from iep.data.question_file import read_questions as read_questions_file
from iep.errors import InputError
from iep.models.checkpoint import read_checkpoint
from iep.preprocess.clevr_files import image_number, read_questions
from iep.preprocess.recipe import FORMAT, Recipe, check_same, file_digest, is_current, write_recipe
from iep.programs import json_to_prefix
from iep.runtime.files import arrays_digest, write_bytes
from iep.vocab import SPECIAL_TOKENS, UNK, Vocab, answer_token, index_tokens, pad_tokens, tokenize

FAMILIES_OF_FILE, FILE_NUMBERS = 1_000, 2_000_000
"""The bounds of a family's index in a file of templates, and of the number of a file."""
CLEVR = "clevr"
"""The name of the vocabulary of CLEVR v1.0, which may be given in place of a file."""


class TokenRows:
    """Rows of tokens, which are appended: row i is the next `lengths[i]` of `ids`, each a position in `names`."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.ids, self.lengths = array("i"), array("i")

    def append(self, tokens: Sequence[str]) -> None:
        names = self.names
        self.ids.extend([names.setdefault(token, len(names)) for token in tokens])
        self.lengths.append(len(tokens))

    def frequent(self, threshold: int) -> list[str]:
        """Return the tokens that occur at least `threshold` times."""
        counts = np.bincount(self.ids, minlength=len(self.names))
        return [name for name, count in zip(self.names, counts, strict=True) if count >= threshold]


@dataclass(frozen=True)
class QuestionSet:
    """The content of a question file; parts that it does not have are missing.

    Attributes:
        source: the file, for messages.
        tokens: the rows of `question`, `program` and `answer`; a row of the last is one token.
        numbers: (N,) int32 `question_families`, `image_idxs` and `orig_idxs`.
    """

    source: str
    tokens: dict[str, TokenRows]
    numbers: dict[str, np.ndarray]

    def names(self, kind: str) -> Sequence[str]:
        """Return the distinct tokens of a kind."""
        return tuple(self.tokens[kind].names) if kind in self.tokens else ()


def load_questions(path: Path) -> QuestionSet:
    """Read a question file of CLEVR v1.0, of its public generator, or of CLEVR-Humans.

    `image_idxs` is `image_index` or else the number in `image_filename`, and `orig_idxs` is `question_index` or else
    the position in the file. Either all questions have a program, or none; the same holds for answers and families.

    Raises:
        InputError: the file cannot be read or is not a question file; or a question has no text, a value has a wrong
            type, or only some questions have a program, answer or family (names file, question and key).
    """
    tokens = {kind: TokenRows() for kind in ("question", "program", "answer")}
    image_idxs, orig_idxs, families = array("i"), array("i"), array("i")
    for position, question in enumerate(read_questions(path, show_progress=True)):
        try:
            tokens["question"].append(tokenize(question_text(question)))
            image_idxs.append(image_index(question))
            orig_idxs.append(question_index(question, position))
            if question.get("program") is not None:
                tokens["program"].append(json_to_prefix(question["program"]))
            if question.get("answer") is not None:
                tokens["answer"].append([answer_token(question["answer"])])
            if question.get("question_family_index") is not None:
                families.append(family_number(question))
        except InputError as error:
            raise InputError(f"{path}: question {position}: {error}") from None
    parts = {kind: rows.lengths for kind, rows in tokens.items()} | {"question_family_index": families}
    for key, part in parts.items():
        if len(part) not in (0, len(image_idxs)):
            raise InputError(f"{path}: {len(part)} of {len(image_idxs)} questions have {key!r}, expected all or none")
    numbers = {"question_families": families, "image_idxs": image_idxs, "orig_idxs": orig_idxs}
    return QuestionSet(
        source=str(path),
        tokens={kind: rows for kind, rows in tokens.items() if rows.lengths},
        numbers={name: np.array(values, dtype=np.int32) for name, values in numbers.items() if values},
    )


def question_text(question: dict) -> str:
    """Return the text of a question.

    Raises:
        InputError: the question has none.
    """
    text = question.get("question")
    if not isinstance(text, str):
        raise InputError(f"'question' is {text!r:.60}, expected a text; the keys are {', '.join(question)}")
    return text


def image_index(question: dict) -> int:
    """Return the index of a question's image: `image_index`, or the number in `image_filename`.

    Raises:
        InputError: the question has neither, or the index is negative or not an integer of 32 bits.
    """
    number = question.get("image_index", image_number(str(question.get("image_filename", ""))))
    if number is None:
        raise InputError("expected the key 'image_index', or 'image_filename' with a name like CLEVR_val_000000.png")
    return _integer(number, "image_index", minimum=0)


def question_index(question: dict, position: int) -> int:
    """Return `question_index`, or else the position of the question in its file.

    Raises:
        InputError: the index is not an integer of 32 bits.
    """
    return _integer(question.get("question_index", position), "question_index")


def family_number(question: dict) -> int:
    """Return the number of a question's family: `question_family_index`, which CLEVR v1.0 counts over all templates.

    The public question generator counts from 0 in each file of templates and adds `template_filename`. The number then
    ends in three digits of the index, after digits of the file's name, and is the same in all splits.

    Raises:
        InputError: the index is not an integer of 32 bits, or not below 1,000 in a file of templates.
    """
    number = _integer(question["question_family_index"], "question_family_index")
    if (file := question.get("template_filename")) is None:
        return number
    if not 0 <= number < FAMILIES_OF_FILE:
        raise InputError(f"'question_family_index' is {number}, expected 0 to {FAMILIES_OF_FILE - 1} in {file!r}")
    return crc32(str(file).encode()) % FILE_NUMBERS * FAMILIES_OF_FILE + number


def _integer(value: object, name: str, minimum: int = -(2**31)) -> int:
    if type(value) is not int or not minimum <= value < 2**31:
        what = "an integer of 32 bits" if minimum else "an integer of 32 bits from 0"
        raise InputError(f"{name!r} is {value!r:.60}, expected {what}")
    return value


def build_vocab(questions: QuestionSet, unk_threshold: int, also: Vocab | None = None) -> Vocab:
    """Return the vocabulary of a question set.

    It holds the question tokens that occur at least `unk_threshold` times, all program and answer tokens, and the
    tokens of the vocabulary `also`.
    """
    also = also or Vocab((), (), ())
    return Vocab(
        question=index_tokens((*questions.tokens["question"].frequent(unk_threshold), *also.question)),
        program=index_tokens((*questions.names("program"), *also.program)),
        answer=index_tokens((*questions.names("answer"), *also.answer)),
    )


def expand_vocab(vocab: Vocab, questions: QuestionSet, unk_threshold: int) -> Vocab:
    """Return `vocab` with new question tokens, sorted, after its own, which keep their indices.

    Only tokens that occur at least `unk_threshold` times in `questions` are added.
    """
    new = sorted(set(questions.tokens["question"].frequent(unk_threshold)) - set(vocab.question))
    return Vocab(vocab.question + tuple(new), vocab.program, vocab.answer)


def encode(questions: QuestionSet, vocab: Vocab, vocab_source: str, encode_unk: bool) -> dict[str, np.ndarray]:
    """Return the int32 arrays of a questions file by dataset name, without parts that the question set does not have.

    The rows of `questions` (N, T) and `programs` (N, L) begin with <START>, end with <END> and are padded with <NULL>;
    the other arrays are (N,). With `encode_unk`, question tokens that are not in `vocab` become <UNK>.

    Raises:
        InputError: a token is not in the vocabulary (names file, question, token and vocabulary).
    """
    arrays = {}
    for kind, rows in questions.tokens.items():
        table = {token: index for index, token in enumerate(getattr(vocab, kind)) if token not in SPECIAL_TOKENS}
        unknown = UNK if kind == "question" and encode_unk else -1
        indices = np.array([table.get(name, unknown) for name in rows.names], dtype=np.int32)[np.asarray(rows.ids)]
        if (missing := np.flatnonzero(indices < 0)).size:
            token = list(rows.names)[rows.ids[missing[0]]]
            number = np.searchsorted(np.cumsum(rows.lengths), missing[0], side="right")
            clevr = token in getattr(Vocab.clevr(), kind) and vocab_source != CLEVR
            hint = f"--vocab {CLEVR} has it" if clevr else "give a vocabulary that has it with --vocab FILE"
            hint += ", --encode-unk encodes such tokens as <UNK>" if kind == "question" else ""
            what = f"{kind} token {token!r} is not in the vocabulary {vocab_source}; {hint}"
            raise InputError(f"{questions.source}: question {number}: {what}")
        arrays[f"{kind}s"] = indices if kind == "answer" else pad_tokens(indices, np.asarray(rows.lengths))
    return arrays | questions.numbers


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
    earlier = _earlier_vocab(out, split, made_from)
    if earlier is not None:
        return earlier, str(out / "vocab.json"), made_from
    if given is not None:
        vocab = expand_vocab(known, load(split), options.unk_threshold)
        return vocab, f"{given} expanded by {files[split]}", made_from
    return build_vocab(load(split), options.unk_threshold, options.also), f"of {files[split]}", made_from


def _earlier_vocab(out: Path, split: str, made_from: str) -> Vocab | None:
    """Return the vocabulary that an earlier run made in the same way, without reading the questions again.

    None if there is none, or a file is damaged. The vocabulary is then made again, and compared with the file.
    """
    try:
        recorded, vocab = _recorded(split_files(out, split)[0]), Vocab.load(out / "vocab.json")
    except InputError:
        return None
    is_same = (recorded.get("vocab_from"), recorded.get("vocab_digest")) == (made_from, vocab.digest)
    return vocab if is_same else None


def _loaded(given: Path) -> Vocab:
    """Return the vocabulary that `QuestionOptions.vocab` names."""
    if str(given) == CLEVR:
        return Vocab.clevr()
    if given.suffix == ".json":
        return Vocab.load(given)
    return read_checkpoint(given).vocab


def _recorded(path: Path) -> dict[str, Any]:
    with open_hdf5(path) as file:
        return read_attributes(file)


def _write(path: Path, arrays: dict[str, np.ndarray], recipe: Recipe) -> None:
    # The file is made in memory, because HDF5 reports a full disk late and in unclear words.
    image = io.BytesIO()
    with h5py.File(image, "w", libver=FORMAT) as file:
        for name, values in arrays.items():
            file.create_dataset(name, data=values)
        write_recipe(file, {**recipe, CONTENT_DIGEST: arrays_digest(arrays)})
    write_bytes(path, image.getvalue())
