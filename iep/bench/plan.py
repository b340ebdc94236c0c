"""What a user asks of `iep-bench plan` -> programs, their plans, text and pictures of these (`show.py`)."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from iep.bench.show import describe_programs, describe_schedule, draw_schedule, walk
from iep.bench.workload import clevr_vocab, encode, programs_of
from iep.data_files import open_split
from iep.errors import InputError, nearest
from iep.execution_engine.engine import plan_programs
from iep.files import check_writable
from iep.vocab import Vocab


@dataclass(frozen=True)
class PlanRequest:
    """What to show the schedules of: `programs` given token by token, or else a preprocessed split's first."""

    batching: tuple[str, ...]
    programs: tuple[str, ...] = ()
    data: Path | None = None
    split: str = "val"
    num_samples: int = 8
    questions_per_image: int = 1
    sharing: bool = True
    scene: str = "module"


def show_plans(request: PlanRequest, out: Path | None = None, say: Callable[[str], None] = print) -> None:
    """Say the programs and each scheduler's calls; draw them into `out` where it is given, with the scheduler in the
    name where there are several.

    Raises:
        InputError: a token is unknown (the nearest is suggested), or the split is not there or has no programs.
    """
    pictures = dict.fromkeys(request.batching, out)
    if out is not None and len(request.batching) > 1:
        pictures = {batching: out.with_stem(f"{out.stem}-{batching}") for batching in request.batching}
    check_writable(path for path in pictures.values() if path is not None)
    tokens, programs_BL, image_idxs_B = _programs(request)
    _, image_rows_B = np.unique(image_idxs_B, return_inverse=True)
    for number, batching in enumerate(request.batching):
        plan = plan_programs(programs_BL, tokens, image_rows_B, request.scene, batching, request.sharing)
        examples = walk(plan.graph, tokens)
        if number == 0:
            say(describe_programs(examples))
        text = describe_schedule(batching, plan.graph, plan.schedule, examples, tokens)
        say(f"\n{text}")
        if (path := pictures[batching]) is not None:
            draw_schedule(path, text.splitlines()[0], plan.schedule, examples)
            say(f"Wrote {path}")


def _programs(request: PlanRequest) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """Vocabulary, (B, L) programs and (B,) image indices."""
    vocab = clevr_vocab() if request.data is None else Vocab.load(request.data / "vocab.json")
    if request.programs:
        tokens = vocab.program
        programs = [_split(number, text, tokens) for number, text in enumerate(request.programs)]
        return tokens, encode(programs, tokens), np.arange(len(programs)) // request.questions_per_image
    questions = open_split(request.data, request.split, vocab, False, request.num_samples).questions
    return vocab.program, programs_of(questions), questions.image_idxs


def _split(number: int, text: str, known: tuple[str, ...]) -> list[str]:
    tokens = text.split()
    if not tokens:
        raise InputError(f"program {number} is empty, expected functions in prefix order, such as: count scene")
    for position, token in enumerate(tokens):
        if token not in known:
            raise InputError(f"program {number}, token {position}: unknown function {token!r}{nearest(token, known)}")
    return tokens
