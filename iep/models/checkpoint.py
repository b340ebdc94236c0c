"""Networks and the state of a run <-> files, written whole or not at all and loaded without executing anything in them.

`read_checkpoint` reads every source of networks into a `Checkpoint`, and finds all that can be wrong with a file.

A run's checkpoints, `step-N.pt` and `best.pt`, hold plain containers and tensors: weights and settings of its networks,
vocabulary, how the features that it was trained on were made of images, and the state of the run. They hold no random
states, because the random numbers of a step are a function of the seed and the step.

`best.safetensors` holds the best networks without the state of the run. It is complete: its metadata has everything
except the weights, as JSON. Other programs can read its tensors, and it is what a repository on the Hugging Face Hub
holds. `config.json` beside it shows the same metadata.

Checkpoints of the original toolkit load as well, to start from or to evaluate.
"""

import io
import json
import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from iep.errors import InputError, nearest
from iep.execution_engine.choices import check_named
from iep.models.network import BASELINES, CLASSES, DESCRIPTIONS, Network, Packed
from iep.models.original import from_original, is_original, safe_globals
from iep.runtime.files import write_bytes, write_json
from iep.runtime.reading import reading
from iep.vocab import Vocab

FORMAT, WEIGHTS_FORMAT = "iep-checkpoint-1", "iep-model-1"
BEST, WEIGHTS, WEIGHTS_CONFIG = "best.pt", "best.safetensors", "config.json"
SAFETENSORS = ".safetensors"
DEFAULT = "default"
"""The name of the networks that come with the package; docs/results.md says how they were trained."""
DEFAULT_FILE = Path(__file__).with_name("default.safetensors")
_NUMBERED = re.compile(r"step-(\d+)\.pt")


@dataclass(frozen=True)
class RunState:
    """The state of a run, from which it resumes."""

    step: int
    """The number of steps that are done."""
    config: Mapping[str, Any]
    """The settings, as `iep.config.settings_of` returns them."""
    validation_due: bool
    """The last step must be followed by a validation that is not done yet."""
    best: float
    """The best validation score so far; -1 before the first validation."""
    best_step: int
    """The step of the best checkpoint."""
    sums: Mapping[str, float]
    """The sums of the metrics over the steps since the last row of metrics."""
    task: Mapping[str, float]
    """The numbers that the task carries from step to step."""
    optimizer: Mapping[str, Any]
    """The state of the optimiser, as PyTorch returns it."""


@dataclass(frozen=True)
class Checkpoint:
    """Networks that were read from a file, or that will be written to one.

    The values have been checked, except that weights may not fit the settings of their network; `network` checks this.
    """

    path: Path
    """The file or the run directory, as the user named it, for messages."""
    networks: Mapping[str, Packed]
    vocab: Vocab
    recipe: Mapping[str, Any]
    """How the features that the networks were trained on were made of images; empty if this is not known."""
    run: RunState | None = None
    """None in `best.safetensors` and in a file of the original toolkit."""

    @property
    def state(self) -> RunState:
        """The state of the run of a checkpoint that `read_newest` returned."""
        assert self.run is not None
        return self.run

    def packed(self, name: str) -> Packed:
        """Return what the checkpoint stores of the network `name`.

        Raises:
            InputError: the checkpoint does not hold this network.
        """
        if name not in self.networks:
            found = ", ".join(DESCRIPTIONS.get(each, each) for each in self.networks) or "no network"
            raise InputError(f"{self.path}: holds {found}, expected a checkpoint with {DESCRIPTIONS[name]}")
        return self.networks[name]

    def network(self, name: str, modules: str | None = None) -> Network:
        """Return the network `name`; `baseline` is a baseline of any kind.

        Args:
            modules: the class of another package, such as `mypackage.modules:Gated`, that may be imported as an
                engine's set of modules; it must be that of the checkpoint. With None, the set must be one of this
                package.

        Raises:
            InputError: the checkpoint does not hold the network, its set of modules is not the one named, its settings
                are invalid, or its weights do not fit them or are not finite.
        """
        if name == "baseline":
            name = next((each for each in self.networks if each in BASELINES), name)
        packed, what = self.packed(name), DESCRIPTIONS[name]
        if name == "engine":
            check_named(packed.settings.get("modules"), modules, self.path)
        try:
            with torch.random.fork_rng(devices=[]):  # the initial weights, which are replaced, take no random numbers
                module: Any = CLASSES[name](**packed.settings)
        except Exception as error:  # settings of a wrong type can fail in any way
            raise InputError(f"{self.path}: {what} cannot be built: {_short(error)}") from None
        try:
            module.load_state_dict(packed.weights)
        except RuntimeError as error:
            raise InputError(f"{self.path}: the weights do not fit the settings of {what} ({_short(error)})") from None
        for key, value in module.state_dict().items():
            if not (is_good := value.isfinite()).all():  # every answer would be NaN or the first one
                bad = value[~is_good][0].item()
                raise InputError(f"{self.path}: {key} of {what} holds {bad}, expected finite numbers")
        return Network(name, module, packed.settings, self.vocab, self.recipe, self.path)


