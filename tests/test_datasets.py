"""Minibatches: what a batch holds, that it depends on nothing but seed and step, and what is said of damaged files."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from clevr_files import write_clevr
from features_cases import SMALL, run
from tiny_data import (
    CHANNELS,
    GRID,
    IMAGES,
    TRAIN,
    VOCAB,
    arrays,
    features,
    open_train,
    refused,
    write_data,
    write_h5,
)

from iep.data.datasets import Batch, ClevrDataset, sequential_batches, training_batches
from iep.data.features import Features
from iep.data.loader import Loading
from iep.data.ordering import make_order
from iep.data.question_file import read_questions, split_files
from iep.errors import InputError
from iep.execution_engine.choices import make_module_set
from iep.execution_engine.program_plan import plan_programs
from iep.execution_engine.roles import roles_of
from iep.runtime.files import row_checksums
from iep.vocab import END, NULL, START, UNK, Vocab

ROLES = roles_of(VOCAB.program, make_module_set("iep", dim=1, residual=True, norm="none", scene="module"))
plan = partial(plan_programs, program_tokens=VOCAB.program, roles=ROLES, batching="improved")


@pytest.fixture
def damaged(data: Path, tmp_path: Path) -> Path:
    """A copy of the data to damage."""
    return Path(shutil.copytree(data, tmp_path / "data"))


def by_question(batch: Batch) -> torch.Tensor:
    """(B, C, H, W) features of every question's image."""
    return batch.features[batch.image_rows]


def assert_same_batches(ours: list[Batch], theirs: list[Batch]) -> None:
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        for name in ("index", "questions", "programs", "answers", "features"):
            assert torch.equal(getattr(our, name), getattr(their, name)), name
        np.testing.assert_array_equal(our.image_rows, their.image_rows)
        for name in ("op", "args", "example", "roots"):
            np.testing.assert_array_equal(getattr(our.plan.graph, name), getattr(their.plan.graph, name))
        assert str(our.plan.plan) == str(their.plan.plan)


# What a batch holds


def test_a_batch_holds_the_questions_asked_for_with_their_images_features(data: Path):
    batch = open_train(data).batch((np.array([7, 3, 20]), None))
    written, maps = arrays(TRAIN), features(seed=0)
    assert batch.index.tolist() == [7, 3, 20]
    for name in ("questions", "programs"):
        rows = written[name][[7, 3, 20]]
        longest = np.flatnonzero((rows != NULL).any(axis=0)).max() + 1
        assert getattr(batch, name).tolist() == rows[:, :longest].tolist(), "as wide as the longest"
    assert batch.answers.tolist() == written["answers"][[7, 3, 20]].tolist()
    np.testing.assert_array_equal(by_question(batch), maps[written["image_idxs"][[7, 3, 20]]])
    assert {t.dtype for t in (batch.questions, batch.programs, batch.answers)} == {torch.int64}
    assert batch.plan is None
    every = open_train(data, make_plan=plan).batch((np.arange(TRAIN), None))
    assert len(every.features) == len(set(written["image_idxs"].tolist())) < TRAIN
    assert_same_batches([every.to(torch.device("cpu"))], [every])
    questions_path, features_path = split_files(data, "test")
    test = ClevrDataset(read_questions(questions_path, VOCAB), Features(features_path)).batch((np.arange(2), None))
    assert (test.programs, test.answers) == (None, None)
    assert by_question(test).shape == (2, CHANNELS, GRID, GRID)


def test_questions_encoded_with_another_vocabulary_of_the_same_size_are_refused(damaged: Path):
    path = write_h5(damaged / "q.h5", {name: values for name, values in arrays(4).items() if name != "orig_idxs"})
    assert read_questions(path, VOCAB).orig_idxs.tolist() == [0, 1, 2, 3], "without numbers of their own, positions"
    with h5py.File(path, "r+") as file:
        file.attrs["vocab_digest"] = VOCAB.digest
    assert len(read_questions(path, VOCAB)) == 4
    other = Vocab((*VOCAB.question[:-1], "zebra"), VOCAB.program, VOCAB.answer)
    with pytest.raises(InputError, match="encoded with another vocabulary"):
        read_questions(path, other)


