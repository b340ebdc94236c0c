"""Files of the original toolkit that are not what they should be, or hold more than they should: one line each."""

import argparse
import collections
import os
import pickle
import random
import re
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_cases import is_refused, mutated, places, refusal
from evaluate_cases import iep_eval
from original_cases import baseline_file, engine_file, generator_file, vocab, write
from tiny_data import CHANNELS, GRID, VOCAB, assert_one_error, tiny_config

from iep.errors import InputError
from iep.models.build import load_network
from iep.models.checkpoint import load_checkpoint
from iep.training.run_training import train

CPU = torch.device("cpu")
BOTH_LAYOUTS = pytest.mark.parametrize("archive", [True, False], ids=["archive", "of PyTorch before 1.6"])
SMALL = {"feature_dim": (CHANNELS, GRID, GRID)}


def joint() -> dict[str, Any]:
    return generator_file() | engine_file(**SMALL)


# What old files hold


HARMLESS: dict[str, Any] = {
    "args as a namespace": {"args": argparse.Namespace(model_type="PG", num_val_samples=None, lr=5e-4)},
    "numpy numbers": {
        "val_accs": [np.float64(0.5), np.float32(0.25), np.float16(0.5)],
        "model_t": np.int64(3),
        "flags": [np.bool_(True), np.int32(7), np.uint8(1)],
        "kind": np.dtype("float32"),
    },
    "numpy arrays": {"confusion": np.arange(6).reshape(2, 3), "names": np.array(["yes", "no"])},
    "an ordered dictionary": {"best": collections.OrderedDict(a=1)},
    "sizes, devices and dtypes": {
        "shape": torch.Size([1, 2]),
        "device": torch.device("cuda:0"),
        "dtype": torch.float16,
    },
    "tensors among the statistics": {"train_rewards": [torch.tensor(0.5)], "weight": torch.nn.Parameter(torch.ones(2))},
    "bytes and sets": {"digest": b"\x00\xff", "seen": {1, 2}},
}


@BOTH_LAYOUTS
@pytest.mark.parametrize("more", HARMLESS.values(), ids=HARMLESS)
def test_what_old_files_hold_besides_tensors_loads(more: dict[str, Any], archive: bool, tmp_path: Path):
    path = write(tmp_path / "old.pt", joint() | more, _use_new_zipfile_serialization=archive)
    assert set(load_checkpoint(path)["networks"]) == {"generator", "engine"}


@pytest.mark.parametrize("core", [b"numpy.core", b"numpy._core"])
@BOTH_LAYOUTS
def test_numpy_numbers_load_by_the_paths_of_every_version(core: bytes, archive: bool, tmp_path: Path):
    content = joint() | {"val_accs": [np.float64(0.5), np.int64(3)]}
    path = write(tmp_path / "old.pt", content, _use_new_zipfile_serialization=archive)

    def renamed(raw: bytes) -> bytes:
        changed = re.sub(rb"numpy\._?core\.multiarray", core + b".multiarray", raw)
        assert core + b".multiarray\nscalar" in changed
        return changed

    if archive:
        with zipfile.ZipFile(path) as old:
            parts = {name: old.read(name) for name in old.namelist()}
        with zipfile.ZipFile(path, "w") as new:
            for name, raw in parts.items():
                new.writestr(name, renamed(raw) if name.endswith("data.pkl") else raw)
    else:
        path.write_bytes(renamed(path.read_bytes()))
    assert set(load_checkpoint(path)["networks"]) == {"generator", "engine"}


def test_options_that_are_numpy_numbers_are_read(tmp_path: Path):
    file = engine_file(**SMALL)
    file["execution_engine_kwargs"] |= {"module_dim": np.int64(4), "classifier_dropout": np.float32(0.25)}
    kwargs = load_checkpoint(write(tmp_path / "old.pt", file))["networks"]["engine"]["kwargs"]
    assert (kwargs["module_dim"], kwargs["classifier_dropout"]) == (4, 0.25)
    assert type(kwargs["module_dim"]) is int


