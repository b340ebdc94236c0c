"""A step whose loss is not finite -> a file to look at and one line; training on would only lose the run."""

import io
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from iep.errors import InputError
from iep.runtime.files import write_bytes

FORMAT = "iep-not-finite-1"
SHOWN = 8
LOWER = "try a lower learning_rate or clip_gradients=1"


def not_finite_name(iteration: int) -> str:
    """The file name of the weights with which `iteration` was computed."""
    return f"not-finite-{iteration}.pt"


def refuse_not_finite(
    out: Path,
    iteration: int,
    loss: float,
    positions: np.ndarray,
    question_index: np.ndarray,
    state: dict[str, Any],
    were_finite: bool,
    hint: str,
) -> NoReturn:
    """Save `state`, with which `iteration` gave this loss, and its batch; then end the run.

    The file is plain data for `torch.load`, no checkpoint: nothing resumes or starts from it. Weights and optimiser are
    as before the step; batch norms' running statistics have seen its batch already.

    Args:
        out: the run directory.
        iteration: the step's number, from 1.
        loss: inf or nan.
        positions: (B,) places of the batch's questions among those trained on.
        question_index: (B,) CLEVR's numbers of them.
        state: networks and optimiser.
        were_finite: the weights are; if not, an earlier step is to blame, not this batch.
        hint: what to look at, or to try.

    Raises:
        InputError: always.
    """
    path = out / not_finite_name(iteration)
    batch = {"positions": positions.tolist(), "question_index": question_index.tolist()}
    content = io.BytesIO()
    torch.save({"format": FORMAT, "iteration": iteration, "loss": loss, **batch, **state}, content)
    saved = f"the weights before it are in {path.name}"
    try:
        write_bytes(path, content.getvalue())
    except OSError as error:
        saved = f"the state could not be saved: {error.strerror or error}"
    about = f"on {len(question_index)} questions (question_index {_first(question_index)})"
    if not were_finite:
        about += ", which are not to blame: weights were not finite already"
    raise InputError(f"{out}: the loss is {loss} at iteration {iteration}, {about}; {saved}; {hint}")


def describe_images(path: Path, images: np.ndarray) -> str:
    """A hint at the (M,) images, one at least, whose features in the file `path` are not finite."""
    return f"{path}: the features of image{'s' if len(images) > 1 else ''} {_first(images)} are not finite"


def _first(numbers: np.ndarray) -> str:
    return ", ".join(map(str, numbers[:SHOWN])) + (", ..." if len(numbers) > SHOWN else "")