# Features


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_features_keep_the_files_dtype_until_they_are_moved_and_are_float32_then(tmp_path: Path, dtype: str):
    batch = open_train(write_data(tmp_path, dtype=dtype)).batch((np.arange(3), None))
    assert batch.features.dtype == getattr(torch, dtype)
    moved = batch.to(torch.device("cpu"))
    assert moved.features.dtype == torch.float32
    expected = features(0, dtype)[arrays(3)["image_idxs"]].astype("float32")
    np.testing.assert_array_equal(by_question(moved), expected)


COMPRESSED, CHUNKED = {"chunks": (1, CHANNELS, GRID, GRID), "compression": "gzip"}, {"chunks": (2, 1, GRID, GRID)}


@pytest.mark.parametrize("options", [COMPRESSED, CHUNKED, {"dtype": ">f4"}, {}])
@pytest.mark.parametrize("userblock", [0, 512])
def test_features_are_read_in_any_order_however_they_are_stored(tmp_path: Path, options: dict, userblock: int):
    with h5py.File(tmp_path / "features.h5", "w", userblock_size=userblock) as file:
        file.create_dataset("features", data=features(0), **options)
    stored = Features(tmp_path / "features.h5")
    for rows in ([0, 1, 2], [2, 1, 0], [3, 3, 3], [1, 4, 1, 0], [2]):
        read = stored.read(np.array(rows))
        assert read.dtype == torch.float32
        np.testing.assert_array_equal(read, features(0)[rows])


# Loading


def load(data: Path, steps: range, workers: int) -> list[Batch]:
    dataset = open_train(data, make_plan=plan)
    order = make_order(None, dataset.questions.image_idxs, (), batch_size=8, seed=1)
    return list(training_batches(dataset, order, steps, Loading(workers, prefetch=1)))


def test_a_resumed_run_is_given_the_batches_that_an_unbroken_one_would_be(data: Path):
    assert_same_batches(load(data, range(12), 0)[7:], load(data, range(7, 12), 0))


def test_workers_give_the_batches_and_plans_of_the_process_itself_and_draw_no_numbers(data: Path):
    before = torch.get_rng_state()
    assert_same_batches(load(data, range(12), 2), load(data, range(12), 0))
    assert torch.equal(torch.get_rng_state(), before)  # training uses this generator


@pytest.mark.parametrize(("batch_size", "sizes"), [(16, [16, 16, 7]), (100, [39])])
def test_sequential_batches_hold_every_example_once_in_order(data: Path, batch_size: int, sizes: list[int]):
    batches = sequential_batches(open_train(data), batch_size)
    for _ in range(2):  # validation goes through them again and again
        assert [len(batch.index) for batch in batches] == sizes
        assert torch.cat([batch.index for batch in batches]).tolist() == list(range(TRAIN))


# Damaged files


def token(name: str, row: int, value: int) -> dict[str, np.ndarray]:
    values = arrays(TRAIN)[name]
    values.reshape(TRAIN, -1)[row, -1] = value
    return {name: values}


def rows_without_token(*rows: int) -> np.ndarray:
    values = np.full((TRAIN, 5), UNK)
    values[:, 0] = START
    for row in rows:
        values[row] = (START, END, NULL, NULL, NULL)
    return values


WAYS_ELSEWHERE = ("external link", "soft link to an external link", "virtual", "virtual without source", "external")


