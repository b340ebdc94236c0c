"""Question objects -> token ids -> int32 arrays, and the vocabulary by which they are encoded.

A question file is read once into a `QuestionSet`, which numbers the distinct tokens in the order of their first use.
Counting tokens for a vocabulary and encoding with one are then array operations. Writing the arrays is
`write_questions.py`; the token rules are `iep.vocab.tokenize` and `iep.programs.json_to_prefix`.

Shapes: N questions, T question tokens, L program tokens.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from iep.errors import InputError
from iep.preprocess.clevr_files import image_number, read_questions
from iep.programs import json_to_prefix
from iep.vocab import END, NULL, SPECIAL_TOKENS, START, UNK, Vocab, index_tokens, tokenize

CLEVR = "clevr"
"""The name, in place of a file, of the vocabulary of CLEVR v1.0."""


@dataclass(frozen=True)
class TokenRows:
    """N rows of tokens: row i is the next `lengths[i]` of `ids`, each a position in `names`."""

    names: tuple[str, ...]
    ids: np.ndarray
    lengths: np.ndarray

    def counts(self) -> np.ndarray:
        """How often each name occurs."""
        return np.bincount(self.ids, minlength=len(self.names))


@dataclass(frozen=True)
class QuestionSet:
    """The content of a question file; parts that it does not have are None. Each row of `answers` is one token."""

    source: str
    questions: TokenRows
    programs: TokenRows | None
    answers: TokenRows | None
    image_idxs: np.ndarray
    orig_idxs: np.ndarray
    question_families: np.ndarray | None


class _Rows:
    """Collects the rows of a `TokenRows`."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}
        self.ids = array("i")
        self.lengths = array("i")

    def append(self, tokens: Sequence[str]) -> None:
        index = self.index
        self.ids.extend([index.setdefault(token, len(index)) for token in tokens])
        self.lengths.append(len(tokens))

    def done(self) -> TokenRows:
        return TokenRows(tuple(self.index), _int32(self.ids), _int32(self.lengths))


def load_questions(path: Path) -> QuestionSet:
    """Read a question file of CLEVR v1.0, of its public generator, or of CLEVR-Humans.

    `image_idxs` comes from `image_index` or else from the number in `image_filename`, `orig_idxs` from `question_index`
    or else the position. Either all questions have a program, or none; likewise for answers and question families.

    Raises:
        InputError: as `clevr_files.read_questions`; a question has no text, or a value of the wrong type; or only some
            questions have a program, answer or family (names file, question and key).
    """
    questions, programs, answers = _Rows(), _Rows(), _Rows()
    image_idxs, orig_idxs, families = array("i"), array("i"), array("i")
    present = None
    for position, question in enumerate(read_questions(path)):
        try:
            text = question.get("question")
            if not isinstance(text, str):
                raise InputError(f"'question' is {text!r:.60}, expected a text; the keys are {', '.join(question)}")
            questions.append(tokenize(text))
            image_idxs.append(_image_index(question))
            orig_idxs.append(_integer(question.get("question_index", position), "'question_index'"))
            present = _optional_parts(question, present)
            if "program" in present:
                programs.append(json_to_prefix(question["program"]))
            if "answer" in present:
                answers.append([answer_token(question["answer"])])
            if "question_family_index" in present:
                families.append(_integer(question["question_family_index"], "'question_family_index'"))
        except InputError as error:
            raise InputError(f"{path}: question {position}: {error}") from None
    return QuestionSet(
        source=str(path),
        questions=questions.done(),
        programs=programs.done() if programs.lengths else None,
        answers=answers.done() if answers.lengths else None,
        image_idxs=_int32(image_idxs),
        orig_idxs=_int32(orig_idxs),
        question_families=_int32(families) if families else None,
    )


def answer_token(answer: object) -> str:
    """Return an answer as the release has it: the generator's true, false and 3 become yes, no and "3".

    Raises:
        InputError: the answer is not a string, a boolean or an integer.
    """
    if isinstance(answer, bool):
        return "yes" if answer else "no"
    if isinstance(answer, str | int):
        return str(answer)
    raise InputError(f"'answer' is {answer!r:.60}, expected a string, a boolean or an integer")


def _optional_parts(question: dict, before: list[str] | None) -> list[str]:
    """Return the optional keys of a question; `before` are those of the first question, None at the first."""
    present = [key for key in ("program", "answer", "question_family_index") if question.get(key) not in (None, [])]
    if before is not None and present != before:
        key = min(set(present) ^ set(before))
        raise InputError(f"{key!r} is {'there' if key in present else 'missing'}, unlike in the questions before it")
    return present


def _image_index(question: dict) -> int:
    if "image_index" in question:
        return _integer(question["image_index"], "'image_index'")
    number = image_number(str(question.get("image_filename", "")))
    if number is None:
        raise InputError("expected the key 'image_index', or 'image_filename' with a name like CLEVR_val_000000.png")
    return _integer(number, "the image index in 'image_filename'")


