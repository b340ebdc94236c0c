"""What a user asks of `iep-bench plan` -> programs, their plans, text and pictures of these (`show.py`)."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from iep.bench.show import describe_programs, describe_schedule, draw_schedule, walk
from iep.bench.workload import clevr_vocab, encode, programs_of
from iep.config import EngineConfig
from iep.data_files import open_split
from iep.errors import InputError, nearest
from iep.execution_engine.placement import NONE, Placement
from iep.execution_engine.plans import plan_programs
from iep.files import check_writable
from iep.networks import build, engine_kwargs
from iep.placing import (
    Costs,
    Sample,
    check_options,
    costs_of,
    describe_moves,
    describe_placement,
    make_placement,
    share_of_time,
)
from iep.vocab import Vocab

FULL_SIZE = (1024, 14, 14)
"""The features for which the engine's defaults are meant."""


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
    modules: str = "iep"
    scene: str = "module"
    placement: str = "none"
    devices: tuple[str, ...] = ()


def show_plans(request: PlanRequest, out: Path | None = None, say: Callable[[str], None] = print) -> None:
    """Say the programs and each scheduler's calls; draw them into `out` where it is given, with the scheduler in the
    name where there are several.

    Raises:
        InputError: a token is unknown (the nearest is suggested), the split is not there or has no programs, a
            placement does not fit, or the modules cannot run these functions or this setting of scene.
    """
    check_options(request.placement, request.devices)
    pictures = dict.fromkeys(request.batching, out)
    if out is not None and len(request.batching) > 1:
        pictures = {batching: out.with_stem(f"{out.stem}-{batching}") for batching in request.batching}
    check_writable(path for path in pictures.values() if path is not None)
    vocab, programs_BL, image_idxs_B = _programs(request)
    placement = costs = None
    if request.placement != NONE:
        placement, costs = _placement(request, vocab, Sample(programs_BL, image_idxs_B, "these programs"))
        say(f"{describe_placement(request.placement, placement, costs.work)}\n")
    _, image_rows_B = np.unique(image_idxs_B, return_inverse=True)
    for number, batching in enumerate(request.batching):
        how = (request.scene, batching, request.sharing, placement, request.modules)
        try:
            plan = plan_programs(programs_BL, vocab.program, image_rows_B, *how)
        except ValueError as error:  # the vocabulary or the setting of scene is none that the modules know
            raise InputError(f"these programs cannot be planned: {error}") from None
        examples = walk(plan)
        if number == 0:
            say(describe_programs(examples))
        text = describe_schedule(batching, plan, examples)
        say(f"\n{text}")
        if placement is not None:
            say(describe_moves([plan.layout], costs, 4, share_of_time(plan, costs), "at full size"))
        if (path := pictures[batching]) is not None:
            draw_schedule(path, text.splitlines()[0], plan.schedule, examples)
            say(f"Wrote {path}")


def _placement(request: PlanRequest, vocab: Vocab, sample: Sample) -> tuple[Placement, Costs]:
    """The placement of an engine of full size, and what its parts cost."""
    with torch.device("meta"):
        engine = build(
            "engine", engine_kwargs(EngineConfig(modules=request.modules, scene=request.scene), vocab, FULL_SIZE)
        )
    costs = costs_of(engine, sample)
    return make_placement(request.placement, request.devices, engine.parts, costs.work, sample.source), costs


def _programs(request: PlanRequest) -> tuple[Vocab, np.ndarray, np.ndarray]:
    """Vocabulary, (B, L) programs and (B,) image indices."""
    vocab = clevr_vocab() if request.data is None else Vocab.load(request.data / "vocab.json")
    if request.programs:
        programs = [_split(number, text, vocab.program) for number, text in enumerate(request.programs)]
        return vocab, encode(programs, vocab.program), np.arange(len(programs)) // request.questions_per_image
    questions = open_split(request.data, request.split, vocab, False, request.num_samples).questions
    return vocab, programs_of(questions), questions.image_idxs


def _split(number: int, text: str, known: tuple[str, ...]) -> list[str]:
    tokens = text.split()
    if not tokens:
        raise InputError(f"program {number} is empty, expected functions in prefix order, such as: count scene")
    for position, token in enumerate(tokens):
        if token not in known:
            raise InputError(f"program {number}, token {position}: unknown function {token!r}{nearest(token, known)}")
    return tokens
