"""The networks of a checkpoint <-> a safetensors file, without the state of a run.

The file is complete: its metadata holds everything except the weights, as JSON. It loads without executing anything,
other programs can read its tensors, and it is what a repository on the Hugging Face Hub holds. `config.json` beside it
shows the same metadata. The original toolkit has no such files.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from iep.errors import InputError, nearest
from iep.runtime.files import write_bytes, write_json

WEIGHTS, WEIGHTS_CONFIG = "best.safetensors", "config.json"
SAFETENSORS = ".safetensors"
FORMAT = "iep-model-1"
DEFAULT = "default"
"""The name of the networks that come with the package; docs/results.md says how they were trained."""
DEFAULT_FILE = Path(__file__).with_name("default.safetensors")


def find_networks(path: Path) -> Path:
    """Return the file of the networks that `path` names: for `default`, unless there is such a path, the package's own.

    Raises:
        InputError: there is no such path, but a similar name exists.
    """
    if path.exists():
        return path
    if str(path) == DEFAULT:
        return DEFAULT_FILE
    beside = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    if hint := nearest(path.name, [*beside, DEFAULT]):
        raise InputError(f"{path}: no such file{hint}")
    return path


def save_weights(directory: Path, content: Mapping[str, Any], half: bool = False) -> None:
    """Write the networks of a checkpoint's `content` to `best.safetensors` and `config.json` in a directory.

    A tensor has the name of its network before its own, such as `engine.stem.0.weight`.

    Args:
        half: store floating-point weights in float16, from which networks load them in float32.

    Raises:
        OSError: a file cannot be written; the previous file is unchanged.
    """
    networks = content["networks"]
    weights = {
        f"{name}.{key}": value.clone(memory_format=torch.contiguous_format)  # the library refuses shared memory
        for name, packed in networks.items()
        for key, value in packed["weights"].items()
    }
    if half:
        weights = {name: value.half() if value.is_floating_point() else value for name, value in weights.items()}
    config = {
        "format": FORMAT,
        **{key: content[key] for key in ("model", "step", "best") if key in content},
        "networks": {name: dict(packed["kwargs"]) for name, packed in networks.items()},
        "features": content["features"],
        "vocab": content["vocab"],
    }
    write_bytes(directory / WEIGHTS, save(weights, {"iep": json.dumps(config)}))
    write_json(directory / WEIGHTS_CONFIG, config, indent=1)


def read_weights(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint without the state of its run.

    Raises:
        InputError: the file holds the weights of something else.
        Exception: the file is missing or damaged; safetensors and JSON have several classes of errors for this.
    """
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    config = json.loads(metadata.get("iep", "{}"))
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise InputError(f"holds the weights of something else, expected metadata of the format {FORMAT}")
    networks = {name: {"kwargs": kwargs, "weights": {}} for name, kwargs in config["networks"].items()}
    for name, weight in weights.items():
        network, _, key = name.partition(".")
        networks[network]["weights"][key] = weight
    return config | {"networks": networks}
