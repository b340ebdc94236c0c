"""A file with any model's answers -> predictions for the questions of a split.

Formats: `.jsonl`, `.json`, `.parquet`, `.csv`, `.tsv`, `.xlsx`, and others as text with one answer per line. A row is
an answer or has one of `ANSWER_KEYS`; `INDEX_KEYS` name its question, and rows without one are in the order of the
questions. The keys, and what an answer may be nested in, are those of lmms-eval, VLMEvalKit, the batches of OpenAI and
vLLM, TRL and R1-V. `iep/reward.py` reads the answer in a response.
"""

import csv
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from iep.data.question_file import Questions
from iep.errors import InputError
from iep.evaluation.predict import Predictions
from iep.preprocess.encode_questions import build_vocab, encode, load_questions
from iep.reward import read_answer
from iep.runtime.reading import reading
from iep.vocab import SPECIAL_TOKENS, Vocab

INDEX_KEYS = ("question_index", "question_id", "custom_id", "doc_id", "index", "id")
ANSWER_KEYS = (
    *("predicted_answer", "prediction", "pred", "filtered_resps", "model_output", "completion", "response", "output"),
    *("generated_text", "text", "answer"),
)
"""The keys of an answer; the first that a row has counts, because `answer` may be the true one."""
NESTED = ("body", "choices", "output", "message", "content", "text")
"""The keys that lead from the response of a server to its text."""
UNREADABLE, MISSING = "(unreadable)", "(no answer)"
SHOWN = 3
"""The number of responses without a readable answer that a note lists."""


def open_questions(path: Path) -> tuple[Vocab, Questions]:
    """Return the questions of a file in CLEVR's format, and the vocabulary of all its tokens.

    Raises:
        InputError: the file cannot be read, is not a question file, or holds a malformed question (names it).
    """
    found = load_questions(path)
    vocab = build_vocab(found, 1)
    arrays = {name: each.astype(np.int64) for name, each in encode(found, vocab, str(path), encode_unk=False).items()}
    parts: dict[str, Any] = {
        name: arrays.get(name) for name in ("questions", "image_idxs", "orig_idxs", "programs", "answers")
    }
    return vocab, Questions(path=path, families=arrays.get("question_families"), **parts)


def answer_predictions(
    path: Path, questions: Questions, vocab: Vocab, every: Questions | None = None
) -> tuple[Vocab, Predictions, list[str]]:
    """Read the answers of a file to `questions`.

    Args:
        every: all questions of the split, if `questions` is a selection; answers to the others are ignored.

    Returns:
        the vocabulary with all answers of the file, the predictions, and notes on questions without an answer and on
        responses without a readable one, which count as wrong, and on a file whose answers may be the true ones.

    Raises:
        InputError: the file is missing or not of its format, a row has no answer, several answers are to one question,
            or answers without a question_index are more or fewer than the questions.
    """
    rows, unused = read_rows(path)
    responses = _aligned(path, rows, questions, questions if every is None else every)
    truths = [None] * len(responses) if questions.answers is None else [vocab.answer[n] for n in questions.answers]
    known = [*vocab.answer[len(SPECIAL_TOKENS) :]]
    answers = [
        MISSING if each is None else read_answer(each, truth, known) or UNREADABLE
        for each, truth in zip(responses, truths, strict=True)
    ]
    vocab = vocab.with_answers(answers)
    ranked = np.array([[vocab.answer_index[each]] for each in answers])
    notes = []
    are_right = {answer == truth for answer, truth in zip(answers, truths, strict=True) if answer != MISSING}
    if unused and are_right == {True}:
        notes.append(
            f"{path}: every answer is right. Answers were read from 'answer', and not from {', '.join(unused)}; if "
            "'answer' is the truth, name the column of the predictions 'prediction'."
        )
    if missing := answers.count(MISSING):
        first = questions.orig_idxs[answers.index(MISSING)]
        note = f"{path}: no answer to {missing} of {len(answers)} questions, the first with index {first}"
        if questions.answers is not None and missing < len(answers):
            right = (ranked[:, 0] == questions.answers).sum() / (len(answers) - missing)
            note += f"; {right:.1%} of the others are right"
        notes.append(note)
    unread = [n for n, each in enumerate(answers) if each == UNREADABLE]
    if unread:
        shown = ", ".join(f"{questions.orig_idxs[n]}: {responses[n]!r:.60}" for n in unread[:SHOWN])
        notes.append(f"{path}: {len(unread)} of {len(answers)} responses have no readable answer: {shown}")
    return vocab, Predictions(None, ranked, None, None), notes


def read_rows(path: Path) -> tuple[list[tuple[int | None, str | None]], list[str]]:
    """Return the answers of a file, in which capitals in the names of columns do not count.

    Returns:
        the question_index, if it is given, and the response of each row; and the columns that were not read, if the
        responses are those of the column `answer`, which may hold the true ones.

    Raises:
        InputError: the file is missing or not of its format, or a row has no answer (names the row).
    """
    found: list[tuple[int | None, str | None]] = []
    keys = set[str]()
    with reading(path, "a file of answers"):
        for number, row in enumerate(_parsed(path), 1):
            if isinstance(row, Mapping):
                row = {str(key).strip().lower(): value for key, value in row.items()}
                keys |= row.keys()
            try:
                found.append(_row(row))
            except InputError as error:
                raise InputError(f"row {number}: {error}") from None
    unused = [] if keys & {*ANSWER_KEYS} != {"answer"} else sorted(keys - {"answer", *INDEX_KEYS})
    return found, unused


