"""A tiny preprocessed data set for tests: questions of every CLEVR type written by hand, features drawn at random.

`write_data` leaves what `iep-preprocess` would: vocab.json, {train,val,test}_questions.h5 and features of every split.
The test split has neither programs nor answers. With the settings of `TINY` a training step takes milliseconds.
At the end, what the tests of commands share.
"""

import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from click.testing import Result
from torch import nn

from iep.config import SECTIONS, Config, read_config, to_dict
from iep.data.datasets import ClevrDataset
from iep.data.features import Features
from iep.data.question_file import read_questions, split_files
from iep.errors import InputError
from iep.models.checkpoint import BEST, FORMAT, step_checkpoints
from iep.models.network import CLASSES
from iep.vocab import END, START, Vocab, index_tokens, tokenize

CHANNELS, GRID = 3, 4
TRAIN, VAL, TEST = 39, 26, 13
IMAGES = 5

TINY = (
    "workers=0",
    "batch_size=8",
    "iterations=4",
    "validate_every=2",
    "log_every=1",
    "learning_rate=0.01",
    "device=cpu",
)
SIZES = (
    *(
        f"{network}.{size}"
        for network in ("generator", "lstm", "cnn_lstm", "cnn_lstm_sa")
        for size in ("embedding_dim=6", "hidden_dim=10", "num_layers=1")
    ),
    *(f"{network}.classifier_dims=[8]" for network in ("lstm", "cnn_lstm", "cnn_lstm_sa")),
    "engine.module_dim=4",
    "engine.stem_widths=[]",
    "engine.classifier_projection=4",
    "engine.classifier_hidden=[12]",
    "cnn_lstm.cnn_res_block_dim=4",
    "cnn_lstm.cnn_projection=4",
    "cnn_lstm_sa.attention_dim=5",
    "backbone.widths=[4,4,8]",
    "backbone.depths=[0,0,1]",
    "backbone.image_size=[48,32]",
)

_COLORS = ("red", "green", "blue")
_SHAPES = ("cube", "sphere", "cylinder")
_BOTH = "filter_color[{c}] scene", "filter_shape[{s}] scene"
_UNIQUE = "unique filter_color[{c}] scene", "unique relate[left] unique filter_shape[{s}] scene"
_YES_NO = ("yes", "no")
_TEMPLATES: tuple[tuple[str, str, Sequence[str]], ...] = (
    ("Are there any {c} {s}s?", "exist filter_shape[{s}] filter_color[{c}] scene", _YES_NO),
    ("How many things are {c} or {s}s?", f"count union {_BOTH[0]} {_BOTH[1]}", ("0", "1", "2")),
    ("Are there as many {c} things as {s}s?", f"equal_integer count {_BOTH[0]} count {_BOTH[1]}", _YES_NO),
    ("Are there fewer {c} things than {s}s?", f"less_than count {_BOTH[0]} count {_BOTH[1]}", _YES_NO),
    ("Are there more {c} things than {s}s?", f"greater_than count {_BOTH[0]} count {_BOTH[1]}", _YES_NO),
    ("What size is the {c} {s}?", "query_size unique filter_shape[{s}] filter_color[{c}] scene", ("large", "small")),
    ("There is a {s}; what color is it, {c}?", f"query_color {_UNIQUE[1]}", _COLORS),
    ("What is the {c} thing made of, left of the {s}?", f"query_material {_UNIQUE[1]}", ("metal", "rubber")),
    ("What shape is the {c} thing, no {s}?", f"query_shape {_UNIQUE[0]}", _SHAPES),
    *(
        (
            f"Is the {attribute} of the {{c}} thing that of the thing left of the {{s}}?",
            f"equal_{attribute} query_{attribute} {_UNIQUE[0]} query_{attribute} {_UNIQUE[1]}",
            _YES_NO,
        )
        for attribute in ("size", "color", "material", "shape")
    ),
)


def _examples() -> list[tuple[list[str], list[str], str]]:
    """Question tokens, prefix program and answer of each question: every type for every color, no text twice."""
    random = np.random.default_rng(0)
    examples = []
    for color, shape in zip(_COLORS, _SHAPES, strict=True):
        for text, program, answers in _TEMPLATES:
            words = {"c": color, "s": shape}
            tokens = program.format(**words).split()
            examples.append((tokenize(text.format(**words)), tokens, str(random.choice(answers))))
    return examples


EXAMPLES = _examples()
VOCAB = Vocab(
    *(
        index_tokens(tokens)
        for tokens in (
            (word for words, _, _ in EXAMPLES for word in words),
            (token for _, program, _ in EXAMPLES for token in program),
            (answer for _, _, answer in EXAMPLES),
        )
    )
)


