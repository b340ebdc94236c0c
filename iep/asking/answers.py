"""Questions about one image -> answers, through trained networks: the work of `iep-ask`.

The image's features are computed once; questions that are asked together run as one minibatch. Where the networks come
from is `loading.py`.

Shapes: B questions, T question tokens, L program tokens, C H W features, A answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from iep.asking.words import Words, read_each, read_program, read_question
from iep.data.datasets import Batch
from iep.evaluation.predict import Predictor, ranked
from iep.execution_engine.families import family
from iep.execution_engine.family import tree_run
from iep.programs import ProgramTree
from iep.vocab import NULL, Vocab


@dataclass(frozen=True)
class Answer:
    """What the networks say to one question.

    Attributes:
        question: None where only a program was given.
        program: (L,) the tokens that were run, as indices; none of a baseline.
        tree: the tree that they stand for, with what the engine does not use of it marked; None of a baseline.
        ranked: all answers and their probabilities, the likeliest first.
    """

    question: Words | None
    program: tuple[int, ...]
    tree: ProgramTree | None
    ranked: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Asker:
    """Networks that look at one image, and their vocabulary; `predictor` may be without a generator, or a baseline."""

    predictor: Predictor
    vocab: Vocab
    features: Tensor | None
    """(1, C, H, W) of the image; None for a baseline that does not look."""
    device: torch.device

    def ask(self, questions: Sequence[str]) -> list[Answer]:
        """Answer questions, each by the program that the generator predicts; a baseline does without.

        Raises:
            InputError: a question is empty or not text.
        """
        words = self._words(questions)
        questions_BT = _padded([question.indices for question in words]).to(self.device)
        with torch.inference_mode():
            programs_BL = self.predictor.programs(self._batch(questions_BT))
        return self._answers(words, questions_BT, programs_BL)

    def run(self, programs: Sequence[str], questions: Sequence[str] = ()) -> list[Answer]:
        """The answers of programs, prefix tokens with spaces between them; `questions`, if any, are what they ask.

        Raises:
            InputError: a token is not in the vocabulary, a program is not one complete tree, or a function is given a
                value of a kind that the engine's modules do not take there.
        """
        own = family(self.predictor.engine.family_name)
        programs_BL = _padded(read_each("program", programs, lambda text: read_program(text, self.vocab, own)))
        words = self._words(questions) or [None] * len(programs)
        programs_BL = programs_BL.to(self.device)
        return self._answers(words, programs_BL, programs_BL)

    @torch.inference_mode()
    def _answers(
        self, questions: Sequence[Words | None], questions_BT: Tensor, programs_BL: Tensor | None
    ) -> list[Answer]:
        """An engine does not read `questions_BT`.

        Raises:
            InputError: answer logits are not finite.
        """
        logits_BA = self.predictor.logits(self._batch(questions_BT), programs_BL)
        programs = [()] * len(questions) if programs_BL is None else programs_BL.tolist()
        answers = []

        def name(row: int) -> str:
            given = questions[row]
            return f"question {given.text!r}" if given else f"program {row + 1}"

        ranks_BA = ranked(logits_BA, name)
        for question, program_L, values_A, indices_A in zip(questions, programs, *ranks_BA, strict=True):
            pairs = zip(indices_A.tolist(), values_A.tolist(), strict=True)
            named = tuple((self.vocab.answer[index], value) for index, value in pairs)
            tree = self._tree(program_L) if program_L else None
            answers.append(Answer(question, tuple(program_L), tree, named))
        return answers

    def _words(self, questions: Sequence[str]) -> list[Words]:
        return read_each("question", questions, lambda text: read_question(text, self.vocab))

    def _tree(self, program_L: Sequence[int]) -> ProgramTree:
        tokens = [self.vocab.program[token] for token in program_L]
        return tree_run(tokens, family(self.predictor.engine.family_name))

    def _batch(self, questions_BT: Tensor) -> Batch:
        rows_B = torch.zeros(len(questions_BT), dtype=torch.long)
        return Batch(rows_B, questions_BT, None, None, self.features, rows_B.numpy())


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """(B, longest row) with `<NULL>` on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[NULL] * (width - len(row))] for row in rows])
