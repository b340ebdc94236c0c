"""How a checkpoint that is not loaded is refused, for the tests of it."""

from pathlib import Path

import pytest

from iep.errors import InputError
from iep.models.checkpoint import load_checkpoint


def refusal(path: Path) -> str:
    """What is said of the checkpoint at `path`: one line that begins with its name."""
    with pytest.raises(InputError) as caught:
        load_checkpoint(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    return str(caught.value)