def _short(error: Exception) -> str:
    return shorten(" ".join(str(error).split()), 300, placeholder=" ...")


# The content of a file


def _is_mapping(value: Any, of: Callable[[Any], bool] = lambda _: True) -> bool:
    return isinstance(value, Mapping) and all(map(of, value.values()))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


Rules = Mapping[str, tuple[Callable[[Any], bool], str]]
"""By key, the condition on its value, and what is expected, for messages."""
CONTENT: Rules = {
    "networks": (lambda value: _is_mapping(value, _is_mapping), "networks by name"),
    "vocab": (_is_mapping, "a vocabulary"),
    "features": (_is_mapping, "settings by name"),
}
NETWORK: Rules = {
    "kwargs": (_is_mapping, "constructor arguments by name"),
    "weights": (_is_mapping, "tensors by name"),
}
STATE: Rules = {
    "step": (_is_count, "a number of steps"),
    "config": (_is_mapping, "settings by name"),
    "validation_due": (lambda value: type(value) is bool, "true or false"),
    "best": (_is_number, "a finite number"),
    "best_step": (_is_count, "a number of steps"),
    "sums": (lambda value: _is_mapping(value, _is_number), "finite numbers by name"),
    "task": (lambda value: _is_mapping(value, _is_number), "finite numbers by name"),
    "optimizer": (lambda value: _is_mapping(value) and _is_mapping(value.get("state"), _is_mapping), "its state"),
}
"""The keys that a checkpoint needs in addition, so that its run can be resumed."""
TENSOR = torch.is_tensor, "a tensor"
PARAMETER: Rules = dict.fromkeys(("step", "exp_avg", "exp_avg_sq"), TENSOR)
"""The state of the optimiser for one parameter."""


def _check(content: Mapping[str, Any], rules: Rules, where: str = "") -> None:
    """Check the values of some keys.

    Raises:
        InputError: a key is missing, or its value is not what is expected.
    """
    for key, (fits, expected) in rules.items():
        if key not in content:
            raise InputError(f"has no {where}{key}, expected {expected}")
        if not fits(content[key]):
            raise InputError(f"{where}{key} is {content[key]!r:.40}, expected {expected}")


def _check_weights(name: str, weights: Mapping[str, Any]) -> None:
    _check(weights, dict.fromkeys(weights, TENSOR), f"networks.{name}.weights.")