def elsewhere(name: str, way: str = "external link", missing: bool = False) -> Callable[[Path], None]:
    """Return a function that moves a dataset to another file, with the values at the same place in both files."""

    def move(path: Path) -> None:
        other = path.with_name("other.h5")
        shutil.copy(path, other)
        with h5py.File(path, "r+") as file:
            held = file.pop(name)
            shape, dtype, offset = held.shape, held.dtype, held.id.get_offset()
            layout = h5py.VirtualLayout(shape, dtype)
            source = other if way == "virtual" else "missing.h5"
            layout[...] = h5py.VirtualSource(source, name, shape)
            if way.startswith("virtual"):
                file.create_virtual_dataset(name, layout)
            elif way == "external":
                file.create_dataset(name, shape, dtype, external=[(str(other), offset, held.nbytes)])
            else:
                file["link"] = h5py.ExternalLink(str(other), name)
                file[name] = h5py.SoftLink("/link") if "soft" in way else file.get("link", getlink=True)
        if missing:
            other.unlink()

    return move


def cut(share: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(share * path.stat().st_size))


NOT_WHOLE = "not a whole HDF5 file"
UNREADABLE = [
    *((cut(share), NOT_WHOLE) for share in (0.0, 0.9)),
    (Path.unlink, "no such file, expected a whole HDF5 file of iep-preprocess"),
]
QUESTIONS: list[tuple[dict | Callable[[Path], None], str]] = [
    ({"questions": None}, "has no dataset 'questions'"),
    ({"questions": np.zeros((TRAIN, 1), "i4")}, "questions is (39, 1) int32, expected integers (39, 2 or more)"),
    ({"programs": np.zeros((TRAIN - 1, 9), "i4")}, "programs is (38, 9) int32, expected integers (39, 2 or more)"),
    ({"answers": np.zeros(TRAIN + 1, "i4")}, "answers is (40,) int32, expected integers (39,)"),
    (token("questions", 17, 4000), "questions, row 17: index 4000 is not in the vocabulary of 45 tokens"),
    ({"image_idxs": np.full(TRAIN, -1)}, "image_idxs, row 0: is -1, expected 0 or more"),
    ({"questions": rows_without_token(7)}, "questions, row 7: holds no token"),
    ({"programs": rows_without_token(0, 9)}, "programs, row 0: holds no token"),
    (elsewhere("image_idxs"), "image_idxs is stored in another file"),
    (elsewhere("programs"), "programs is stored in another file"),
    (token("programs", 5, 27), "programs, row 5: index 27 is not in the vocabulary of 27 tokens"),
]
FEATURES: list[tuple[dict | Callable[[Path], None], str]] = [
    ({"feature": features(0)}, "has no dataset 'features'"),
    ({"features": features(0)[0]}, f"features is ({CHANNELS}, {GRID}, {GRID}) float32, expected (N, C, H, W)"),
    *((elsewhere("features", way), "features is stored in another file") for way in WAYS_ELSEWHERE),
    (elsewhere("features", missing=True), "has no dataset 'features'"),
    ({"features": np.zeros((IMAGES, 7, 9, 512), "f4")}, "features is (5, 7, 9, 512), channels last"),
    ({"features": features(0), "checksums": np.zeros(2)}, "checksums is (2,) float64, expected one a row"),
    ({"features": features(0)[:3]}, "train_questions.h5 is about image 3"),
]


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        *(("train_questions.h5", *case) for case in [*UNREADABLE, *QUESTIONS]),
        *(("train_features.h5", *case) for case in [*UNREADABLE, *FEATURES]),
    ],
)
def test_a_file_that_cannot_be_used_is_named_in_one_line(damaged: Path, name: str, change, problem: str):
    path = damaged / name
    if callable(change):
        change(path)
    else:
        datasets = (arrays(TRAIN) if "questions" in name else {}) | change
        write_h5(path, {key: values for key, values in datasets.items() if values is not None})
    with refused(f"{path}: ", problem):
        open_train(damaged)