def _integer(value: object, name: str) -> int:
    if type(value) is not int or not -(2**31) <= value < 2**31:
        raise InputError(f"{name} is {value!r:.60}, expected an integer of 32 bits")
    return value


def _int32(numbers: array) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def build_vocab(questions: QuestionSet, unk_threshold: int, also: Vocab | None = None) -> Vocab:
    """Return the vocabulary of a question set: its question tokens that occur at least `unk_threshold` times, all its
    program and answer tokens, and the tokens of the vocabulary `also`."""
    also = also or Vocab((), (), ())
    programs, answers = (part.names if part else () for part in (questions.programs, questions.answers))
    return Vocab(
        question=index_tokens((*_frequent(questions.questions, unk_threshold), *also.question)),
        program=index_tokens((*programs, *also.program)),
        answer=index_tokens((*answers, *also.answer)),
    )


def expand_vocab(vocab: Vocab, questions: QuestionSet, unk_threshold: int) -> Vocab:
    """Return `vocab` with new question tokens, sorted, after its own, whose indices stay.

    Only tokens that occur at least `unk_threshold` times in `questions` are added.
    """
    new = sorted(set(_frequent(questions.questions, unk_threshold)) - set(vocab.question))
    return Vocab(vocab.question + tuple(new), vocab.program, vocab.answer)


def _frequent(rows: TokenRows, threshold: int) -> Iterable[str]:
    return [name for name, count in zip(rows.names, rows.counts(), strict=True) if count >= threshold]


def encode(questions: QuestionSet, vocab: Vocab, vocab_source: str, encode_unk: bool) -> dict[str, np.ndarray]:
    """Return the int32 arrays of a questions file by dataset name, without the parts that the question set lacks.

    `questions` (N, T) and `programs` (N, L) begin with <START>, end with <END> and are padded with <NULL>; the others
    are (N,). With `encode_unk`, question tokens that are not in `vocab` become <UNK>.

    Raises:
        InputError: a token is not in the vocabulary (names file, question, token and vocabulary).
    """
    sources = (questions.source, vocab_source)
    otherwise = UNK if encode_unk else _UNKNOWN
    arrays = {"questions": _wrapped(questions.questions, vocab.question_index, "question", sources, otherwise)}
    if questions.programs is not None:
        arrays["programs"] = _wrapped(questions.programs, vocab.program_index, "program", sources)
    if questions.answers is not None:
        arrays["answers"] = _indices(questions.answers, vocab.answer_index, "answer", sources)
    if questions.question_families is not None:
        arrays["question_families"] = questions.question_families
    return arrays | {"image_idxs": questions.image_idxs, "orig_idxs": questions.orig_idxs}


_UNKNOWN = -1


def _indices(
    rows: TokenRows, index: dict[str, int], kind: str, sources: tuple[str, str], otherwise: int = _UNKNOWN
) -> np.ndarray:
    """Return the vocabulary's indices of all of `rows.ids`; `otherwise` for tokens that are not in it."""
    source, vocab_source = sources
    known = {token: position for token, position in index.items() if token not in SPECIAL_TOKENS}
    table = np.array([known.get(name, otherwise) for name in rows.names], dtype=np.int32)
    indices = table[rows.ids]
    unknown = np.flatnonzero(indices < 0)
    if unknown.size:
        token = rows.names[rows.ids[unknown[0]]]
        position = np.searchsorted(np.cumsum(rows.lengths), unknown[0], side="right")
        clevr = token in getattr(Vocab.clevr(), kind) and vocab_source != CLEVR
        hint = f"--vocab {CLEVR} has it" if clevr else "give a vocabulary that has it with --vocab FILE"
        hint += ", --encode-unk encodes such tokens as <UNK>" if kind == "question" else ""
        raise InputError(
            f"{source}: question {position}: {kind} token {token!r} is not in the vocabulary {vocab_source}; {hint}"
        )
    return indices


def _wrapped(
    rows: TokenRows, index: dict[str, int], kind: str, sources: tuple[str, str], otherwise: int = _UNKNOWN
) -> np.ndarray:
    """Return (N, longest row + 2) indices: <START>, the row, <END>, then <NULL>."""
    columns = np.arange(rows.lengths.max() + 2)
    padded = np.full((len(rows.lengths), len(columns)), NULL, dtype=np.int32)
    padded[:, 0] = START
    # A boolean mask is filled row by row, which is the order of the ids.
    padded[(columns > 0) & (columns <= rows.lengths[:, None])] = _indices(rows, index, kind, sources, otherwise)
    padded[np.arange(len(padded)), rows.lengths + 1] = END
    return padded


def check_images(questions: QuestionSet, num_images: int) -> None:
    """Raise InputError if a question is about an image beyond the `num_images` that there are."""
    outside = np.flatnonzero((questions.image_idxs < 0) | (questions.image_idxs >= num_images))
    if outside.size:
        position = outside[0]
        raise InputError(
            f"{questions.source}: question {position} is about image {questions.image_idxs[position]}, "
            f"but there are {num_images} images (0 to {num_images - 1})"
        )