class Made:
    """Pickles as the call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize("kind", [[("a", "O")], "O", "O8", "V8", "f8x", "M8"])
def test_bytes_that_a_file_calls_objects_are_passed_over(kind: Any, tmp_path: Path):
    """As numpy itself would make them, they would be taken for addresses of objects."""
    scalar = np.float64(0).__reduce__()[0]
    content = np.array([0x4141414141414141]).tobytes()
    told = [Made(scalar, Made(np.dtype, kind), content), Made(scalar, Made(np.dtype, "f8"), content + b"A")]
    path = write(tmp_path / "old.pt", joint() | {"told": told})
    assert set(load_checkpoint(path)["networks"]) == {"generator", "engine"}


@BOTH_LAYOUTS
def test_a_file_of_a_gpu_loads_on_a_cpu(archive: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:1")
    path, file = tmp_path / "old.pt", joint()
    write(path, file, _use_new_zipfile_serialization=archive)
    if not archive:
        raw = path.read_bytes()
        assert b"ctorch\nFloatStorage" in raw
        path.write_bytes(raw.replace(b"ctorch\nFloatStorage", b"ctorch.cuda\nFloatStorage"))
    assert b"cuda:1" in path.read_bytes()
    monkeypatch.undo()
    weights = load_checkpoint(path)["networks"]["generator"]["weights"]
    for name, value in file["program_generator_state"].items():
        assert torch.equal(weights[name], value)
        assert weights[name].device == CPU


class OldPickler(pickle.Pickler):
    """Writes tensors as PyTorch 0.1 to 0.3 did."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        return torch._utils._rebuild_tensor, (
            value._typed_storage(),
            value.storage_offset(),
            tuple(value.size()),
            value.stride(),
        )


def test_a_file_of_the_first_pytorch_loads(tmp_path: Path):
    module, file = SimpleNamespace(__name__="old", Pickler=OldPickler, dump=pickle.dump), joint()
    path = write(tmp_path / "old.pt", file, _use_new_zipfile_serialization=False, pickle_module=module)
    assert b"_rebuild_tensor\n" in path.read_bytes()
    networks = load_checkpoint(path)["networks"]
    for name, value in networks["engine"]["weights"].items():
        assert torch.equal(value, file["execution_engine_state"][name])


# What would execute


@BOTH_LAYOUTS
@pytest.mark.parametrize("how", ["path", "system", "eval", "namespace", "weights", "array"])
def test_a_malicious_file_executes_nothing_and_is_named_with_what_it_holds(how: str, archive: bool, tmp_path: Path):
    victim = tmp_path / "executed"
    by_shell, by_eval = Made(os.system, f"touch {victim}"), Made(eval, f"open({str(victim)!r}, 'w')")
    content = {
        "path": {"args": Made(Path.touch, victim)},
        "system": {"args": by_shell},
        "eval": {"vocab": by_eval},
        "namespace": {"args": argparse.Namespace(seed=by_eval)},
        "weights": {"program_generator_state": {"encoder_embed.weight": by_shell}},
        "array": {"confusion": np.array([by_shell], dtype=object)},
    }[how]
    path = write(tmp_path / "old.pt", joint() | content, _use_new_zipfile_serialization=archive)
    message = refusal(path)
    assert not victim.exists()
    assert "holds more than plain tensors; loading it could execute code (GLOBAL " in message
    torch.load(path, weights_only=False)
    assert victim.exists(), "the trap would not have sprung"


def test_what_may_be_loaded_is_allowed_for_the_file_alone(tmp_path: Path):
    before = set(torch.serialization.get_safe_globals())  # torch gives them in any order
    load_checkpoint(write(tmp_path / "old.pt", joint()))
    assert set(torch.serialization.get_safe_globals()) == before


# What does not fit


def _changed(file: dict[str, Any], part: str, **changes: Any) -> dict[str, Any]:
    changed = file[part] | changes
    return file | {part: {name: value for name, value in changed.items() if value is not None}}