def _parsed(path: Path, content: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint in the content of a file after checking that everything is there and of the right type.

    Raises:
        InputError: a key is missing, or its value is not what is expected.
    """
    _check(content, CONTENT)
    for name, network in content["networks"].items():
        _check(network, NETWORK, f"networks.{name}.")
        _check_weights(name, network["weights"])
    run = None
    if "optimizer" in content:
        _check(content, STATE)
        for number, state in content["optimizer"]["state"].items():
            _check(state, PARAMETER, f"optimizer.state.{number}.")
        run = RunState(**{key: content[key] for key in STATE})
    networks = {name: Packed(each["kwargs"], each["weights"]) for name, each in content["networks"].items()}
    return Checkpoint(path, networks, Vocab.from_json(content["vocab"], "vocabulary"), content["features"], run)


# Files


def step_name(step: int) -> str:
    """Return the file name of the checkpoint after `step` steps."""
    return f"step-{step}.pt"


def step_checkpoints(out: Path) -> list[Path]:
    """Return the numbered checkpoints in the run directory `out`, newest first."""
    found = [(int(match[1]), path) for path in out.glob("step-*.pt") if (match := _NUMBERED.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def checkpoints(out: Path) -> list[Path]:
    """Return what a run in `out` can resume from, newest first: its numbered checkpoints, then the best one."""
    return step_checkpoints(out) + [path for path in [out / BEST] if path.exists()]


def remove_old(out: Path, keep: int) -> None:
    """Remove the numbered checkpoints of the run in `out` except the newest `keep`."""
    for path in step_checkpoints(out)[keep:]:
        path.unlink(missing_ok=True)


def write_checkpoint(checkpoint: Checkpoint) -> None:
    """Write the networks and the state of a run to the checkpoint's path, whole or not at all.

    Raises:
        OSError: the file cannot be written, as on a full disk; the previous file is unchanged.
    """
    run = checkpoint.state
    content = {
        "format": FORMAT,
        "model": run.config["model"],
        **vars(run),
        "vocab": checkpoint.vocab.to_json(),
        "features": dict(checkpoint.recipe),
        "networks": {
            name: {"kwargs": dict(packed.settings), "weights": packed.weights}
            for name, packed in checkpoint.networks.items()
        },
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_bytes(checkpoint.path, buffer.getvalue())


def write_weights(directory: Path, checkpoint: Checkpoint, half: bool = False) -> None:
    """Write the networks of a checkpoint to `best.safetensors` and `config.json` in a directory.

    A tensor has the name of its network before its own, such as `engine.stem.0.weight`.

    Args:
        half: store floating-point weights in float16, from which networks load them in float32.

    Raises:
        OSError: a file cannot be written; the previous file is unchanged.
    """
    weights = {
        f"{name}.{key}": value.clone(memory_format=torch.contiguous_format)  # the library refuses shared memory
        for name, packed in checkpoint.networks.items()
        for key, value in packed.weights.items()
    }
    if half:
        weights = {name: value.half() if value.is_floating_point() else value for name, value in weights.items()}
    run = checkpoint.run
    progress = {} if run is None else {"model": run.config["model"], "step": run.step, "best": run.best}
    config = {
        "format": WEIGHTS_FORMAT,
        **progress,
        "networks": {name: dict(packed.settings) for name, packed in checkpoint.networks.items()},
        "features": dict(checkpoint.recipe),
        "vocab": checkpoint.vocab.to_json(),
    }
    write_bytes(directory / WEIGHTS, save(weights, {"iep": json.dumps(config)}))
    write_json(directory / WEIGHTS_CONFIG, config, indent=1)


def checkpoint_file(path: Path) -> Path:
    """Return the file that `path` stands for: of a run directory, its best checkpoint, or otherwise its newest.

    Raises:
        InputError: the directory holds no checkpoint.
    """
    if not path.is_dir():
        return path
    found = [each for each in (path / BEST, *step_checkpoints(path), path / WEIGHTS) if each.exists()]
    if not found:
        names = f"{BEST}, {step_name(0).replace('0', 'N')} or {WEIGHTS}"
        raise InputError(f"{path}: holds no checkpoint, expected {names}")
    return found[0]


def read_checkpoint(path: Path | str) -> Checkpoint:
    """Read a checkpoint, with tensors on the CPU.

    `path` is as for `checkpoint_file`, or `default` for the networks that come with the package. A checkpoint of the
    original toolkit is converted by `iep.models.original.from_original`.

    Raises:
        InputError: the file is missing (suggests a similar name), truncated or not a checkpoint, holds more than plain
            data, or lacks something or holds it in another type (names it).
    """
    given = Path(path)
    path = checkpoint_file(given)
    with reading(path, "a whole checkpoint file"):
        if not path.exists():
            if str(path) == DEFAULT:
                return _parsed(given, _read_weights(DEFAULT_FILE))
            beside = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
            if hint := nearest(path.name, [*beside, DEFAULT]):
                raise InputError(f"no such file{hint}")
        if path.suffix == SAFETENSORS:
            return _parsed(given, _read_weights(path))
        content = _read(path)
        if is_original(content):
            networks, vocab = from_original(content)
            for name, packed in networks.items():
                _check_weights(name, packed.weights)
            return Checkpoint(given, networks, vocab, {})
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise InputError(f"not a checkpoint of this toolkit, expected format {FORMAT}")
        return _parsed(given, content)


def _read(path: Path) -> Any:
    """Return the content of a torch file without executing anything in it."""
    if zipfile.is_zipfile(path):  # files of torch before 1.6 are not
        with zipfile.ZipFile(path) as archive:
            if (damaged := archive.testzip()) is not None:  # torch does not compare checksums
                raise zipfile.BadZipFile(f"{damaged} is damaged")
    try:
        with torch.serialization.safe_globals(safe_globals()), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")  # of a file that loads all the same
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if (found := re.search(r"GLOBAL \S+", str(error))) is None:
            what = "not a whole checkpoint file, or written with a pickle protocol above 3"
        else:
            what = f"holds more than plain tensors; loading it could execute code ({found[0]})"
        raise InputError(what) from None


def _read_weights(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint without the state of its run."""
    with safe_open(path, "pt") as file:
        config = json.loads((file.metadata() or {}).get("iep", "{}"))
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    if not isinstance(config, dict) or config.get("format") != WEIGHTS_FORMAT:
        raise InputError(f"holds the weights of something else, expected metadata of the format {WEIGHTS_FORMAT}")
    _check(config, CONTENT)
    networks: dict[str, Any] = {name: {"kwargs": kwargs, "weights": {}} for name, kwargs in config["networks"].items()}
    for name, weight in weights.items():
        network, _, key = name.partition(".")
        networks.setdefault(network, {"weights": {}})["weights"][key] = weight
    return config | {"networks": networks}


def read_newest(out: Path) -> Checkpoint | None:
    """Read the newest checkpoint of the run in `out`, to resume from, or None if there is no checkpoint.

    Raises:
        InputError: it is damaged or not the checkpoint of a run (names the one before it, if any).
    """
    if not (found := checkpoints(out)):
        return None
    try:
        newest = read_checkpoint(found[0])
    except InputError as error:
        advice = f"; remove it to resume from {found[1].name}" if len(found) > 1 else ""
        raise InputError(f"{error}{advice}") from None
    if newest.run is None:
        raise InputError(f"{found[0]}: of the original toolkit; a run can start from it, but not resume from it")
    return newest
