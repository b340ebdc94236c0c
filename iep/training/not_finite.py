"""A step whose loss is not finite -> a file to look at and one line; training on would only lose the run."""

from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from iep.errors import InputError
from iep.files import atomic_path

FORMAT = "iep-not-finite-1"
SHOWN = 8


def not_finite_name(iteration: int) -> str:
    """The file name of the state in which `iteration` was computed."""
    return f"not-finite-{iteration}.pt"


def refuse_not_finite(
    out: Path, iteration: int, loss: float, positions: np.ndarray, question_index: np.ndarray, state: dict[str, Any]
) -> NoReturn:
    """Save `state`, with which `iteration` gave this loss, and its batch; then end the run.

    The file is plain data for `torch.load`, no checkpoint: nothing resumes or starts from it.

    Args:
        out: the run directory.
        iteration: the step's number, from 1.
        loss: inf or nan.
        positions: (B,) places of the batch's questions in the training file.
        question_index: (B,) CLEVR's numbers of them.
        state: networks and optimiser before the step.

    Raises:
        InputError: always.
    """
    path = out / not_finite_name(iteration)
    batch = {"positions": positions.tolist(), "question_index": question_index.tolist()}
    with atomic_path(path) as temporary:
        torch.save({"format": FORMAT, "iteration": iteration, "loss": loss, **batch, **state}, temporary)
    first = ", ".join(map(str, question_index[:SHOWN])) + (", ..." if len(question_index) > SHOWN else "")
    raise InputError(
        f"{out}: the loss is {loss} at iteration {iteration}, on {len(question_index)} questions (question_index "
        f"{first}); the state before it is in {path.name}; try a lower learning_rate or clip_gradients=1"
    )
