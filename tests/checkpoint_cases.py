"""How a checkpoint that is not loaded is refused, and checkpoints with a part changed, for the tests of them."""

import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from iep.errors import InputError
from iep.models.checkpoint import load_checkpoint

OTHERS = (None, True, -1, 0.5, "x", [], {}, {"a": 1}, [[1]], torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64))
Place = tuple[Any, ...]


def refusal(path: Path, use: Callable[[], object] | None = None) -> str:
    """Return how `use`, or loading, refuses the checkpoint at `path`: one line that begins with its name; nothing where
    it does not."""
    try:
        load_checkpoint(path) if use is None else use()
    except InputError as error:
        message = str(error)
    else:
        return ""
    assert message.startswith(str(path)), message
    assert "\n" not in message
    return message


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Yield the keys that lead to every part of nested containers; of many equal parts, a few."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items)[: 3 if place and place[-1] in ("weights", "state") else None]:
        if place[:1] != ("vocab",):
            yield (*place, key)
            yield from places(item, (*place, key))


def mutated(content: dict[str, Any], place: Place, random: random.Random) -> dict[str, Any]:
    """Return a copy in which the part at a place is missing, or of another type or shape."""
    content = deepcopy(content)
    *path, last = place
    holder: Any = content
    for key in path:
        holder = holder[key]
    value = holder[last]
    changes = [lambda: holder.pop(last), *(lambda other=other: holder.__setitem__(last, other) for other in OTHERS)]
    if isinstance(value, Tensor):
        for other in (value[None], value.flatten()[:1], value.double(), value.to_sparse(), value.int()):
            changes.append(lambda other=other: holder.__setitem__(last, other))
    random.choice(changes)()
    return content
