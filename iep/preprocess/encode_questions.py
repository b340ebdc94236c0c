"""Question objects -> tokens -> int32 arrays, and the vocabulary by which they are encoded.

A question file is read once into a `QuestionSet`. `iep.vocab.tokenize` and `iep.programs.json_to_prefix` define the
tokens, and `write_questions.py` writes the arrays.

Shapes: N questions, T question tokens, L program tokens.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from sys import intern

import numpy as np

from iep.errors import InputError
from iep.preprocess.clevr_files import image_number, read_questions
from iep.programs import json_to_prefix
from iep.vocab import END, NULL, SPECIAL_TOKENS, START, UNK, Vocab, index_tokens, tokenize

CLEVR = "clevr"
"""The name of the vocabulary of CLEVR v1.0, which may be given in place of a file."""

Rows = list[list[str]]
"""The tokens of each question."""


@dataclass(frozen=True)
class QuestionSet:
    """The content of a question file, with None for missing parts; each row of `answers` is one token."""

    source: str
    questions: Rows
    programs: Rows | None
    answers: Rows | None
    image_idxs: np.ndarray
    orig_idxs: np.ndarray
    question_families: np.ndarray | None


def load_questions(path: Path) -> QuestionSet:
    """Read a question file of CLEVR v1.0, of its public generator, or of CLEVR-Humans.

    `image_idxs` is `image_index` or else the number in `image_filename`, and `orig_idxs` is `question_index` or else
    the position in the file. Either all questions have a program, or none; the same holds for answers and families.

    Raises:
        InputError: the file cannot be read or is not a question file; or a question has no text, a value has a wrong
            type, or only some questions have a program, answer or family (names file, question and key).
    """
    questions, programs, answers = Rows(), Rows(), Rows()
    image_idxs, orig_idxs, families = array("i"), array("i"), array("i")
    present = None
    for position, question in enumerate(read_questions(path, show_progress=True)):
        try:
            questions.append(_interned(tokenize(question_text(question))))
            image_idxs.append(image_index(question))
            orig_idxs.append(question_index(question, position))
            present = _optional_parts(question, present)
            if "program" in present:
                programs.append(_interned(json_to_prefix(question["program"])))
            if "answer" in present:
                answers.append(_interned([answer_token(question["answer"])]))
            if "question_family_index" in present:
                families.append(_integer(question["question_family_index"], "'question_family_index'"))
        except InputError as error:
            raise InputError(f"{path}: question {position}: {error}") from None
    return QuestionSet(
        source=str(path),
        questions=questions,
        programs=programs or None,
        answers=answers or None,
        image_idxs=_int32(image_idxs),
        orig_idxs=_int32(orig_idxs),
        question_families=_int32(families) if families else None,
    )


def _interned(tokens: Sequence[str]) -> list[str]:
    """Return the tokens as the one object that equal texts share; millions of copies would take several GB."""
    return [intern(token) for token in tokens]


def question_text(question: dict) -> str:
    """Return the text of a question.

    Raises:
        InputError: the question has none.
    """
    text = question.get("question")
    if not isinstance(text, str):
        raise InputError(f"'question' is {text!r:.60}, expected a text; the keys are {', '.join(question)}")
    return text


def answer_token(answer: object) -> str:
    """Return an answer as CLEVR v1.0 has it: the public generator's true, false and 3 become yes, no and "3".

    Raises:
        InputError: the answer is not a string, a boolean or an integer.
    """
    if isinstance(answer, bool):
        return "yes" if answer else "no"
    if isinstance(answer, str | int):
        return str(answer)
    raise InputError(f"'answer' is {answer!r:.60}, expected a string, a boolean or an integer")


def _optional_parts(question: dict, before: list[str] | None) -> list[str]:
    """Return the optional keys that a question has, which must be those of the questions `before`, if any."""
    present = [key for key in ("program", "answer", "question_family_index") if question.get(key) not in (None, [])]
    if before is not None and present != before:
        key = min(set(present) ^ set(before))
        raise InputError(f"{key!r} is {'present' if key in present else 'missing'}, unlike in the questions before it")
    return present


def image_index(question: dict) -> int:
    """Return the index of a question's image: `image_index`, or the number in `image_filename`.

    Raises:
        InputError: the question has neither, or the index is not an integer of 32 bits.
    """
    if "image_index" in question:
        return _integer(question["image_index"], "'image_index'")
    number = image_number(str(question.get("image_filename", "")))
    if number is None:
        raise InputError("expected the key 'image_index', or 'image_filename' with a name like CLEVR_val_000000.png")
    return _integer(number, "the image index in 'image_filename'")


def question_index(question: dict, position: int) -> int:
    """Return `question_index`, or else the position of the question in its file.

    Raises:
        InputError: the index is not an integer of 32 bits.
    """
    return _integer(question.get("question_index", position), "'question_index'")


def _integer(value: object, name: str) -> int:
    if type(value) is not int or not -(2**31) <= value < 2**31:
        raise InputError(f"{name} is {value!r:.60}, expected an integer of 32 bits")
    return value


def _int32(numbers: array) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def build_vocab(questions: QuestionSet, unk_threshold: int, also: Vocab | None = None) -> Vocab:
    """Return the vocabulary of a question set.

    It holds the question tokens that occur at least `unk_threshold` times, all program and answer tokens, and the
    tokens of the vocabulary `also`.
    """
    also = also or Vocab((), (), ())
    return Vocab(
        question=index_tokens((*_frequent(questions.questions, unk_threshold), *also.question)),
        program=index_tokens(chain(also.program, *(questions.programs or ()))),
        answer=index_tokens(chain(also.answer, *(questions.answers or ()))),
    )


def expand_vocab(vocab: Vocab, questions: QuestionSet, unk_threshold: int) -> Vocab:
    """Return `vocab` with new question tokens, sorted, after its own, which keep their indices.

    Only tokens that occur at least `unk_threshold` times in `questions` are added.
    """
    new = sorted(set(_frequent(questions.questions, unk_threshold)) - set(vocab.question))
    return Vocab(vocab.question + tuple(new), vocab.program, vocab.answer)


def _frequent(rows: Rows, threshold: int) -> Iterable[str]:
    return [token for token, count in Counter(chain.from_iterable(rows)).items() if count >= threshold]


def encode(questions: QuestionSet, vocab: Vocab, vocab_source: str, encode_unk: bool) -> dict[str, np.ndarray]:
    """Return the int32 arrays of a questions file by dataset name, without parts that the question set does not have.

    The rows of `questions` (N, T) and `programs` (N, L) begin with <START>, end with <END> and are padded with <NULL>;
    the other arrays are (N,). With `encode_unk`, question tokens that are not in `vocab` become <UNK>.

    Raises:
        InputError: a token is not in the vocabulary (names file, question, token and vocabulary).
    """

    def indices(rows: Rows, kind: str) -> list[list[int]]:
        """Return the indices of each row's tokens in the vocabulary's part `kind`, without padding."""
        table = {token: index for index, token in enumerate(getattr(vocab, kind)) if token not in SPECIAL_TOKENS}
        if kind == "question" and encode_unk:
            table = defaultdict(lambda: UNK, table)
        found = []
        for number, row in enumerate(rows):
            try:
                found.append([table[token] for token in row])
            except KeyError as error:
                (token,) = error.args
                clevr = token in getattr(Vocab.clevr(), kind) and vocab_source != CLEVR
                hint = f"--vocab {CLEVR} has it" if clevr else "give a vocabulary that has it with --vocab FILE"
                hint += ", --encode-unk encodes such tokens as <UNK>" if kind == "question" else ""
                what = f"{kind} token {token!r} is not in the vocabulary {vocab_source}; {hint}"
                raise InputError(f"{questions.source}: question {number}: {what}") from None
        return found

    arrays = {"questions": _padded(indices(questions.questions, "question"))}
    if questions.programs is not None:
        arrays["programs"] = _padded(indices(questions.programs, "program"))
    if questions.answers is not None:
        arrays["answers"] = np.array(indices(questions.answers, "answer"), dtype=np.int32)[:, 0]
    if questions.question_families is not None:
        arrays["question_families"] = questions.question_families
    return arrays | {"image_idxs": questions.image_idxs, "orig_idxs": questions.orig_idxs}


def _padded(rows: list[list[int]]) -> np.ndarray:
    """Return (N, longest row + 2) indices: <START>, the row, <END>, then <NULL>."""
    lengths_N = np.array([len(row) for row in rows])
    columns = np.arange(lengths_N.max() + 2)
    padded = np.full((len(rows), len(columns)), NULL, dtype=np.int32)
    padded[:, 0] = START
    # A boolean mask is filled row by row.
    padded[(columns > 0) & (columns <= lengths_N[:, None])] = list(chain.from_iterable(rows))
    padded[np.arange(len(rows)), lengths_N + 1] = END
    return padded