EE, PG = engine_file(**SMALL), generator_file()
STATE, KWARGS = "execution_engine_state", "execution_engine_kwargs"
SHORT = vocab()
SHORT["answer_token_to_idx"] = dict(list(SHORT["answer_token_to_idx"].items())[:-1])
KWARGS_OF_ENGINES = [
    ({"module_depth": 3}, "unknown option 'module_depth'"),
    ({"classifier_downsample": "maxpool3"}, "expected one of none, maxpool2, maxpool4"),
    ({"module_dim": "4"}, "module_dim is '4', expected a whole number"),
    ({"module_dim": 0}, "module_dim is 0, expected at least 1"),
    ({"module_residual": 2}, "module_residual is 2, expected true or false"),
    ({"classifier_dropout": 1.5}, "classifier_dropout is 1.5, expected at most 1"),
    ({"feature_dim": (3, 4)}, "feature_dim is (3, 4), expected (a whole number, a whole"),
    ({"vocab": SHORT}, "vocab has other answer tokens than the checkpoint's own vocab"),
]
KWARGS_OF_GENERATORS = [
    ({"encoder_vocab_size": 7}, "encoder_vocab_size is 7, expected"),
    ({"end_token": 5}, "end_token is 5, expected 2"),
    ({"rnn_num_layers": 0}, "rnn_num_layers: num_layers is 0, expected"),
]
WEIGHTS = [
    ({"scene.conv2.bias": None}, 'Missing key(s) in state_dict: "scene.conv2.bias"'),
    ({"stem.0.bias": torch.zeros(9)}, "size mismatch for stem.0.bias"),
    ({"stem.0.bias": [1, 2]}, "stem.0.bias is of type list, expected Tensor"),
    ({"extra": torch.ones(1)}, 'Unexpected key(s) in state_dict: "extra"'),
]
"""None takes a weight away."""
MISMATCHES: list[tuple[str, dict[str, Any], str]] = [
    *(("engine", _changed(EE, KWARGS, **changes), problem) for changes, problem in KWARGS_OF_ENGINES),
    *(("engine", _changed(EE, STATE, **changes), problem) for changes, problem in WEIGHTS),
    *(
        ("generator", _changed(PG, "program_generator_kwargs", **changes), problem)
        for changes, problem in KWARGS_OF_GENERATORS
    ),
    ("engine", EE | {STATE: None}, "execution_engine_state is of type NoneType, expected names and values"),
    ("engine", _changed(EE | {"vocab": SHORT}, KWARGS, vocab=SHORT), "size mismatch for classifier"),
    ("engine", EE | {"vocab": None}, "vocab: not a vocabulary"),
    ("engine", {}, "a checkpoint of the original toolkit without any network"),
    ("engine", PG, "holds a program generator, expected a checkpoint with an execution engine"),
    ("lstm", baseline_file("LSTM") | {"baseline_type": "GRU"}, "baseline_type is 'GRU', expected one of LSTM, CNN"),
    ("lstm", baseline_file("LSTM") | {"baseline_type": "CNN+LSTM"}, "holds a CNN+LSTM, expected"),
]


@pytest.mark.parametrize(("name", "content", "problem"), MISMATCHES, ids=[problem for *_, problem in MISMATCHES])
def test_a_file_that_does_not_fit_itself_is_one_line(name: str, content: dict[str, Any], problem: str, tmp_path: Path):
    with pytest.raises(InputError) as caught:
        load_network(write(tmp_path / "old.pt", content), name, VOCAB, CPU)
    message = str(caught.value)
    assert problem in message
    assert "\n" not in message
    assert len(message) < 700


def test_a_file_with_a_part_changed_is_loaded_or_refused_by_its_name(tmp_path: Path):
    content, draw, refused = joint(), random.Random(0), 0
    for place in draw.sample(found := list(places(content)), min(len(found), 100)):
        path = write(tmp_path / "old.pt", mutated(content, place, draw))
        for name in ("engine", "generator"):
            refused += is_refused(path, partial(load_network, path, name, VOCAB, CPU))
    assert refused > 50


def test_a_file_for_another_vocabulary_or_other_features_is_one_line_of_the_command(data: Path, tmp_path: Path):
    held = vocab()
    index = held["question_token_to_idx"]
    held["question_token_to_idx"] = {word.replace("red", "crimson"): place for word, place in index.items()}
    path = write(tmp_path / "old.pt", generator_file() | {"vocab": held})
    result = iep_eval("--pg", path, "--data", data, "--workers", 0)
    assert_one_error(
        result, f"{path}: trained with another vocabulary: question token", "'crimson' there and 'red' in the data"
    )
    wide = write(tmp_path / "wide.pt", engine_file(feature_dim=(CHANNELS, 6, 6)))
    assert_one_error(iep_eval("--ee", wide, "--data", data, "--workers", 0), "the engine is made for (3, 6, 6)")


def test_a_run_cannot_go_on_from_a_file_of_the_originals(data: Path, tmp_path: Path):
    (tmp_path / "run").mkdir()
    write(tmp_path / "run" / "step-4.pt", generator_file())
    with pytest.raises(
        InputError, match=r"step-4.pt: of the original toolkit; a run can start from it, but not resume"
    ):
        train(tiny_config(data, "pg"), tmp_path / "run", resume=True)