def _parsed(path: Path) -> list[Any]:
    if path.suffix == ".parquet":
        try:
            from pyarrow import parquet
        except ImportError:
            raise InputError("reading parquet needs pyarrow: pip install 'iep[export]'") from None
        return parquet.read_table(path).to_pylist()
    if path.suffix == ".xlsx":
        try:
            from openpyxl import load_workbook
        except ImportError:
            raise InputError("reading .xlsx needs openpyxl: pip install 'iep[export]'") from None
        sheet = load_workbook(path, read_only=True, data_only=True).active  # formulas have the results in the file
        sheet.reset_dimensions()  # otherwise every row is as long as the one with the last column
        header, *rows = [row for row in sheet.iter_rows(values_only=True) if any(cell is not None for cell in row)] or [
            ()
        ]
        if not header:
            raise InputError("the first sheet is empty")
        found = [dict(zip(header, row, strict=False)) for row in rows]
        return [row for row in found if any(cell is not None for cell in row.values())]
    if path.suffix in (".csv", ".tsv"):
        csv.field_size_limit(sys.maxsize)  # the tables of VLMEvalKit may hold images
        with open(path, encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            file.seek(0)
            delimiter = max("\t,;" if path.suffix == ".tsv" else ",;\t", key=header.count)
            return [*csv.DictReader(file, delimiter=delimiter)]
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".jsonl":
        return [_from_json(line, number) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if path.suffix != ".json":
        return text.splitlines()
    content = json.loads(text)
    if isinstance(content, Mapping) and all(key.isdecimal() for key in content):
        return [{"question_index": int(key), "answer": answer} for key, answer in content.items()]
    if isinstance(content, Mapping):
        content = content.get("results")
    if not isinstance(content, list):
        raise InputError("expected a JSON list, or an object with answers by question_index or with a list of results")
    return content


def _from_json(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"line {number}: not JSON: {error.msg} at column {error.colno}") from None


def _row(row: Any) -> tuple[int | None, str | None]:
    if not isinstance(row, Mapping):
        return None, _text(row)
    answer = next((row[key] for key in ANSWER_KEYS if row.get(key) not in (None, "")), None)
    if answer is None and not row.keys() & {*ANSWER_KEYS}:
        raise InputError(f"the keys are {', '.join(map(str, row))}; expected one of {', '.join(ANSWER_KEYS)}")
    index = next((row[key] for key in INDEX_KEYS if row.get(key) is not None), None)
    if index is None:
        return None, _text(answer)
    number = re.fullmatch(r"(?:\D.*[_-])?(\d+)(?:\.0)?", str(index), re.ASCII)  # val_12 of LLaVA, 12.0 of pandas
    if number is None:
        raise InputError(f"the question_index is {index!r:.40}, expected a whole number")
    return int(number[1]), _text(answer)


def _text(answer: Any) -> str | None:
    """Return the text of an answer; None for a request that failed."""
    if answer is None or (isinstance(answer, Mapping) and answer.get("error")):
        return None
    if isinstance(answer, str | int | float):
        return {True: "yes", False: "no"}[answer] if isinstance(answer, bool) else str(answer)
    if isinstance(answer, list) and answer:  # several choices, of which the first counts, or a conversation
        return _text(answer[-1] if isinstance(answer[-1], Mapping) and "role" in answer[-1] else answer[0])
    if isinstance(answer, Mapping) and (key := next((key for key in NESTED if key in answer), None)):
        return _text(answer[key])
    raise InputError(f"the answer is {answer!r:.60}, expected a text")


def _aligned(
    path: Path, rows: Sequence[tuple[int | None, str | None]], questions: Questions, every: Questions
) -> list[str | None]:
    """Return the response to each question, None where there is none; `every` are all questions of their file."""
    if all(index is None for index, _ in rows):
        if len(rows) == len(questions):
            return [response for _, response in rows]
        if len(rows) != len(every):
            counts = f"{len(rows)} answers without a question_index for {len(every)} questions"
            raise InputError(f"{path}: {counts}, expected one for each")
        rows = [(index, response) for index, (_, response) in zip(every.orig_idxs.tolist(), rows, strict=True)]
    place = dict.fromkeys(every.orig_idxs.tolist())
    place |= {index: n for n, index in enumerate(questions.orig_idxs.tolist())}
    found: list[str | None] = [None] * len(questions)
    for number, (index, response) in enumerate(rows, 1):
        if index not in place:
            what = "has no question_index, unlike others" if index is None else f"no question has the index {index}"
            raise InputError(f"{path}: row {number}: {what}")
        if (at := place[index]) is None:  # a question that does not count
            continue
        if found[at] is not None:
            raise InputError(f"{path}: row {number}: a second answer to the question with index {index}")
        found[at] = response
    return found
