"""Typed questions about one image -> answers by trained networks, as text or as JSON.

The features of the image are computed once, and questions that are asked together run as one minibatch. The networks
are loaded in `loading.py`.

Shapes: B questions, T question tokens, L program tokens, C H W features, A answers.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from iep.backbone.network import FoundObjects
from iep.data.datasets import Batch
from iep.errors import SIMILARITY, InputError, nearest
from iep.evaluation.outcome import content_tokens
from iep.evaluation.predict import Predictor, ranked
from iep.execution_engine.roles import ModuleSet, misfits, tree_run
from iep.programs import ProgramTree, named, prefix_to_json, program_tree, tokens_run, tree_lines
from iep.runtime.reading import check_utf8
from iep.vocab import END, NULL, SPECIAL_TOKENS, START, UNK, Vocab, tokenize

Read = TypeVar("Read")
MOST_WORDS = 10
"""The most unknown words or ignored tokens that are listed one by one."""


@dataclass(frozen=True)
class Words:
    """A question as tokens of a vocabulary.

    Attributes:
        text: the question as it was asked.
        indices: `<START>`, its words, `<END>`, as `iep-preprocess` encodes them.
        unknown: the words that are not in the vocabulary, each once, with the nearest known word or None.
    """

    text: str
    indices: tuple[int, ...]
    unknown: tuple[tuple[str, str | None], ...]


def read_question(text: str, vocab: Vocab) -> Words:
    """Encode a question; words that are not in the vocabulary become `<UNK>`.

    Spaces around the question are dropped, and so are repeated spaces between words unless the vocabulary has an empty
    token.

    Raises:
        InputError: the question is empty, has no word, or is not UTF-8 text.
    """
    text = text.strip()
    if not text:
        raise InputError("the question is empty")
    check_utf8(text, "the question")
    known = {token: index for token, index in vocab.question_index.items() if token not in SPECIAL_TOKENS}
    words = [word for word in tokenize(text) if word or word in known]
    if not any(words):
        raise InputError(f"the question {text!r} has no word")
    unknown = dict.fromkeys(word for word in words if word not in known)
    indices = (known.get(word, UNK) for word in words)
    return Words(text, (START, *indices, END), tuple((word, nearest_word(word, known)) for word in unknown))


def read_each(what: str, texts: Sequence[str], read: Callable[[str], Read]) -> list[Read]:
    """Return `read(text)` for each text.

    Raises:
        InputError: as `read`, `texts` is a string, or a text is not; of several texts, the failed one is named, such as
            "question 2" if `what` is "question".
    """
    if isinstance(texts, str):
        raise InputError(f"the {what}s are {texts!r:.60}, expected a list of texts")
    found = []
    for number, text in enumerate(texts, start=1):
        try:
            if not isinstance(text, str):
                raise InputError(f"the {what} is {text!r:.60}, expected a text")
            found.append(read(text))
        except InputError as error:
            raise InputError(f"{what} {number}: {error}" if len(texts) > 1 else str(error)) from None
    return found


def some(texts: Sequence[str], most: int, between: str = ", ") -> str:
    """Join the first `most` texts, and add the number of the others."""
    more = f"{between}and {len(texts) - most} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more


def nearest_word(word: str, known: Collection[str]) -> str | None:
    """Return the most similar known word, ignoring case, or None if none is near.

    Of words that differ only in case, the one whose first letter has the case of `word`'s is preferred.
    """
    found = get_close_matches(word.lower(), {other.lower() for other in known}, n=1, cutoff=SIMILARITY)
    alike = sorted(other for other in known if other.lower() in found)
    return min(alike, key=lambda other: other[:1].isupper() != word[:1].isupper(), default=None)


def read_program(text: str, vocab: Vocab, own: ModuleSet) -> tuple[int, ...]:
    """Return the indices of a well-formed program's prefix tokens, which are separated by spaces in `text`.

    Args:
        own: the modules that run the program.

    Raises:
        InputError: a token is special or not in the vocabulary, the tokens are not one complete tree, or an argument of
            a function is of the wrong kind for its module.
    """
    tokens = text.split()
    known = {token: index for token, index in vocab.program_index.items() if token not in SPECIAL_TOKENS}
    for place, token in enumerate(tokens):
        if token in SPECIAL_TOKENS:
            raise InputError(f"program token {place} ({token!r}) is a special token, expected a function")
        if token not in known:
            raise InputError(
                f"program token {place} ({token!r}) is not in the checkpoint's vocabulary{nearest(token, known)}"
            )
    prefix_to_json(tokens)
    for misfit in misfits(program_tree(tokens), own):
        found, expected = misfit.words(own)
        argument, reader = (
            "the classifier" if node is None else f"program token {node} ({tokens[node]})" for node in misfit[:2]
        )
        raise InputError(f"{reader} takes {expected}, but its argument, {argument}, makes {found}")
    return tuple(known[token] for token in tokens)


@dataclass(frozen=True)
class Answer:
    """The networks' answer to one question.

    Attributes:
        question: None if only a program was given.
        program: (L,) indices of the program's tokens; empty for a baseline.
        tree: the program's tree, with the nodes marked that the engine does not use; None for a baseline.
        ranked: all answers and their probabilities, the likeliest first.
        warning: what the objects of the image say against answers about it, such as that there are none; empty for a
            familiar image, and for networks whose backbone does not find objects.
    """

    question: Words | None
    program: tuple[int, ...]
    tree: ProgramTree | None
    ranked: tuple[tuple[str, float], ...]
    warning: str = ""

    def __str__(self) -> str:
        """Return the question, the likeliest answers, the program as a tree and the warning."""
        return describe(self, top=3) + f"\n  {self.warning}" * bool(self.warning)


@dataclass(frozen=True)
class Asker:
    """Networks with their vocabulary, and the features of one image that they answer questions about."""

    predictor: Predictor
    vocab: Vocab
    features: Tensor | None
    """(1, C, H, W) of the image; None for a baseline that reads no image."""
    device: torch.device
    found: FoundObjects | None = None
    """The objects of the image; None if the backbone does not find objects."""

    @property
    def warning(self) -> str:
        """The warning of each answer about the image."""
        return "" if self.found is None else self.found.warning

    def ask(self, questions: Sequence[str]) -> list[Answer]:
        """Answer questions by the programs that the generator predicts, or by a baseline.

        Raises:
            InputError: a question is empty or not text, or its logits are not finite.
        """
        words = read_each("question", questions, lambda text: read_question(text, self.vocab))
        if not words:
            return []
        questions_BT = _padded([question.indices for question in words]).to(self.device)
        with torch.inference_mode():
            programs_BL = self.predictor.programs(self._batch(questions_BT))
        return self._answers(words, questions_BT, programs_BL)

    def run(self, programs: Sequence[str], questions: Sequence[str] = ()) -> list[Answer]:
        """Run programs, each given as prefix tokens separated by spaces.

        Args:
            questions: the question of each program, or nothing.

        Raises:
            InputError: as `read_program` and `read_question`, or the logits of a program are not finite.
        """
        own = self.predictor.engine.module_set
        rows = read_each("program", programs, lambda text: read_program(text, self.vocab, own))
        words = read_each("question", questions, lambda text: read_question(text, self.vocab)) or [None] * len(programs)
        if not rows:
            return []
        programs_BL = _padded(rows).to(self.device)
        return self._answers(words, programs_BL, programs_BL)

    @torch.inference_mode()
    def _answers(
        self, questions: Sequence[Words | None], questions_BT: Tensor, programs_BL: Tensor | None
    ) -> list[Answer]:
        """Answer questions by a baseline, or by an engine, which does not read `questions_BT`."""
        logits_BA = self.predictor.logits(self._batch(questions_BT), programs_BL)
        names = [f"question {given.text!r}" if given else f"program {n}" for n, given in enumerate(questions, start=1)]
        programs = [()] * len(questions) if programs_BL is None else programs_BL.tolist()
        answers = []
        for question, program_L, values_A, indices_A in zip(
            questions, programs, *ranked(logits_BA, names.__getitem__), strict=True
        ):
            pairs = zip(indices_A.tolist(), values_A.tolist(), strict=True)
            likeliest = tuple((self.vocab.answer[index], value) for index, value in pairs)
            tokens = [self.vocab.program[token] for token in program_L]
            tree = tree_run(tokens, self.predictor.engine.module_set) if tokens else None
            answers.append(Answer(question, tuple(program_L), tree, likeliest, self.warning))
        return answers

    def _batch(self, questions_BT: Tensor) -> Batch:
        """Return a minibatch of questions about the image."""
        rows_B = torch.zeros(len(questions_BT), dtype=torch.long)
        return Batch(rows_B, questions_BT, None, None, self.features, rows_B.numpy())


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the rows as one matrix (B, longest row), padded with `<NULL>` on the right."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=NULL)


def describe(answer: Answer, top: int, picture: Path | None = None, with_question: bool = True) -> str:
    """Return text with the question, its unknown words, the `top` likeliest answers and the program as a tree."""
    lines = [answer.question.text] if answer.question and with_question else []
    unknown = answer.question.unknown if answer.question else ()
    for word, near in unknown[:MOST_WORDS]:
        hint = f"; the nearest known word is {near!r}" if near else ""
        lines.append(f"  {word!r} is not in the vocabulary and is read as <UNK>{hint}")
    if len(unknown) > MOST_WORDS:
        lines.append(f"  and {len(unknown) - MOST_WORDS} more words are read as <UNK>")
    best, *others = (f"{name} {100 * probability:.1f}%" for name, probability in answer.ranked[:top])
    lines.append(f"  {best}  (then {', '.join(others)})" if others else f"  {best}")
    if answer.tree is not None:
        lines += [f"  {line}" for line in tree_lines(answer.tree, named)]
        if answer.tree.ignored:
            lines.append(f"  ignored, after the tree was complete: {' '.join(answer.tree.ignored)}")
    if picture is not None:
        lines.append(f"  Wrote {picture}")
    return "\n".join(lines)


def to_json(answer: Answer, top: int, program_tokens: Sequence[str], picture: Path | None = None) -> dict[str, Any]:
    """Return the object that `--json` prints, without the keys of unknown values.

    `program` is the predicted program as in predictions.jsonl. `run` is the program that was run, with `scene` in the
    place of unused functions. Both are in prefix order.
    """
    content: dict[str, Any] = {}
    if answer.question is not None:
        unknown = [word for word, _ in answer.question.unknown]
        content |= {"question": answer.question.text, "unknown_words": unknown}
    content["answers"] = [{"answer": name, "probability": round(value, 6)} for name, value in answer.ranked[:top]]
    if answer.tree is not None:
        content |= {"program": content_tokens(answer.program, program_tokens), "run": tokens_run(answer.tree)}
    if answer.warning:
        content["warning"] = answer.warning
    if picture is not None:
        content["picture"] = str(picture)
    return content