def test_the_recorded_backbone_tells_that_a_wide_map_is_channels_first(tmp_path: Path):
    path = write_h5(tmp_path / "features.h5", {"features": np.zeros((1, 3, 4, 512), "f4")})
    with h5py.File(path, "r+") as file:
        file["features"].attrs["backbone"] = "wide"
    assert Features(path).shape == (1, 3, 4, 512)


@pytest.mark.parametrize("workers", [0, 1])
def test_features_that_cannot_be_read_are_named_with_their_row(damaged: Path, workers: int):
    maps, checksums = features(0), row_checksums(features(0))
    checksums[3] += 1
    path = write_h5(damaged / "train_features.h5", {"features": maps, "checksums": checksums})
    with refused(f"{path}: features, row 3 is damaged"):
        list(sequential_batches(open_train(damaged), 8, Loading(workers)))


# Flipped bits


def preprocess(clevr: Path, out: Path, *more: str, code: int = 0) -> str:
    flags = (*SMALL, "--dtype", "float16")
    return run(clevr, "--out", out, "--split", "train", *flags, *more, only=None, code=code)


@pytest.fixture
def clevr(tmp_path: Path) -> Path:
    return write_clevr(tmp_path / "CLEVR", images=4)


@pytest.fixture
def out(clevr: Path, tmp_path: Path) -> Path:
    preprocess(clevr, tmp_path / "data")
    return tmp_path / "data"


def flip(content: bytes, bits: np.ndarray) -> bytes:
    damaged = bytearray(content)
    for bit in bits.tolist():
        damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def values_of(path: Path, vocab: Vocab) -> list[np.ndarray | None]:
    if path.name.endswith("_features.h5"):
        features = Features(path)
        return [features.read(np.arange(len(features))).numpy()]
    questions = read_questions(path, vocab)
    return [getattr(questions, name) for name in ("questions", "image_idxs", "orig_idxs", "programs", "answers")]


@pytest.mark.parametrize(
    ("name", "flips"), [*product(("train_questions.h5", "train_features.h5"), (1, 3)), ("structure", 1)]
)
def test_flipped_bits_are_named_or_harm_nothing(out: Path, name: str, flips: int):
    path, vocab = out / name.replace("structure", "train_features.h5"), Vocab.load(out / "vocab.json")
    content, written = path.read_bytes(), values_of(path, vocab)
    flipped = np.random.default_rng(flips).integers(0, 8 * len(content), (100, flips))
    if name == "structure":
        flipped = np.arange(0, 8 * content.index(written[0][0].tobytes()), 19)[:, None]
    messages = []
    for bits in flipped:
        path.write_bytes(flip(content, bits))
        try:
            read = values_of(path, vocab)
        except InputError as error:
            messages.append(str(error))
        else:
            for ours, theirs in zip(read, written, strict=True):
                np.testing.assert_array_equal(ours, theirs)
    assert len(messages) > 20
    assert all(message.startswith(f"{path}: ") and (name == "structure" or "\n" not in message) for message in messages)


@pytest.mark.parametrize("name", ["train_questions.h5", "train_features.h5"])
def test_verify_finds_damage_in_a_finished_file_and_overwrite_makes_it_anew(clevr: Path, out: Path, name: str):
    assert "already done" in preprocess(clevr, out, "--verify")
    path = out / name
    sound = path.read_bytes()
    with h5py.File(path) as file:
        place = file[name.removeprefix("train_").removesuffix(".h5")].id.get_offset()
    path.write_bytes(flip(sound, np.array([8 * place + 77])))
    damaged = path.read_bytes()
    with pytest.raises(InputError, match=r"damaged, .*iep-preprocess --verify --overwrite"):
        values_of(path, Vocab.load(out / "vocab.json"))
    assert "already done" in preprocess(clevr, out)
    line = preprocess(clevr, out, "--verify", code=1)
    assert str(path) in line
    assert "damaged" in line
    assert path.read_bytes() == damaged
    preprocess(clevr, out, "--verify", "--overwrite")
    assert path.read_bytes() == sound