def padded(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """(N, longest row + 2) int32: each row between `<START>` and `<END>`, padded on the right."""
    matrix = np.zeros((len(rows), max(map(len, rows)) + 2), dtype=np.int32)
    for place, row in enumerate(rows):
        matrix[place, : len(row) + 2] = [START, *row, END]
    return matrix


def arrays(count: int) -> dict[str, np.ndarray]:
    """The datasets of a questions file with the first `count` examples, images in no particular order."""
    examples = [EXAMPLES[n % len(EXAMPLES)] for n in range(count)]
    return {
        "questions": padded([[VOCAB.question_index[word] for word in words] for words, _, _ in examples]),
        "programs": padded([[VOCAB.program_index[token] for token in program] for _, program, _ in examples]),
        "answers": np.array([VOCAB.answer_index[answer] for _, _, answer in examples], dtype=np.int32),
        "image_idxs": (np.arange(count, dtype=np.int32) * 3) % IMAGES,
        "orig_idxs": np.arange(count, dtype=np.int32) + 1000,
        "question_families": np.arange(count, dtype=np.int32) % len(_TEMPLATES),
    }


def write_h5(path: Path, datasets: dict[str, np.ndarray]) -> Path:
    """An HDF5 file with exactly these datasets, in place of any that stood there."""
    with h5py.File(path, "w") as file:
        for name, values in datasets.items():
            file[name] = values
    return path


def features(seed: int, dtype: str = "float32", channels: int = CHANNELS, grid: int = GRID) -> np.ndarray:
    """(IMAGES, channels, grid, grid) seeded random features."""
    return np.random.default_rng(seed).normal(size=(IMAGES, channels, grid, grid)).astype(dtype)


def write_data(out: Path, dtype: str = "float32") -> Path:
    """The whole data set in the directory `out`."""
    out.mkdir(parents=True, exist_ok=True)
    VOCAB.save(out / "vocab.json")
    for seed, (split, count) in enumerate((("train", TRAIN), ("val", VAL), ("test", TEST))):
        datasets = arrays(count)
        if split == "test":
            del datasets["programs"], datasets["answers"], datasets["question_families"]
        write_h5(out / f"{split}_questions.h5", datasets)
        write_h5(out / f"{split}_features.h5", {"features": features(seed, dtype)})
    return out


def open_train(data: Path, **kwargs: object) -> ClevrDataset:
    """Return the training questions with the features of their images."""
    questions_path, features_path = split_files(data, "train")
    return ClevrDataset(read_questions(questions_path, VOCAB), Features(features_path), **kwargs)


def tiny(*models: str) -> tuple[str, ...]:
    """Return the settings of `TINY` and of small networks of the models."""
    sizes = [each for each in SIZES if {*models} & {*SECTIONS[each.partition(".")[0]]}]
    return (*TINY, *sizes)


def tiny_config(data: Path, model: str, *settings: str) -> Config:
    """The settings of `tiny` for a model trained on `data`, and further ones over them."""
    return read_config(None, [*tiny(model), f"model={model}", f"data={data}", *settings])


def newest(out: Path) -> Path:
    """The newest numbered checkpoint of a run."""
    return step_checkpoints(out)[0]


def content(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint, for a run directory that of the best one, as it is in the file."""
    return torch.load(path / BEST if path.is_dir() else path, weights_only=True)


def save_content(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint with some content."""
    torch.save({"format": FORMAT, **content}, path)


def build(name: str, settings: Mapping[str, Any]) -> nn.Module:
    """Return a network with new weights, with the defaults of settings that are missing."""
    return CLASSES[name](**to_dict(getattr(Config, name)) | dict(settings))


def assert_one_error(result: Result, *expected: str, code: int = 1) -> None:
    """A command ended with `code`, one line that begins with `Error:` and holds what is expected, and no traceback."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    lines = [line for line in result.output.splitlines() if line.startswith("Error:")]
    assert len(lines) == 1, result.output
    for part in expected:
        assert part in lines[0], lines[0]
    assert result.exit_code == code


@contextmanager
def refused(*expected: object) -> Iterator[None]:
    """The block raises an `InputError` of one line that begins with the first of `expected` and holds the others."""
    with pytest.raises(InputError) as caught:
        yield
    message, (beginning, *others) = str(caught.value), map(str, expected)
    assert message.startswith(beginning), message
    assert "\n" not in message
    assert [each for each in others if each not in message] == [], message


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """No file grows beyond `size` bytes: what a full disk does, without filling one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
